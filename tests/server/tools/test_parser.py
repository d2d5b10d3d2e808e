"""Answers of every format are taken apart the same way however they are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sash.server.tools.formats import FORMATS
from sash.server.tools.parser import CallPiece, Piece, ToolParser

NAMES = ("weather", "add", "get.time")
W = '{"city": "Paris \\"{}\\" é"}'


def joined(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", list[list[str]]()
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            text += piece
        else:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    return text, [(name, arguments) for name, arguments in calls]


def parse(
    form: str, text: str, size: int = 1, dropped: tuple[str, ...] = (), *, cut: bool = False, forced: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(FORMATS[form], NAMES, dropped, forced=forced)
    pieces = [piece for i in range(0, len(text), size) for piece in parser.push(text[i : i + size])]
    pieces += parser.finish(cut=cut)
    assert parser.count == len(joined(pieces)[1])
    return joined(pieces)


ADD = ("add", '{"a": 1}')
ADDS, PADDS = '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {"a": 1}}'
SKY, PSKY = '{"name": "weather", "arguments": {}}', '{"name": "weather", "parameters": {}}'
BARE_SKY = ("weather", "{}")

HERMES_CASES = [
    ("Just text with <b> and { braces }.", "Just text with <b> and { braces }.", []),
    (f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>', "", [("weather", W)]),
    (f'Hm.\n<tool_call>{{"arguments": {W}, "name": "weather"}}</tool_call>\n', "Hm.\n", [("weather", W)]),
    (f"<tool_call>{ADDS}</tool_call>\n<tool_call>{SKY}</tool_call> done", "done", [ADD, BARE_SKY]),
    (f"<tool_call>{ADDS[:-1]}", "", [ADD]),
    ('<tool_call>{"name": "add", "arguments": {"a": [1, {"b', "", [("add", '{"a": [1, {"b')]),
    ('<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    ("<tool_call> no json", "<tool_call> no json", []),
    ('<tool_call>{"noname": 1}</tool_call>', '<tool_call>{"noname": 1}</tool_call>', []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add"', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
    (f'<tool_call>{{"type": "function", "function": {ADDS}}}</tool_call>', "", [ADD]),
    ('<tool_call>{"id": [1, "}"], "name": "add", "x": null, "parameters": {}}</tool_call>', "", [("add", "{}")]),
    ("a <tool", "a <tool", []),
    (ADDS, ADDS, []),
    (f"<tool_call>{ADDS}</tool_call> a  b <i> c", "a  b <i> c", [ADD]),
    ("<tool_call></tool_call><tool_call> x", "<tool_call></tool_call><tool_call> x", []),
]
MISTRAL_CASES = [
    (f"[TOOL_CALLS][{ADDS}, {SKY}]", "", [ADD, BARE_SKY]),
    (f"[TOOL_CALLS] [{ADDS}] ok", "ok", [ADD]),
    ('[TOOL_CALLS]add[ARGS]{"a": {"b": "]}"}}', "", [("add", '{"a": {"b": "]}"}}')]),
    ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get.time[ARGS]{}', "", [ADD, ("get.time", "{}")]),
    ("[TOOL_CALLS]get.time[ARGS]", "", [("get.time", "{}")]),
    ("[TOOL_CALLS] is a mark", "[TOOL_CALLS] is a mark", []),
    ("a [list] of [things", "a [list] of [things", []),
]
LLAMA_CASES = [
    (PADDS, "", [ADD]),
    (f'  {{"type": "function", {PADDS[1:]}; {PSKY}', "", [ADD, BARE_SKY]),
    ('<|python_tag|>{"name": "unknown", "parameters": {}}', "", [("unknown", "{}")]),
    ('{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    ('{"key": "value"} and more', '{"key": "value"} and more', []),
    (f"Text {PADDS}", f"Text {PADDS}", []),
    ("{not json", "{not json", []),
]
GEMMA_CASES = [
    (f"```tool_code\n{PADDS}\n```", "", [ADD]),
    ("```tool_code\nadd(a=1, b='x')\n```", "", [("add", '{"a": 1, "b": "x"}')]),
    (
        "Ok:\n```tool_code\nprint(get.time(zone=None))\nadd(a=[True])\n```\nDone",
        "Ok:\nDone",
        [("get.time", '{"zone": null}'), ("add", '{"a": [true]}')],
    ),
    (f"```json\n{PSKY}\n```", "", [BARE_SKY]),
    ('```json\n{"name": "Bob"}\n```', '```json\n{"name": "Bob"}\n```', []),
    ("```json\n[1, 2]\n```", "```json\n[1, 2]\n```", []),
    ("```tool_code\nimport os\nos.system('x')\n```", "```tool_code\nimport os\nos.system('x')\n```", []),
    ("```tool_code\nadd(open('x'))\n```", "```tool_code\nadd(open('x'))\n```", []),
    ("```tool_code\nadd(a=1", "```tool_code\nadd(a=1", []),
    ("```python\nadd(a=1)\n```", "```python\nadd(a=1)\n```", []),
    (PADDS, "", [ADD]),
]
CASES = [
    (form, *case)
    for form, cases in zip(FORMATS, (HERMES_CASES, MISTRAL_CASES, LLAMA_CASES, GEMMA_CASES), strict=True)
    for case in cases
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_an_answer_is_text_and_calls_however_it_is_cut(
    form: str, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(answer)):
        assert parse(form, answer, size) == (text, calls)


def test_what_nests_deeper_than_anybody_reads_is_text() -> None:
    deep = f'<tool_call>{{"function": {"[" * 5000}{"]" * 5000}}}</tool_call>'
    assert parse("hermes", deep, 1000) == (deep, [])


def test_numbers_that_json_has_not_make_no_call() -> None:
    wrong = "```tool_code\nadd(a=1e999)\n```"
    assert parse("gemma", wrong) == (wrong, [])


def test_arguments_are_told_as_they_come() -> None:
    parser = ToolParser(FORMATS["hermes"], NAMES)
    assert parser.push('Hm <tool_call>{"name": "add"') == ["Hm ", CallPiece(0, "add", "")]
    assert parser.push(', "arguments": {"a"') == [CallPiece(0, None, '{"a"')]
    assert parser.push(': "long') == [CallPiece(0, None, ': "long')]
    assert parser.push(' text"}') == [CallPiece(0, None, ' text"}')]
    assert parser.push("}</tool_call>") == [] and parser.finish() == []


def test_text_is_told_as_it_comes_and_what_may_be_a_mark_is_held_back() -> None:
    parser = ToolParser(FORMATS["mistral"], NAMES)
    assert parser.push("Hello [TOOL") == ["Hello "]
    assert parser.push("BOX] yes") == ["[TOOLBOX] yes"]


def test_what_began_like_a_call_is_left_out_where_the_answer_is_cut() -> None:
    for text in ("<tool_call>", '<tool_call>\n{"name": "ad', "<tool_call> {"):
        parser = ToolParser(FORMATS["hermes"], NAMES)
        assert parser.push(f"Ok {text}") == ["Ok "] and parser.finish(cut=True) == []
    parser = ToolParser(FORMATS["llama3"], NAMES)
    assert parser.push('{"na') == [] and parser.finish(cut=True) == ['{"na']
    parser = ToolParser(FORMATS["llama3"], NAMES, forced=True)
    assert parser.push('{"na') == [] and parser.finish(cut=True) == []


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"),
    [
        ("hermes", "Ok <tool_", "Ok ", []),
        ("hermes", f"<tool_call>{ADDS}</tool", "", [ADD]),
        ("hermes", f"<tool_call>{ADDS}\n</tool_call>\n<to", "", [ADD]),
        ("hermes", '<tool_call>\n{"name": "weather", "arg', "", [("weather", "")]),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
        ("hermes", f'<tool_call>{SKY}</tool_call><tool_call>{{"name": "add"', "", [BARE_SKY, ("add", "")]),
        ("mistral", "Ok [TOOL_C", "Ok ", []),
        ("mistral", "[TOOL_CALLS]add[AR", "", []),
        ("mistral", "[TOOL_CALLS]add[ARGS]", "", [("add", "")]),
        ("mistral", f'[TOOL_CALLS][{ADDS}, {{"na', "", [ADD]),
        ("llama3", "Ok <|python", "Ok ", []),
        ("llama3", f'{PADDS}; {{"na', "", [ADD]),
        ("llama3", '{"name": "add", "parameters": {"a"', "", [("add", '{"a"')]),
        ("gemma", "Ok\n```tool_", "Ok\n", []),
        ("gemma", "```tool_code\nadd(a=1", "", []),
        ("gemma", f"```tool_code\n{PADDS}\n``", "", [ADD]),
        ("gemma", "Ok ```json\n[1, 2", "Ok ```json\n[1, 2", []),
        ("gemma", 'Ok ```json\n{"a": 5', 'Ok ```json\n{"a": 5', []),
    ],
)
def test_an_answer_that_is_cut_has_neither_half_a_mark_nor_what_nobody_said(
    form: str, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(answer)):
        assert parse(form, answer, size, cut=True) == (text, calls)


def test_control_tokens_of_a_template_are_dropped() -> None:
    dropped = ("<|eot_id|>", "</s>")
    assert parse("llama3", "Hi</s> you<|eot_id|>", dropped=dropped) == ("Hi you", [])
    answer = '<|python_tag|>{"name": "add", "parameters": {}}<|eot_id|>'
    assert parse("llama3", answer, dropped=dropped) == ("", [("add", "{}")])
    assert parse("mistral", "[TOOL_CALLS]add[ARGS]{}</s>", dropped=dropped) == ("", [("add", "{}")])


MARKS = [mark for form in FORMATS.values() for mark in (*form.opens, *form.closes)]
PARTS = st.sampled_from([*MARKS, *'\n ,;"\\{}[]', "[ARGS]", "text", ADDS, '{"name":', '"add"', "add(a=1)", "é🙂"])
VALUES = st.recursive(st.text(max_size=9) | st.integers() | st.none(), st.lists, max_leaves=4)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), VALUES)), min_size=1, max_size=3
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(PARTS, max_size=12).map("".join), st.integers(1, 9))
def test_any_text_is_taken_apart_the_same_way_in_pieces(form: str, answer: str, size: int) -> None:
    """And what is no call is lost nowhere: text without marks comes out as it is."""
    whole = parse(form, answer, max(len(answer), 1))
    assert parse(form, answer, size) == whole
    if not whole[1]:
        assert whole[0] == answer


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), CALLS, st.integers(1, 9))
def test_what_a_format_writes_it_reads(form: str, calls: list[tuple[str, dict[str, object]]], size: int) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    assert parse(form, FORMATS[form].write(written), size) == ("", written)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), CALLS, st.integers(1, 9), st.data())
def test_forced_calls_that_are_cut_are_told_as_far_as_they_go(
    form: str, calls: list[tuple[str, dict[str, object]]], size: int, data: st.DataObject
) -> None:
    wanted = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    written = FORMATS[form].write(wanted)
    end = data.draw(st.integers(0, len(written)))
    text, told = parse(form, written[:end], size, cut=True, forced=True)
    assert text == "" and len(told) <= len(wanted) and told[:-1] == wanted[: len(told) - 1 if told else 0]
    if told:
        name, arguments = wanted[len(told) - 1]
        assert told[-1][0] == name and arguments.startswith(told[-1][1]) and told[-1][1] in written[:end]
