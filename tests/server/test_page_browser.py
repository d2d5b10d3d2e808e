"""The page in a headless Chromium, in front of the real app: what a person sees and can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.real_models import real_model
from tests.server.live import PROMPT, LiveEngine, chromium, served

from sash.engine.async_engine import AsyncEngine
from sash.engine.messages import AddRequest
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.text.load import load_tokenizer

PHONE, DESKTOP = (360, 780), (1280, 900)
# What a busy machine may take for anything.
PATIENCE_MS = 20_000
Open = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser: Any) -> Open:
    """Opens an address as long as a block lasts; by its end nothing may have been written to the console as an error
    or a warning but what has one of the ``expected`` words, and nothing asked for at another address."""

    @contextmanager
    def opened(
        url: str, size: tuple[int, int] = DESKTOP, expected: tuple[str, ...] = (), **options: Any
    ) -> Iterator[Any]:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        context.set_default_timeout(PATIENCE_MS)
        page, errors = context.new_page(), []
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.append(request.url) if not request.url.startswith(url) else None)
        page.goto(url)
        try:
            yield page
        finally:
            context.close()
        assert [error for error in errors if not any(word in error for word in expected)] == []

    return opened


def wait_for(page: Any, element: str, words: str) -> None:
    """Until an element shows these words."""
    page.wait_for_function(
        "([id, words]) => document.getElementById(id).textContent.includes(words)", arg=[element, words]
    )


def slid(page: Any) -> int:
    """Pages that have slid, as the page says."""
    return int(page.locator(".pool .slid dd").first.inner_text().replace("\u202f", "") or 0)


def picture(page: Any) -> str:
    """The window pool's map, pixel by pixel."""
    return str(page.evaluate("document.querySelector('.map').toDataURL()"))


# ------------------------------------------------------------------------- what one sees


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_stream_arrives_and_the_pools_move(open_page: Open, size: tuple[int, int], scheme: str) -> None:
    engine = LiveEngine(delay_s=0.02)
    with served(engine) as url, open_page(url, size, color_scheme=scheme) as page:
        wait_for(page, "state-text", "ready")
        assert page.locator(".pool").count() == 2 and "window of 40" in page.locator(".pool").first.inner_text()
        assert page.locator("#empty").is_visible()
        empty = picture(page)
        page.fill("#prompt-text", PROMPT)
        page.fill("#max-tokens", "300")
        page.click("#send")
        page.wait_for_function("() => document.getElementById('answer').textContent.length > 20")
        page.wait_for_selector(".request .sash")
        assert "of 300" in page.locator(".request").inner_text() and not page.locator("#empty").is_visible()
        page.wait_for_function("() => document.querySelector('.pool .slid dd').textContent !== '0'")
        before, first = slid(page), page.locator(".sash").bounding_box()
        seen = picture(page)
        assert seen != empty
        page.wait_for_function("(n) => Number(document.querySelector('.pool .slid dd').textContent) > n", arg=before)
        page.wait_for_function("(old) => document.querySelector('.map').toDataURL() !== old", arg=seen)
        assert page.locator(".sash").bounding_box()["x"] > first["x"], "the sash moves on"
        page.click("#stop")
        wait_for(page, "trial-stats", "stopped here")
        page.wait_for_selector(".request", state="detached")
        assert engine.cancelled == ["0.0"]
        wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] <= wide[1], "nothing reaches over the edge"


def test_chat_streams_to_its_end_and_is_timed(open_page: Open) -> None:
    with served(LiveEngine(delay_s=0.005)) as url, open_page(url) as page:
        page.click("label[for=kind-chat]")
        page.fill("#prompt-text", "Hello")
        page.fill("#max-tokens", "25")
        page.press("#prompt-text", "Control+Enter")
        wait_for(page, "trial-stats", "stopped at max tokens")
        assert "+ 25 tokens" in page.inner_text("#trial-stats") and "tok/s" in page.inner_text("#trial-stats")
        assert len(page.inner_text("#answer")) == 25
        page.wait_for_function("() => document.getElementById('ttft-50').textContent !== '–'")


def test_markup_of_a_model_stays_text(open_page: Open) -> None:
    evil = '<img src="/x" onerror="document.title=1"><script>document.title=2</script>'

    def script(message: AddRequest, answer: int) -> list[int | str]:
        return [*evil.encode(), "stop"]

    with served(LiveEngine(script=script), model_name="<b>tiny</b>") as url, open_page(url) as page:
        wait_for(page, "model", "<b>tiny</b>")
        page.fill("#prompt-text", "x")
        page.click("#send")
        wait_for(page, "trial-stats", "came to its end")
        assert page.locator("#answer").text_content() == evil
        assert page.locator("#answer *, #model *").count() == 0 and page.title() == "sash"


# ------------------------------------------------------------------------- what goes wrong


def test_a_key_is_asked_for_and_stays_in_the_tab(open_page: Open) -> None:
    with served(LiveEngine(), api_keys=("right-key",)) as url, open_page(url, expected=("401",)) as page:
        page.wait_for_selector("#key", state="visible")
        page.fill("#key", "wrong-key")
        page.press("#key", "Enter")
        wait_for(page, "key-told", "refused")
        page.fill("#key", "right-key")
        page.press("#key", "Enter")
        wait_for(page, "state-text", "ready")
        assert not page.locator("#key-form").is_visible()
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        page.reload()
        wait_for(page, "state-text", "ready")
        page.fill("#prompt-text", "x")
        page.click("#send")
        wait_for(page, "trial-stats", "stopped at max tokens")


