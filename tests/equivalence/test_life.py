"""What happens to requests on their way: steps, cancels, preemptions, failures, forks; answers stay exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.equivalence.harness import Answers, Request, Rig, build, random_tokens, tiny_spec
from tests.equivalence.scenario import FailingRunner

from sash.engine.core import EngineCore, StepRunner
from sash.engine.messages import CancelRequest
from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence
from sash.ops import registry
from sash.ops.base import Ops
from sash.scheduler.plan import StepPlan
from sash.spec.config import EngineConfig, ResolvedConfig
from sash.spec.errors import RequestError
from sash.spec.span import Span

W = 6
SPANS = [Span.sliding(W), Span.full(), Span.sliding(W)]
OPTIONS = EngineConfig(max_model_len=96, max_num_seqs=8, max_num_batched_tokens=16, page_size=4, chunked_prefill_size=5)


class Recorder:
    """Notes every plan, and for each the pages of every request before it ran."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.device = inner.device
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan, sequences: dict[str, Sequence]) -> StepResult:
        """Note and run."""
        self.plans.append(plan)
        return self._inner.run(plan, sequences)


def engine(pages: tuple[int, int] | None = None, **options: object) -> tuple[Rig, Recorder]:
    def sized(config: ResolvedConfig) -> tuple[int, ...]:
        return pages or config.pages

    rig = build(tiny_spec(SPANS), replace(OPTIONS, **options), pages=sized)  # type: ignore[arg-type]
    rig.wrap(Recorder)
    recorder = rig.core.runner
    assert isinstance(recorder, Recorder)
    return rig, recorder


def ask(name: str, length: int, tokens: int, at_step: int = 0, **sampling: object) -> Request:
    return Request(name, random_tokens(length, len(name) + length), tokens, at_step, sampling=sampling)


# ------------------------------------------------------------------------------------------------ steps


def test_linear_layers_are_called_once_per_step_however_many_requests_it_holds() -> None:
    calls: Counter[int] = Counter()
    ops = registry.resolve_ops(kernels="torch")

    def linear(*args: torch.Tensor) -> torch.Tensor:
        calls[rig.core.counters.steps] += 1
        return ops.linear(*args)

    counted: Ops = replace(ops, linear=linear)
    with mock.patch("sash.engine.build.resolve_ops", return_value=counted):
        rig, recorder = engine()
    plain = {"logprobs": None, "prompt_logprobs": None}
    rig.run([ask("a", 3, 20, **plain), *(ask(f"b{i}", 11 + i, 9, i, **plain) for i in range(5))])
    sizes = {(len(p.items), p.num_tokens) for p in recorder.plans}
    assert max(n for n, _ in sizes) >= 4, "no step held many requests"
    # Per layer qkv (two calls where the top layer's queries are fewer than its rows), o, gate-up, down; one head.
    per_step = 4 * len(SPANS)
    assert set(calls.values()) <= {per_step, per_step + 1, per_step + 2}, f"calls per step: {calls}"


def test_a_decoding_request_gets_a_token_in_every_step_of_anothers_prefill() -> None:
    rig, recorder = engine()
    answers = rig.run([ask("first", 3, 30), ask("long", 60, 3, at_step=4)])
    steps = answers["first"].steps
    assert steps == list(range(steps[0], steps[0] + 30)), "a decode step was skipped"
    prefill = [p for p in recorder.plans if any(i.request_id == "long" and i.end < 60 for i in p.items)]
    assert len(prefill) == 11 and all(any(i.request_id == "first" for i in p.items) for p in prefill)
    rig.assert_exact(answers)


def test_steps_keep_to_the_token_budget_the_chunk_and_the_seats() -> None:
    rig, recorder = engine(max_num_seqs=3)
    rig.assert_exact(rig.run([ask(f"r{i}", 2 + 5 * i, 8) for i in range(7)]))
    for plan in recorder.plans:
        assert plan.num_tokens <= 16 and len(plan.items) <= 3
        assert all(item.count <= 5 for item in plan.items)


