from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "check_sizes", Path(__file__).parent.parent.parent / "tools" / "check_sizes.py"
)
assert SPEC and SPEC.loader
check_sizes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_sizes)

NINE = "a, b, c, d, e, f, g, h, i"


def problems(text: str, exceptions: dict[str, str] | None = None) -> list[str]:
    return check_sizes.check_file("src/x.py", text, exceptions or {})


def test_file_of_400_lines_passes_and_401_fails() -> None:
    assert problems("x = 1\n" * 400) == []
    assert problems("x = 1\n" * 401) == ["src/x.py:1: 401 lines, at most 400"]


def test_exception_needs_its_reason_in_the_file_and_the_size() -> None:
    listed = {"src/x.py": "tables"}
    assert "docstring must say why" in problems("x = 1\n" * 401, listed)[0]
    assert problems('"""Tables.\n\nSize exception: tables.\n"""\n' + "x = 1\n" * 401, listed) == []
    assert "take it out" in problems('"""Size exception: tables."""\n', listed)[0]


@pytest.mark.parametrize("indent", ["", "    "])
def test_function_of_61_lines_fails(indent: str) -> None:
    head = "class A:\n" if indent else ""
    body = f"{indent}def f():\n" + f"{indent}    x = 1\n" * 59
    assert problems(head + body) == []
    assert "f has 61 lines" in problems(head + body + f"{indent}    x = 1\n")[0]


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        (f"def f({NINE}): ...", True),
        (f"async def f({NINE}): ...", True),
        ("def f(a, b, c, d, /, e, f, g, *, h): ...", False),
        ("def f(a, b, c, d, e, f, g, *h, **i): ...", True),
        ("class A:\n def f(self, a, b, c, d, e, f, g, h): ...", False),
        (f"class A:\n def f(self, {NINE}): ...", True),
        (f"class A:\n def __init__(self, {NINE}): ...", False),
        (f"class _A:\n def __init__(self, {NINE}): ...", True),
        (f"@app.command('x')\ndef f({NINE}): ...", False),
        (f"@with_options\ndef f({NINE}): ...", False),
        (f"@cache\ndef f({NINE}): ...", True),
    ],
)
def test_nine_parameters(text: str, fails: bool) -> None:
    assert bool(problems(text)) is fails
