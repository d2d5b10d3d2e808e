"""Processes of grammars: hostile ones harm nobody, those that die are replaced, and none stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sash.engine.grammar_process import Setup, build_tokenizer, compiled
from sash.engine.grammars import Constraint, Grammars
from sash.spec.errors import RequestError
from sash.spec.structured import StructuredOutputs

VOCAB, EOS = 101, 2
WORD = StructuredOutputs(regex="[a-c]{3}x?")


def ids(text: str) -> list[int]:
    return [3 + ord(char) - 32 for char in text]


@pytest.fixture(scope="module")
def _shared(folder: Path) -> Iterator[Grammars]:
    grammars = Grammars(str(folder), VOCAB, [EOS], 3, compile_s=0.7)
    yield grammars
    grammars.shutdown()


@pytest.fixture
def grammars(_shared: Grammars) -> Iterator[Grammars]:
    yield _shared
    for _ in range(100):
        _shared.poll()
        if len(_shared._free) == 1024:
            break
        time.sleep(0.02)
    assert len(_shared._free) == 1024


def children(grammars: Grammars) -> set[int]:
    """Processes that the host has forked."""
    assert grammars._host is not None
    host = grammars._host.process.pid
    return {int(pid) for pid in Path(f"/proc/{host}/task/{host}/children").read_text().split()}


def allowed(constraint: Constraint) -> set[int]:
    assert constraint.ready and constraint.bits is not None
    return set(np.flatnonzero(np.unpackbits(constraint.bits, count=VOCAB, bitorder="little")).tolist())


def follow(grammars: Grammars, constraint: Constraint, text: str, before: str = "") -> None:
    grammars.ask(constraint, [9, 9, 9, *ids(before), *ids(text)], 3)
    grammars.wait([constraint], 30)


def test_masks_follow_the_text_token_by_token(grammars: Grammars) -> None:
    constraint = grammars.constraint(grammars.compile(WORD))
    for text, next_ids in (("", ids("abc")), ("a", ids("abc")), ("ab", ids("abc")), ("abc", [*ids("x"), EOS])):
        if text:
            follow(grammars, constraint, text[-1], text[:-1])
        assert allowed(constraint) == set(next_ids) and not constraint.ended
    follow(grammars, constraint, "x", "abc")
    assert constraint.ended and not constraint.error
    grammars.close(constraint)


def test_answers_of_one_grammar_go_their_own_ways(grammars: Grammars) -> None:
    grammar = grammars.compile(WORD)
    first, second = grammars.constraint(grammar), grammars.constraint(grammar)
    follow(grammars, first, "abc")
    follow(grammars, second, "b")
    assert allowed(first) == {*ids("x"), EOS} and allowed(second) == {*ids("abc")}
    assert first.link is second.link
    grammars.close(first)
    follow(grammars, second, "c", "b")
    assert allowed(second) == {*ids("abc")}
    grammars.close(second)


def test_the_same_form_is_compiled_once(grammars: Grammars) -> None:
    grammar = grammars.compile(StructuredOutputs(choice=["a", "b"]))
    before = children(grammars)
    assert grammars.compile(StructuredOutputs(choice=("a", "b"))) is grammar
    assert children(grammars) == before


def test_processes_are_few_and_those_in_use_stay(grammars: Grammars) -> None:
    used = grammars.constraint(grammars.compile(WORD))
    follow(grammars, used, "a")
    for i in range(8):
        grammars.compile(StructuredOutputs(regex=f"a{{{i + 1}}}"))
    assert len(grammars._links) == 3 and used.link in grammars._links
    follow(grammars, used, "b", "a")
    assert allowed(used) == {*ids("abc")}
    grammars.close(used)
    again = grammars.constraint(grammars.compile(StructuredOutputs(regex="a{1}")))  # its process is gone
    assert again.grammar.link is None and allowed(again) == {*ids("a")}
    follow(grammars, again, "a")
    assert again.ended
    grammars.close(again)


# Takes half a minute and gigabytes.
HOSTILE = StructuredOutputs(json={"type": "integer", "multipleOf": 99999989})
REFUSED = {
    "deep schema": {"json": '{"not":' * 800 + "{}" + "}" * 800},
    "wide expansion": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(9)]}
    },
    "deep regex": {"regex": "(" * 20000 + "a" + ")" * 20000},
}


def test_a_grammar_that_takes_too_long_is_refused_and_harms_nobody(grammars: Grammars) -> None:
    other = grammars.constraint(grammars.compile(StructuredOutputs(regex="[ab]*x")))
    hostile = grammars.begin(HOSTILE)
    text = ""
    while not hostile.decided:
        grammars.poll()
        follow(grammars, other, "a", text)
        text += "a"
        assert allowed(other) == {*ids("abx")}
    assert len(text) > 3
    for _ in range(2):
        with pytest.raises(RequestError, match="structured_outputs json can't be used: it takes more time or memory"):
            grammars.compile(HOSTILE)
    grammars.close(other)


def test_a_process_that_dies_compiling_is_a_refusal(grammars: Grammars) -> None:
    before = children(grammars)
    hostile = grammars.begin(StructuredOutputs(json={"type": "integer", "multipleOf": 99999971}))
    while not (new := children(grammars) - before):
        time.sleep(0.01)
    for pid in new:
        os.kill(pid, signal.SIGSEGV)
    with pytest.raises(RequestError, match="more time or memory"):
        grammars.compile(hostile.wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_library_finds_too_large_is_refused(grammars: Grammars, name: str) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        grammars.compile(StructuredOutputs(**REFUSED[name]))  # type: ignore[arg-type]


def test_a_process_that_dies_idle_is_replaced(grammars: Grammars) -> None:
    constraint = grammars.constraint(grammars.compile(WORD))
    follow(grammars, constraint, "ab")
    for pid in children(grammars):
        os.kill(pid, signal.SIGKILL)
    while children(grammars):
        time.sleep(0.01)
    grammars._read(list(grammars._links), 0.0)
    follow(grammars, constraint, "c", "ab")
    assert not constraint.error and allowed(constraint) == {*ids("x"), EOS}
    grammars.close(constraint)


def test_a_process_that_dies_while_it_is_asked_ends_its_answers_only(grammars: Grammars) -> None:
    mate = grammars.constraint(grammars.compile(StructuredOutputs(regex="z{5}")))
    follow(grammars, mate, "z")
    before = children(grammars)
    grammar = grammars.compile(StructuredOutputs(regex="[a-c]{3}y?"))
    (pid,) = children(grammars) - before
    asked, other = grammars.constraint(grammar), grammars.constraint(grammar)
    follow(grammars, asked, "a")
    follow(grammars, other, "b")
    os.kill(pid, signal.SIGSTOP)
    grammars.ask(asked, ids("ab"), 0)
    grammars.wait([asked], 0.01)
    assert not asked.ready
    os.kill(pid, signal.SIGKILL)
    grammars.wait([asked], 30)
    assert asked.ready and "can't be followed any further: it takes more time or memory" in asked.error
    follow(grammars, other, "c", "b")
    follow(grammars, mate, "z", "z")
    assert allowed(other) == {*ids("abc")} and allowed(mate) == {*ids("z")}
    assert not other.error and not mate.error
    for constraint in (asked, other, mate):
        grammars.close(constraint)


def test_a_slot_is_not_given_away_while_a_mask_is_made_for_it(grammars: Grammars) -> None:
    constraint = grammars.constraint(grammars.compile(WORD))
    follow(grammars, constraint, "a")
    slot, pids = constraint.slot, children(grammars)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    grammars.ask(constraint, ids("ab"), 0)
    grammars.close(constraint)
    assert slot not in grammars._free
    for pid in pids:
        os.kill(pid, signal.SIGCONT)  # the fixture waits until it is free


def test_slots_that_a_process_may_still_write_to_are_never_given_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(str(folder), VOCAB, [EOS])
    grammar = grammars.compile(WORD)
    asked = [grammars.constraint(grammar) for _ in range(2)]
    for constraint in asked:
        follow(grammars, constraint, "a")
    slots = {constraint.slot for constraint in asked}
    (pid,) = children(grammars)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("sash.engine.grammars._LAST_S", -1.0)
    for constraint in asked:
        grammars.ask(constraint, ids("ab"), 0)
    grammars.wait(asked[:1], 0.0)
    assert all("more time or memory" in constraint.error for constraint in asked)
    for constraint in asked:
        grammars.close(constraint)
    assert not slots & set(grammars._free)
    os.kill(pid, signal.SIGCONT)
    grammars.shutdown()


def test_a_host_that_dies_is_started_again(grammars: Grammars) -> None:
    assert grammars._host is not None
    grammars.compile(WORD)
    grammars._host.process.kill()
    grammars._host.process.wait()
    constraint = grammars.constraint(grammars.compile(StructuredOutputs(regex="again")))
    assert allowed(constraint) == {*ids("a")}
    grammars.close(constraint)


def test_a_host_that_dies_takes_none_with_it_that_waits_for_its_turn(grammars: Grammars) -> None:
    grammars.compile(WORD)
    host = grammars._host
    assert host is not None
    slow = [{"type": "integer", "multipleOf": number} for number in (99999941, 99999959)]
    for schema in slow:
        grammars.begin(StructuredOutputs(json=schema))
    waiting = [grammars.begin(StructuredOutputs(regex=f"w{i}")) for i in range(5)]
    host.process.kill()
    host.process.wait()
    for grammar in waiting:
        assert not grammar.decided
    constraint = grammars.constraint(grammars.compile(WORD))
    grammars.shutdown()
    assert grammars._host is not None and grammars._host is not host, "they are compiled by another"
    for grammar in waiting:
        grammars.compile(grammar.wanted)
        assert grammar.first is not None and not grammar.error
    follow(grammars, constraint, "a")
    assert not constraint.error
    grammars.close(constraint)


def test_what_nobody_waits_for_is_not_compiled(grammars: Grammars) -> None:
    slow = [StructuredOutputs(json={"type": "integer", "multipleOf": number}) for number in (99999931, 99999947)]
    for wanted in slow:
        grammars.begin(wanted)
    left, kept = StructuredOutputs(regex="left"), StructuredOutputs(regex="kept")
    known = grammars.begin(left)
    grammars.begin(kept)
    for wanted in (left, left, slow[0]):
        grammars.forget(wanted)
    assert grammars.compile(kept).first is not None
    for wanted in slow:
        with pytest.raises(RequestError):
            grammars.compile(wanted)
    assert not known.decided and grammars.begin(left) is not known
    grammars.compile(left)


def test_answers_without_a_slot_keep_no_process(grammars: Grammars) -> None:
    free, grammars._free = grammars._free, []
    constraint = grammars.constraint(grammars.compile(WORD))
    grammars.ask(constraint, ids("a"), 0)
    assert "too many answers" in constraint.error
    grammars.close(constraint)
    assert not any(link.users for link in grammars._links)
    grammars._free = free


def test_no_process_stays_behind(folder: Path) -> None:
    grammars = Grammars(str(folder), VOCAB, [EOS])
    grammars.compile(WORD)
    assert grammars._host is not None
    pids = {grammars._host.process.pid, *children(grammars)}
    assert len(pids) == 2
    del grammars
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_tokenizer_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    grammars = Grammars(str(tmp_path), VOCAB, [EOS])
    with pytest.raises(RequestError, match=r"structured_outputs regex can.t be used: the model's tokenizer"):
        grammars.compile(WORD)
    grammars.shutdown()


def test_rows_without_a_token_and_control_tokens_are_never_allowed(folder: Path) -> None:
    """A head with more rows than the tokenizer has tokens, and a model without an end token."""
    for stops in ((EOS,), ()):
        tokenizer = build_tokenizer(Setup(str(folder), 150, stops, 19, 1.0))
        matcher = compiled(tokenizer, StructuredOutputs(regex="(.|\n)*"))
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found = set(np.flatnonzero(np.unpackbits(bits, count=150, bitorder="little")).tolist())
        assert found >= set(range(3, 100)) and not found & {0, 1, *range(101, 150)}
        assert (EOS in found) == bool(stops)