# ------------------------------------------------------------------------------------------------ cancel


@pytest.mark.parametrize("state", ["queued", "prefill", "decode", "before anything"])
def test_cancel_in_every_state_returns_the_pages_and_harms_nobody(state: str) -> None:
    rig, _ = engine(max_num_seqs=2)
    gone: list[str] = []

    def cancel(core: EngineCore, answers: Answers) -> None:
        ticket = core.scheduler.find("victim")
        if ticket is None or gone:
            return
        running = ticket in core.scheduler.running
        due = {
            "queued": not running and core.counters.steps > 3,
            "prefill": running and 0 < ticket.computed < ticket.prompt_tokens,
            "decode": len(answers["victim"].tokens) == W,
            "before anything": True,
        }
        if due[state]:
            held = sum(rig.core.ledger.request_pages("victim").values()) if running else 0
            free = sum(pool.free for pool in core.ledger.stats())
            core.cancel(CancelRequest("victim"))
            assert sum(pool.free for pool in core.ledger.stats()) == free + held
            assert core.scheduler.find("victim") is None and "victim" not in core.ledger
            gone.append(state)

    seats = 2 if state in ("queued", "before anything") else 1
    mates = [ask(f"m{i}", 9 + i, 20) for i in range(seats)]
    answers = rig.run([*mates, ask("victim", 17, 20)], cancel)
    assert gone == [state]
    victim = answers.pop("victim")
    assert victim.finish_reason == "cancelled"
    rig.assert_answer("victim", victim)
    rig.assert_exact(answers)
    rig.core.cancel(CancelRequest("victim"))  # unknown by now: ignored


# ------------------------------------------------------------------------------------------------ pages run out


def test_preempted_past_the_window_and_resumed() -> None:
    rig, _ = engine()
    marks = [12, 25]

    def preempt(core: EngineCore, answers: Answers) -> None:
        if marks and len(answers["a"].tokens) >= marks[0]:
            core.scheduler.preempt(next(t for t in core.scheduler.running if t.request_id == "a"))
            assert "a" not in core.ledger
            marks.pop(0)

    answers = rig.run([ask("a", 9, 40), ask("b", 5, 30)], preempt)
    assert not marks and answers["a"].preemptions == 2
    rig.assert_exact(answers)


def test_pages_run_out_and_the_oldest_goes_on() -> None:
    """Full pages for 24 rows beside plenty of window pages: growth preempts the youngest, in the same step."""
    rig, recorder = engine(pages=(40, 8), max_model_len=32)
    taken: list[set[int]] = []
    scheduler, full = rig.core.scheduler, 1
    real = scheduler.preempt

    def preempt(ticket: object) -> None:
        table = rig.core.ledger._tables[ticket.request_id][full]  # type: ignore[attr-defined]
        taken.append(set(table.columns))
        real(ticket)  # type: ignore[arg-type]

    with mock.patch.object(type(scheduler), "preempt", lambda _, ticket: preempt(ticket)):
        answers = rig.run([ask(f"r{i}", 6 + i, 18) for i in range(4)])
    assert rig.core.scheduler.num_preemptions > 0 and answers["r0"].preemptions == 0
    fresh = [
        {p for i in plan.items for p in set(i.tables[full].write) - set(i.tables[full].read)} for plan in recorder.plans
    ]
    assert any(pages & lost for pages in fresh for lost in taken), "no page of a preempted request was taken over"
    rig.assert_exact(answers)


