"""EngineCore: cancelling in every state, deadlines, and steps that raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.engine.conftest import MakeLLM, assert_idle

from sash import LLM, SamplingParams
from sash.engine.core import EngineCore
from sash.engine.messages import AddRequest, CancelRequest, Update
from sash.spec.errors import RequestError

PARAMS = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)


def add(core: EngineCore, name: str, prompt: list[int], n: int = 1, params: SamplingParams = PARAMS) -> None:
    """Queue a request whose answers are name.0, name.1 …, each with its own seed."""
    ids = tuple(f"{name}.{i}" for i in range(n))
    core.add(AddRequest(ids, tuple(prompt), params, tuple(range(3, 3 + n))))


def finish(core: EngineCore, limit: int = 400) -> dict[str, list[Update]]:
    """Run until nothing is left; all updates by answer."""
    out: dict[str, list[Update]] = {}
    for _ in range(limit):
        if not core.has_work:
            return out
        for update in core.step():
            out.setdefault(update.answer_id, []).append(update)
    raise AssertionError(f"still at work after {limit} steps")


def tokens(updates: list[Update]) -> list[int]:
    return [t for u in updates for t in u.token_ids]


def until(core: EngineCore, ready: Callable[[], bool]) -> dict[str, list[Update]]:
    """Run until ``ready``; what was told on the way."""
    out: dict[str, list[Update]] = {}
    for _ in range(100):
        if ready():
            return out
        for update in core.step():
            out.setdefault(update.answer_id, []).append(update)
    raise AssertionError("the state was never reached")


STATES: dict[str, Callable[[EngineCore], bool]] = {
    "just added": lambda core: True,
    "prompt half computed": lambda core: 0 < computed(core, "b.0") < 40,
    "decoding": lambda core: computed(core, "b.0") > 42,
}


def computed(core: EngineCore, answer: str) -> int:
    """Rows of an answer that are done."""
    ticket = core.scheduler.find(answer)
    return ticket.computed if ticket else 0


GONE = [["b.0"], ["b.1"], ["b.0", "b.1", "b.2"], ["a.0", "b.0"]]
# With one seat b waits until a is done.
CASES = [(s, g, n) for s in STATES for g in GONE for n in (3, 1) if n == 3 or s == "just added" or "a.0" in g]


@pytest.mark.parametrize(("state", "gone", "seats"), CASES)
def test_cancelling_frees_all_pages_and_harms_no_one(
    make_llm: MakeLLM, state: str, gone: list[str], seats: int
) -> None:
    """Running, waiting for a seat, and waiting for a sibling's prompt."""
    llm = make_llm(max_num_seqs=seats)
    core = llm.core
    wanted = {}
    for name, prompt, n in (("a", [4] * 6, 1), ("b", list(range(3, 43)), 3)):
        add(core, name, prompt, n)
        wanted |= {answer: tokens(updates) for answer, updates in finish(core).items()}
    add(core, "a", [4] * 6)
    add(core, "b", list(range(3, 43)), 3)
    if "a.0" in gone:
        core.cancel(CancelRequest("a.0"))
    told = until(core, lambda: STATES[state](core))
    for answer in gone:
        if answer != "a.0":
            core.cancel(CancelRequest(answer))
            assert answer not in core.ledger
    for answer, updates in finish(core).items():
        told.setdefault(answer, []).extend(updates)
    assert set(told) == set(wanted)
    for answer, updates in told.items():
        last = [u.finish_reason for u in updates if u.finish_reason]
        assert last == (["cancelled"] if answer in gone else ["length"])
        if answer in gone:
            assert tokens(updates) == wanted[answer][: len(tokens(updates))]
        else:
            assert tokens(updates) == wanted[answer]


def test_cancelling_a_preempted_request(make_llm: MakeLLM) -> None:
    llm = make_llm(max_total_tokens=48, max_model_len=48)
    add(llm.core, "a", [4] * 10, params=SamplingParams(max_tokens=30))
    add(llm.core, "b", [5] * 10, params=SamplingParams(max_tokens=30))
    until(llm.core, lambda: llm.core.scheduler.num_preemptions > 0)
    ticket = llm.core.scheduler.find("b.0")
    assert ticket in llm.core.scheduler.waiting and "b.0" not in llm.core.ledger
    llm.core.cancel(CancelRequest("b.0"))
    assert {u.finish_reason for u in finish(llm.core)["b.0"]} == {"cancelled"}


def test_cancelling_the_unknown_is_nothing(llm: LLM) -> None:
    llm.core.cancel(CancelRequest("never"))
    assert not llm.core.has_work


# ----------------------------------------------------------------------------------- deadlines


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def with_clock(llm: LLM) -> Clock:
    clock = Clock()
    llm.core._clock = llm._frontend._clock = clock
    return clock


