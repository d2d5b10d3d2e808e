"""Hold the size budgets of Python and C++: file 400 lines, function 60 lines, signature 8 parameters; print each part's
total.

Constructors of public classes and commands of the command line may take more parameters: users call them by name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_COLUMNS = 120  # of C++; ruff counts Python's
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
ROOTS = ("src", "tests", "tools")
MARK = "Size exception:"

# Files that may be longer, each with the reason; the file's docstring repeats it after "Size exception:".
EXCEPTIONS: dict[str, str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(root: Path) -> int:
    """Check every file below ``root``'s source folders; returns the exit code."""
    problems: list[str] = []
    totals: Counter[str] = Counter()
    for path in sorted(file for folder in ROOTS for file in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        totals[part(name)] += len(text.splitlines())
        problems += check_file(name, text, EXCEPTIONS)
    for path in sorted((root / "csrc").glob("*")):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        totals["csrc"] += len(text.splitlines())
        problems += check_cpp_file(name, text)
    problems += [f"{name}: in EXCEPTIONS but not in the tree" for name in EXCEPTIONS if not (root / name).is_file()]
    for name, lines in sorted(totals.items()):
        print(f"{lines:7d}  {name}")
    print(f"{sum(totals.values()):7d}  lines together")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def part(name: str) -> str:
    """The part that a file counts for: ``src/sash/spec``, ``tests``, ``tools``."""
    pieces = name.split("/")
    return "/".join(pieces[:3]) if pieces[0] == "src" and len(pieces) > 3 else pieces[0]


def check_file(name: str, text: str, exceptions: dict[str, str]) -> list[str]:
    """Problems of one Python file, as lines for people."""
    problems = []
    tree = ast.parse(text, filename=name)
    lines = len(text.splitlines())
    if name in exceptions:
        if MARK not in (ast.get_docstring(tree) or ""):
            problems.append(f"{name}:1: is listed as an exception; its docstring must say why after {MARK!r}")
        if lines <= MAX_FILE_LINES:
            problems.append(f"{name}:1: has {lines} lines now; take it out of EXCEPTIONS")
    elif lines > MAX_FILE_LINES:
        problems.append(f"{name}:1: {lines} lines, at most {MAX_FILE_LINES}")
    for function, owner in functions(tree):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        count = 0 if may_take_many(function, owner) else parameters(function, owner)
        problems += check_function(f"{name}:{function.lineno}: {function.name}", length, count)
    return problems


def check_function(what: str, lines: int, parameters: int) -> list[str]:
    """Problems of one function, in either language."""
    problems = []
    if lines > MAX_FUNCTION_LINES:
        problems.append(f"{what} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    if parameters > MAX_PARAMETERS:
        problems.append(f"{what} has {parameters} parameters, at most {MAX_PARAMETERS}")
    return problems


def functions(tree: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Every function with the class that it is a method of, if any."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node, owner
            yield from functions(node)
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, node)
        else:
            yield from functions(node, owner)


def parameters(function: Function, owner: ast.ClassDef | None) -> int:
    """Parameters that a caller gives: ``self`` and ``cls`` apart."""
    args = function.args
    count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) + bool(args.vararg) + bool(args.kwarg)
    static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in function.decorator_list)
    return count - (owner is not None and not static)


def may_take_many(function: Function, owner: ast.ClassDef | None) -> bool:
    """Public constructors, and commands: functions decorated with ``@….command(…)`` or ``@with_options``."""
    if owner and function.name == "__init__":
        return not owner.name.startswith("_")
    names = [ast.unparse(item.func if isinstance(item, ast.Call) else item) for item in function.decorator_list]
    return any(name.split(".")[-1] in ("command", "with_options") for name in names)


# What hides braces and commas that don't count: comments, literals, and the preprocessor's lines.
_HIDDEN = re.compile(
    r"""
      //[^\n]* | /\*.*?\*/
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_ATTRIBUTE = re.compile(r"__attribute__\s*\(\(.*?\)\)+", re.DOTALL)
_ANGLES = re.compile(r"<[^<>]*>")
_TYPE = re.compile(r"\s*(?:template\s*)?(?:class|struct|union|enum|namespace)\b")


def check_cpp_file(name: str, text: str) -> list[str]:
    """Problems of one file of C++, as lines for people."""
    problems, lines = [], text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        problems.append(f"{name}:1: {len(lines)} lines, at most {MAX_FILE_LINES}")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            problems.append(f"{name}:{number}: {len(line)} columns, at most {MAX_COLUMNS}")
    code = _HIDDEN.sub(lambda hidden: re.sub(r"[^\n]", " ", hidden[0]), text)
    if code.count("{") != code.count("}"):
        return [*problems, f"{name}:1: braces don't match, so that functions can't be measured"]
    for head, start, end in cpp_functions(code):
        function, count = cpp_signature(head)
        first, last = (code.count("\n", 0, at) + 1 for at in (start, end))
        problems += check_function(f"{name}:{first}: {function}", last - first + 1, count)
    return problems


def cpp_functions(code: str) -> Iterator[tuple[str, int, int]]:
    """Of each function with a body: its text up to the body, where that begins, and where the body ends.

    No parser: braces behind parentheses are a function's body; all others (namespaces, types, initial values) are
    looked into. Bodies aren't: a lambda in one counts as lines of its function.
    """
    start = 0
    for mark in re.finditer(r"[{};]|\b(?:public|private|protected):", code):
        if mark.start() < start:
            continue
        text, end = code[start : mark.start()], mark.end()
        head = _ATTRIBUTE.sub("", text)
        while _ANGLES.search(head):
            head = _ANGLES.sub("", head)
        if mark[0] == "{" and "(" in head and not _TYPE.match(head):
            end = closing(code, mark.start())
            yield head, mark.start() - len(text.lstrip()), end
        start = end


def cpp_signature(head: str) -> tuple[str, int]:
    """Name and number of parameters of a function, from its text up to its body, without what stands in angles."""
    before, _, rest = head.partition("(")
    depth, commas, inside = 1, 0, ""
    for letter in rest:
        depth += (letter in "([") - (letter in ")]")
        if not depth:
            break
        commas += letter == "," and depth == 1
        inside += letter
    return before.split()[-1].strip("*&"), commas + bool(inside.strip())


def closing(code: str, at: int) -> int:
    """The end of what the brace at ``at`` opens."""
    depth = 0
    for brace in re.compile(r"[{}]").finditer(code, at):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.end()
    return len(code)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent.parent))
