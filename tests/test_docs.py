"""Docs and docstrings name only what exists: ``sash.…`` names import, linked files and make targets are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("**/*.md"), *ROOT.glob("*.md")])
SOURCES = sorted((ROOT / "src").glob("**/*.py"))
NAME = re.compile(r"(?<![\w/.-])sash(?:\.[A-Za-z_]\w*)+")
QUOTED = re.compile(r"``(sash(?:\.[A-Za-z_]\w*)+)``")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
TARGET = re.compile(r"(?:^|`)make ([a-z0-9-]+)", re.MULTILINE)


def resolve(name: str) -> object:
    pieces = name.split(".")
    for length in range(len(pieces), 0, -1):
        try:
            value: object = importlib.import_module(".".join(pieces[:length]))
        except ModuleNotFoundError:
            continue
        for piece in pieces[length:]:
            value = getattr(value, piece)
        return value
    raise ModuleNotFoundError(name)


def found(pattern: re.Pattern[str], pages: list[Path] = PAGES) -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), name)
        for page in pages
        for name in sorted(set(pattern.findall(page.read_text(encoding="utf-8"))))
    ]


@pytest.mark.parametrize(("page", "name"), found(NAME) + found(QUOTED, SOURCES))
def test_dotted_name_imports(page: str, name: str) -> None:
    assert resolve(name) is not None


@pytest.mark.parametrize(("page", "target"), found(LINK))
def test_linked_file_exists(page: str, target: str) -> None:
    assert ((ROOT / page).parent / target).exists()


@pytest.mark.parametrize(("page", "target"), found(TARGET))
def test_make_target_exists(page: str, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_names_are_found_and_wrong_ones_fail() -> None:
    assert ("CONTRIBUTING.md", "sash.spec.span.Span") in found(NAME)
    with pytest.raises(AttributeError):
        resolve("sash.spec.span.Spam")
