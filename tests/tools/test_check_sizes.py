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


# ---------------------------------------------------------------- C++

EIGHT = ", ".join(f"int a{i}" for i in range(8))


def cpp_problems(text: str) -> list[str]:
    return check_sizes.check_cpp_file("csrc/x.inc", text)


def test_cpp_file_of_400_lines_passes_and_401_fails() -> None:
    assert cpp_problems("int x;\n" * 400) == []
    assert cpp_problems("int x;\n" * 401) == ["csrc/x.inc:1: 401 lines, at most 400"]


def test_cpp_line_of_121_columns_fails() -> None:
    assert cpp_problems(f"int x;\n// {'ü' * 117}\n") == []
    assert cpp_problems(f"int x;\n// {'ü' * 118}\n") == ["csrc/x.inc:2: 121 columns, at most 120"]


@pytest.mark.parametrize(
    "head",
    [
        "void f() {",
        "template <class T, std::size_t... I> static inline T f(std::index_sequence<I...>) {",
        "Widget::Widget(int f) : size_(f), other_(std::max(f, 1)) {",
        "namespace a {\ntemplate <>\nstruct alignas(64) A<int> : B {\n public:\n  int f() const noexcept {",
        "std::function<void(int)> f(int x) {",
        "__attribute__((noinline)) vf f(vf x) {",
    ],
)
def test_cpp_function_of_61_lines_fails(head: str) -> None:
    """Wherever it stands and whatever is in it that looks like an end: measured from its first line to its last."""
    lines = [
        "  if (x) { y('}', \"{\"); }  // }",
        "#define OPEN {",
        "  const auto g = [&](int i) { return i; };",
        "  int z[] = {1};",
    ]
    before, closers = head.count("\n"), "}" * (head.count("{") - 1)
    name = "Widget::Widget" if "Widget" in head else "f"
    for length, fails in ((60, False), (61, True)):
        body = "\n".join((lines * 20)[: length - 2])
        found = cpp_problems(f"int x = 1;\n{head}\n{body}\n}}\n{closers}\nint g() {{ return 0; }}\n")
        start = before + 2
        assert found == ([f"csrc/x.inc:{start}: {name} has 61 lines, at most 60"] if fails else [])


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        (f"void f({EIGHT}) {{}}", False),
        (f"void f({EIGHT}, int i) {{}}", True),
        (f"struct A {{ A({EIGHT}, int i) : x{{}} {{}} }};", True),
        (f"struct A {{ A({EIGHT}, void (*done)(int, int)) {{}} }};", True),
        ("void f(std::map<int, std::pair<int, int>> a, X<1, 2, 3, 4, 5, 6> b, int (&c)[2]) {}", False),
        ("void f(void (*g)(int, int, int, int, int, int, int, int, int)) {}", False),
        (f"void f({EIGHT}, int i);", False),
        (f"void g() {{ auto f = [&]({EIGHT}, int i) {{}}; }}", False),
        (f"#define F({EIGHT}, i) {{\nint x;", False),
    ],
)
def test_cpp_nine_parameters(text: str, fails: bool) -> None:
    assert bool(cpp_problems(text)) is fails


def test_cpp_braces_that_do_not_match_are_not_passed_over() -> None:
    assert cpp_problems("void f() {\n#if A\n  if (x) {\n#else\n  {\n#endif\n  }\n}\n") == [
        "csrc/x.inc:1: braces don't match, so that functions can't be measured"
    ]