def test_window_pages_short_while_full_pages_are_free() -> None:
    ring = -(-(W - 1) // 4) + 1
    rig, recorder = engine(pages=(2 * ring, 100))
    answers = rig.run([ask(f"r{i}", 9 + i, 12) for i in range(5)])
    assert max(len(p.items) for p in recorder.plans) == 2, "window pages admit two requests at a time"
    assert rig.core.scheduler.num_preemptions == 0, "windows are admitted whole and never grow"
    rig.assert_exact(answers)


def test_the_last_running_request_out_of_pages_recomputes_itself_and_ends() -> None:
    """Exactly one request of max_model_len fits; a second one's prompt took pages that the first needs."""
    rig, _ = engine(pages=(6, 6), max_model_len=24)
    answers = rig.run([ask("a", 3, 21), ask("b", 7, 17), ask("c", 12, 12)])
    assert rig.core.scheduler.num_preemptions > 0
    rig.assert_exact(answers)


def test_a_request_that_could_never_run_is_refused_with_the_numbers() -> None:
    rig, _ = engine(pages=(3, 4))
    with pytest.raises(RequestError, match=r"needs 6 pages of the full pool, which has 4.*lower max_tokens"):
        rig.core.add(ask("a", 12, 12).message())
    assert not rig.core.has_work
    rig.assert_exact(rig.run([ask("a", 8, 9)]))


def test_an_idle_engine_serves_a_request_that_needs_everything() -> None:
    rig, _ = engine(pages=(3, 24))
    for _ in range(2):
        rig.assert_exact(rig.run([ask("a", 60, 36)]))
    assert [pool.peak for pool in rig.core.ledger.stats()] == [3, 24]


def test_a_long_prompt_at_the_head_is_not_overtaken_and_stalls_nobody() -> None:
    rig, recorder = engine(pages=(9, 24))
    answers = rig.run([ask("now", 30, 10), ask("long", 80, 4, 1), *(ask(f"s{i}", 3 + i, 4, 2) for i in range(4))])
    rig.assert_exact(answers)
    order = list(dict.fromkeys(item.request_id for plan in recorder.plans for item in plan.items))
    assert order == ["now", "long", "s0", "s1", "s2", "s3"], "admission is in order of arrival"
    assert answers["long"].steps[0] > answers["s0"].steps[0], "its prefill leaves room for the others' tokens"


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [4, 9, 12, 14, 25])
def test_a_step_that_raises_once_costs_nobody_a_token(at: int, after: bool) -> None:
    rig, _ = engine()
    rig.wrap(lambda inner: FailingRunner(inner, victim="a", at=at, after=after))
    answers = rig.run([ask("a", 13, 20), ask("b", 4, 25), ask("c", 30, 6, at_step=1)])
    assert rig.core.counters.failed_steps == 1
    rig.assert_exact(answers)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("prompt", [3, 4, 17])
def test_a_request_that_always_raises_fails_alone(prompt: int, after: bool) -> None:
    rig, _ = engine()
    rig.wrap(lambda inner: FailingRunner(inner, victim="bad", at=None, after=after))
    answers = rig.run([ask("a", 13, 20), ask("b", 4, 25), ask("bad", prompt, 6, at_step=2), ask("c", 8, 5, at_step=3)])
    bad = answers.pop("bad")
    assert bad.finish_reason == "error" and "RuntimeError: a scripted failure" in (bad.error or "")
    assert rig.core.counters.failed_steps == 2
    rig.assert_exact(answers)


def test_retry_starts_from_zero_only_where_window_rows_were_overwritten() -> None:
    """A decode row repeats in place; a chunk longer than the ring's spare rows has overwritten what it read."""
    starts = {}
    for chunk, at in ((1, 20), (5, 40), (40, 60)):
        rig, recorder = engine(chunked_prefill_size=chunk, max_num_batched_tokens=48, page_size=2)
        rig.wrap(lambda inner, at=at: FailingRunner(inner, victim="a", at=at, after=True))
        rig.assert_exact(rig.run([ask("a", 70, 3)]))
        failed = next(n for n, p in enumerate(recorder.plans) if p.items[0].end >= at)
        starts[chunk] = (recorder.plans[failed].items[0].start, recorder.plans[failed + 1].items[0].start)
    assert starts[1][0] == starts[1][1] == 19, "a single row is repeated"
    assert starts[5][0] > 0 and starts[40][0] > 0
    assert starts[40][1] == 0, "rows that the chunk needs are gone, so it starts again"


# ------------------------------------------------------------------------------------------------ answers of one prompt


