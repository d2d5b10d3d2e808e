"""The page's files: what is served, with which headers, and that they need nothing from elsewhere."""

from __future__ import annotations

import re
from importlib import resources

import httpx
import pytest
from tests.server.apps import serve

FOLDER = resources.files("sash.server") / "page"
FILES = sorted(file.name for file in FOLDER.iterdir())
TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}


def test_the_page_and_its_files_need_no_key_and_come_with_a_policy() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for path in ("/", *(f"/page/{name}" for name in FILES)):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            kind = TYPES[path.rpartition(".")[2]] if path != "/" else "text/html"
            assert answer.headers["content-type"].split(";")[0] == kind
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';") and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304 and not again.content

    serve(test, api_keys=("key",))


@pytest.mark.parametrize("name", ["none.js", "../app.py", "..%2fapp.py", "%2e%2e/app.py", "page/app.js", "app.js/", ""])
def test_nothing_else_is_there(name: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.get(f"/page/{name}")
        assert answer.status_code in (404, 307) and "def create_app" not in answer.text

    serve(test)


def test_the_files_name_no_other_place_and_write_no_markup() -> None:
    assert {"index.html", "app.js", "style.css"} <= set(FILES)
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)[\w.]+\.\w", text), f"{name} names another place"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", text), f"{name} has something inline"


def test_every_id_that_the_scripts_use_is_on_the_page() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    scripts = "".join((FOLDER / name).read_text(encoding="utf-8") for name in FILES if name.endswith(".js"))
    used = set(re.findall(r'by\("([^"]+)"\)', scripts))
    assert used and used <= ids, used - ids