def test_a_lost_server_is_told_and_found_again(open_page: Open) -> None:
    with ExitStack() as stack:
        with served(LiveEngine()) as url:
            page = stack.enter_context(open_page(url, expected=("ERR_",)))
            wait_for(page, "state-text", "ready")
        wait_for(page, "state-text", "lost")
        assert page.locator("#notice").is_visible() and "stale" in page.locator("main").get_attribute("class")
        page.fill("#prompt-text", "x")
        page.click("#send")
        wait_for(page, "trial-error", "can't be reached")
        engine = LiveEngine(alive=False)
        stack.enter_context(served(engine, port=int(url.rpartition(":")[2])))
        page.click("#retry")
        wait_for(page, "state-text", "failed")
        wait_for(page, "notice-text", "starts it again")
        engine.alive = True
        wait_for(page, "state-text", "ready")
        assert not page.locator("#notice").is_visible()


def test_a_refusal_is_shown_in_the_servers_words(open_page: Open) -> None:
    with (
        served(LiveEngine(refuse="the prompt has 600 tokens and max_model_len is 512")) as url,
        open_page(url, expected=("400",)) as page,
    ):
        page.fill("#prompt-text", "x")
        page.click("#send")
        wait_for(page, "trial-error", "max_model_len is 512")


# ------------------------------------------------------------------------- for everybody

CONTRAST = """(pairs) => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (name) => {
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    pen.fillRect(0, 0, 1, 1);
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return pairs.map(([front, back]) => {
    const [low, high] = [light(front), light(back)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(open_page: Open, scheme: str) -> None:
    pairs = [(front, back) for front in ("--ink", "--quiet") for back in ("--face", "--panel", "--cell")]
    pairs += [("--on-accent", "--accent"), ("--bad", "--bad-face")]
    with served(LiveEngine()) as url, open_page(url, color_scheme=scheme) as page:
        ratios = page.evaluate(CONTRAST, pairs)
        assert all(ratio >= 4.5 for ratio in ratios), list(zip(pairs, ratios, strict=True))
        page.click("#theme")  # from the system's colours to light
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_keyboard_reaches_everything_and_nothing_moves_that_need_not(open_page: Open) -> None:
    with served(LiveEngine(delay_s=0.02)) as url, open_page(url, reduced_motion="reduce") as page:
        wait_for(page, "state-text", "ready")
        reached = []
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        wanted = {"theme", "kind-text", "prompt-text", "sample-long", "temperature", "max-tokens", "send", "map"}
        assert wanted <= set(reached), reached
        page.click("#sample-long")
        page.click("#send")
        page.wait_for_selector(".request .sash")
        page.focus(".map")
        page.keyboard.press("ArrowRight")
        assert page.locator(".caption").first.inner_text().startswith("page 0: #0, tokens")
        moving = page.evaluate("document.getAnimations().length")
        assert moving == 0


# ------------------------------------------------------------------------- with a model


@pytest.mark.real
@pytest.mark.e2e
@pytest.mark.parametrize(("name", "size"), [("phone", PHONE), ("desktop", DESKTOP)])
def test_a_model_fills_the_pools(open_page: Open, name: str, size: tuple[int, int]) -> None:
    """Set SASH_SCREENSHOTS to a folder to keep what was seen."""
    path = real_model("gemma3-270m")
    engine = AsyncEngine(str(path), {"max_model_len": 4096}, load_spec(locate(path)), load_tokenizer(path))
    with (
        served(engine, start=engine.start, stop=engine.close, model_name="gemma3-270m") as url,
        open_page(url, size, color_scheme="light" if name == "phone" else "dark", device_scale_factor=1.5) as page,
    ):
        wait_for(page, "state-text", "ready")
        others = [start_other(page, i) for i in range(4)]
        page.click("#sample-long")
        page.fill("#max-tokens", "500")
        page.click("#send")
        page.wait_for_function("() => document.getElementById('answer').textContent.length > 150", timeout=240_000)
        assert page.locator(".request").count() == 1 + len(others) and slid(page) > 0
        assert "less than without windows" in page.inner_text("#less")
        if folder := os.environ.get("SASH_SCREENSHOTS"):
            keep(page.screenshot(full_page=True), Path(folder) / f"page-{name}.png")
        page.click("#stop")
        wait_for(page, "trial-stats", "stopped here")


def start_other(page: Any, i: int) -> None:
    """A request of somebody else, of another length each."""
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * (4 + 31 * i)
    page.evaluate(
        "(body) => void fetch('v1/completions', { method: 'POST', body: JSON.stringify(body),"
        " headers: { 'Content-Type': 'application/json' } })",
        {"prompt": text, "max_tokens": 700 + 150 * i, "ignore_eos": True, "temperature": 0.8},
    )


def keep(png: bytes, path: Path) -> None:
    """Write a picture with few colours: a quarter of the bytes."""
    import io

    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