def siblings(n: int, length: int = 14, tokens: int = 2 * W + 1, at_step: int = 0) -> Request:
    return replace(ask("p", length, tokens, at_step, n=n, temperature=1.0), seed=40)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 14, 17])
def test_answers_of_one_prompt_equal_solo_runs_and_compute_the_prompt_once(length: int) -> None:
    rig, recorder = engine()
    shared: list[int] = []

    def look(core: EngineCore, answers: Answers) -> None:
        if len(core.ledger.requests) == 3 and not shared:
            total, private = core.ledger.request_pages("p"), core.ledger.private_pages("p")
            shared.append(total["full"] - private["full"])
            assert total["window"] == private["window"], "rings are written again, so they are copied"

    answers = rig.run([siblings(3, length)], look)
    assert shared == [length // 4], "whole pages of the prompt are shared"
    rows = sum(item.count for plan in recorder.plans for item in plan.items)
    assert rows == length + 3 * 2 * W, "the prompt is computed once, then each answer's rows"
    rig.assert_exact({})
    assert len({tuple(a.tokens) for a in answers.values()}) == 3, "the seeds give different answers"
    for i, name in enumerate(("p", "p#1", "p#2")):
        solo, _ = engine()
        alone = solo.run([replace(siblings(1, length), seed=40 + i)])["p"]
        assert answers[name].tokens == alone.tokens, name
        _assert_scores(rig, name, answers)


def _assert_scores(rig: Rig, name: str, answers: Answers) -> None:
    """Scores against the oracle; sampled tokens are nobody's arg-max."""
    with mock.patch.object(Rig, "_assert_greedy"):
        rig.assert_answer(name, answers[name])


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("victim", ["p", "p#1"])
def test_an_answer_cancelled_before_or_after_the_fork_leaves_the_others_exact(victim: str, when: str) -> None:
    rig, _ = engine()
    done: list[int] = []

    def cancel(core: EngineCore, answers: Answers) -> None:
        ticket = core.scheduler.find("p")
        computed = ticket.computed if ticket else 0
        due = {"queued": True, "prefill": 0 < computed < 14, "decode": len(answers[victim].tokens) == W}[when]
        if due and not done:
            core.cancel(CancelRequest(victim))
            done.append(1)

    answers = rig.run([ask("mate", 5, 20), siblings(3)], cancel)
    assert done and answers[victim].finish_reason == "cancelled"
    left = [name for name in ("p", "p#1", "p#2") if name != victim]
    for name in left:
        i = int(name[-1]) if "#" in name else 0
        alone = engine()[0].run([replace(siblings(1), seed=40 + i)])["p"]
        assert answers[name].tokens == alone.tokens and answers[name].finish_reason == "length"
        _assert_scores(rig, name, answers)


@pytest.mark.parametrize(
    ("pages", "seats"), [((6, 12), 8), ((40, 8), 8), ((40, 40), 2)], ids=["window", "full", "seats"]
)
def test_answers_that_find_no_page_or_seat_compute_the_prompt_themselves(pages: tuple[int, int], seats: int) -> None:
    rig, _ = engine(pages=pages, max_num_seqs=seats, max_model_len=32)
    answers = rig.run([siblings(4)])
    for i, name in enumerate(("p", "p#1", "p#2", "p#3")):
        alone = engine()[0].run([replace(siblings(1), seed=40 + i)])["p"]
        assert answers[name].tokens == alone.tokens, name


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_fork_whose_step_raises_is_made_again(after: bool) -> None:
    rig, _ = engine()
    rig.wrap(lambda inner: FailingRunner(inner, victim="p", at=14, after=after))
    answers = rig.run([ask("mate", 5, 20), siblings(3)])
    assert rig.core.counters.failed_steps == 1
    for i, name in enumerate(("p", "p#1", "p#2")):
        alone = engine()[0].run([replace(siblings(1), seed=40 + i)])["p"]
        assert answers[name].tokens == alone.tokens, name
    rig.assert_answer("mate", answers["mate"])