def test_a_request_ends_at_its_deadline(make_llm: MakeLLM) -> None:
    """Running or waiting; later ones have time of their own."""
    llm = make_llm(request_timeout_s=10, max_num_seqs=1)
    clock = with_clock(llm)
    add(llm.core, "running", [4] * 6)
    add(llm.core, "waiting", [4] * 6)
    first = until(llm.core, lambda: computed(llm.core, "running.0") > 8)
    clock.now += 5
    add(llm.core, "later", [4] * 6)
    clock.now += 5
    updates = finish(llm.core)
    assert [u.finish_reason for u in updates["running.0"]] == ["timeout"]
    assert [(u.finish_reason, u.token_ids) for u in updates["waiting.0"]] == [("timeout", ())]
    assert updates["later.0"][-1].finish_reason == "length"
    assert tokens(first["running.0"]) == tokens(updates["later.0"])[:4]


def test_a_stream_ends_at_its_deadline_with_what_it_has(make_llm: MakeLLM) -> None:
    llm = make_llm(request_timeout_s=10)
    clock = with_clock(llm)
    stream = llm.stream("The window slides", PARAMS)
    got = [next(stream)]
    clock.now += 3
    got.append(next(stream))
    clock.now += 7
    got += stream
    assert [d.outputs[0].finish_reason for d in got] == [None, None, "timeout"]
    assert got[-1].outputs[0].token_ids == []
    metrics = got[-1].metrics
    assert (metrics.queue_s, metrics.first_token_s, metrics.total_s) == (0.0, 0.0, 10.0)
    assert_idle(llm)


def test_without_a_timeout_there_is_no_deadline(make_llm: MakeLLM) -> None:
    llm = make_llm()
    clock = with_clock(llm)
    add(llm.core, "a", [4] * 6)
    clock.now += 1e9
    assert finish(llm.core)["a.0"][-1].finish_reason == "length"


# ------------------------------------------------------------------------- steps that raise


def failing(core: EngineCore, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], bool]) -> list[list[str]]:
    """Make steps raise whose plan is ``wrong``, after they have run; returns the requests of each step."""
    run, seen = core.runner.run, []

    def wrapped(plan: Any, sequences: Mapping[str, Any]) -> Any:
        seen.append([item.request_id for item in plan.items])
        result = run(plan, sequences)
        if wrong(plan):
            raise FloatingPointError("as the test wants it")
        return result

    monkeypatch.setattr(core.runner, "run", wrapped)
    return seen


@pytest.mark.parametrize("at", [0, 16, 41, 45])
def test_a_request_that_raises_harms_no_batch_mate(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """While its prompt is computed, at its first token, and later."""
    llm = make_llm()
    core = llm.core
    for name in "ac":
        add(core, name, [ord(name)] * 9)
    wanted = {answer: tokens(updates) for answer, updates in finish(core).items()}

    def wrong(plan: Any) -> bool:
        return any(item.request_id == "b.0" and item.start <= at < item.end for item in plan.items)

    seen = failing(core, monkeypatch, wrong)
    add(core, "a", [ord("a")] * 9)
    add(core, "b", list(range(3, 43)))
    add(core, "c", [ord("c")] * 9)
    told = finish(core)
    assert {a: tokens(told[a]) for a in wanted} == wanted
    last = told["b.0"][-1]
    assert last.finish_reason == "error" and "FloatingPointError: as the test wants it" in str(last.error)
    assert len(tokens(told["b.0"])) == max(at - 39, 0)
    assert core.counters.failed_steps == 2 and ["b.0"] in seen


def test_a_step_that_raises_once_is_repeated_without_a_trace(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    core = llm.core
    for fail_at in range(1, 12):
        add(core, "a", [7] * 9, 2)
        add(core, "b", list(range(3, 43)))
        if fail_at == 1:
            wanted = {answer: tokens(updates) for answer, updates in finish(core).items()}
            continue
        count = 0

        def wrong(plan: Any, fail_at: int = fail_at) -> bool:
            nonlocal count
            count += 1
            return count == fail_at

        with monkeypatch.context() as patch:
            failing(core, patch, wrong)
            told = finish(core)
        assert {answer: tokens(updates) for answer, updates in told.items()} == wanted
        assert_idle(llm)
    assert core.counters.failed_steps == 10


def test_an_answer_id_is_used_once_at_a_time(llm: LLM) -> None:
    add(llm.core, "a", [5, 6, 7])
    with pytest.raises(RequestError, match=r"answer_ids \('a.0',\) are not new"):
        add(llm.core, "a", [8, 9])
    with pytest.raises(RequestError, match="are not new"):
        llm.core.add(AddRequest(("b", "b"), (5,), PARAMS, (1, 2)))
    assert len(tokens(finish(llm.core)["a.0"])) == 12
    add(llm.core, "a", [5, 6, 7])
    finish(llm.core)
    assert_idle(llm)
