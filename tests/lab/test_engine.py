"""Experiments about the engine around the windows, each on a tiny model: chunks, long prompts, batches, pools."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from sash.engine.core import EngineCore
from sash.kv.ledger.table import PageTable, TableStep
from sash.lab import batch, batch_speed, chunk, memory, ratio, stall
from sash.lab.apart import apart, here
from sash.lab.context import Context
from sash.lab.crowd import Answer, Crowd, Job, difference
from sash.lab.draw import draw
from sash.lab.experiment import Finding, NotApplicable, Verdict
from sash.scheduler.plan import StepPlan
from sash.scheduler.scheduler import Scheduler
from sash.spec.errors import SashError
from sash.spec.sampling import TokenLogprobs


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts of tests rest on outputs and counts, never on how fast the machine is."""
    monkeypatch.setattr(stall, "_SHARE", float("inf"))
    monkeypatch.setattr(chunk, "_SLOWER", 0.0)
    # In a test's large process it takes half a second.
    monkeypatch.setattr(memory, "bytes_at_rest", lambda: 0)


def complete(found: Finding) -> None:
    """Every number has a unit, every plot a reading."""
    for row in found.rows:
        assert row.keys() == found.rows[0].keys()
        numbers = [c for c, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
        assert set(numbers) <= found.units.keys()
    assert found.plots and all(plot.x.unit and plot.y.unit and plot.reading for plot in found.plots)


# ------------------------------------------------------------------------------------------------ chunk

CHUNKS = chunk.Plan(60, (4, 16, 64), 2, answer=5)


def test_chunks_change_nothing_but_their_memory(context: Context) -> None:
    found = chunk.measure(context, CHUNKS, _weighed({4: (10, 30), 16: (10, 40), 64: (10, 50)}))
    assert found.verdict is Verdict.HOLDS, found.sentence
    assert [row["chunk"] for row in found.rows] == [4, 16]
    # Window 5 on pages of 4: two pages, whatever the chunk.
    assert [row["window rows"] for row in found.rows] == [8, 8]
    assert [row["rule of thumb"] for row in found.rows] == [14, 36]
    complete(found)


def _weighed(sizes: dict[int, tuple[int, int]]) -> Any:
    def weigh(_: object, __: Context, *, length: int, chunk: int) -> dict[str, int]:
        rest, peak = sizes[chunk]
        return {"rest": rest << 20, "peak": peak << 20, "held": 2 << 20}

    return weigh


def test_less_memory_for_larger_chunks_is_no_support(context: Context) -> None:
    plan = chunk.Plan(60, (4, 16), 1, answer=5, weighed=(4, 16))
    found = chunk.measure(context, plan, _weighed({4: (10, 30), 16: (10, 20)}))
    assert found.verdict is Verdict.FAILS and [row["peak memory"] for row in found.rows] == [20, 10]
    complete(found)


def test_rows_that_a_chunk_spoils_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EngineCore._note_step

    def spoils(self: EngineCore, plan: Any) -> None:
        plain(self, plan)
        if plan.items[0].start:
            for pool in self.runner.pools:  # type: ignore[attr-defined]
                pool.v.mul_(-2)

    monkeypatch.setattr(EngineCore, "_note_step", spoils)
    found = chunk.measure(context, CHUNKS)
    assert found.verdict is Verdict.FAILS and "the answer is NOT the same" in found.sentence


def test_memory_is_that_of_a_process_of_its_own(context: Context) -> None:
    found = apart(chunk.weigh_chunk, context, length=40, chunk=8)
    assert found["peak"] >= found["rest"] > 0
    # 40 rows of the full layer and the last page of 4 in 6 window layers; K and V of 32 float32 a row.
    assert found["held"] == (40 + 6 * 4) * 256
    with pytest.raises(SashError, match=r"the process that measures memory ended with 1: .*RequestError"):
        apart(chunk.weigh_chunk, context, length=0, chunk=8)


# ------------------------------------------------------------------------------------------------ stall

STALL = stall.Plan(40, (4, 16), 2, runners=2, short=6, before=2)


def test_nobody_misses_a_step_while_a_long_prompt_is_read(context: Context) -> None:
    found = stall.measure(context, STALL)
    assert found.verdict is Verdict.HOLDS, found.sentence
    assert [(row["chunk"], row["steps"], row["tokens missed"]) for row in found.rows] == [
        (4, 10, 0),
        (16, 3, 0),
        (40, 1, 0),
    ]
    assert list(found.plots[1].lines) == ["chunks of 4", "chunks of 16"]
    complete(found)


def test_requests_that_wait_for_a_prompt_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler._schedule_decodes

    def waits(self: Scheduler, items: Any) -> bool:
        prompt = any(ticket.remaining > 1 for ticket in (*self.running, *self.waiting))
        return False if prompt else plain(self, items)

    monkeypatch.setattr(Scheduler, "_schedule_decodes", waits)
    monkeypatch.setattr(Scheduler, "_schedule_prefills", _only_prompts(Scheduler._schedule_prefills))
    found = stall.measure(context, STALL)
    assert found.verdict is Verdict.FAILS and "NO token in a step" in found.sentence


def _only_prompts(plain: Any) -> Any:
    """Prefill that leaves decoding requests where they are."""

    def schedule(self: Scheduler, items: Any, *, admit: bool) -> None:
        decoding = [t for t in self.running if t.decoding]
        kept, self.running = self.running, [t for t in self.running if not t.decoding]
        plain(self, items, admit=admit)
        self.running = sorted({*kept, *self.running}, key=lambda t: t.arrival) if decoding else self.running

    return schedule


def test_a_long_wait_is_no_support(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_SHARE", 0.0)
    assert stall.measure(context, STALL).verdict is Verdict.FAILS


# ------------------------------------------------------------------------------------------------ batch

BATCH = batch.Plan((2, 9, 17, 30), 5, (2, 4))
TOY = batch.Plan((1, 8, 9, 20), 6, (2, 4))


def test_nothing_is_seen_of_others_and_nothing_is_padded(context: Context) -> None:
    found = batch.measure(context, BATCH, TOY)
    assert found.verdict is Verdict.HOLDS, found.sentence
    assert [(row["stack"], row["batch"]) for row in found.rows] == [
        (stack, size) for stack in (batch._FIXED, batch._FAST) for size in (2, 4)
    ]
    for row in found.rows:
        rows = (2 + 9 + 17 + 30 + 4 * 4) if row["stack"] == batch._FAST else (1 + 8 + 9 + 20 + 4 * 5)
        assert row["rows computed"] == row["rows needed"] == 3 * rows
        assert row["bits with other neighbours"] == 100
    complete(found)


def test_a_pointer_that_requests_share_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PageTable.reserve

    def shares(self: PageTable, start: int, count: int) -> TableStep:
        step = plain(self, start, count)
        if not self.bound.span.bounded:
            return step
        # Everybody's ring lies on the pool's first pages.
        read, write = (array("i", [i if p >= 0 else p for i, p in enumerate(old)]) for old in (step.read, step.write))
        return replace(step, read=read, write=write)

    monkeypatch.setattr(PageTable, "reserve", shares)
    found = batch.measure(context, BATCH, TOY)
    assert found.verdict is Verdict.FAILS and "bits CHANGE" in found.sentence


def test_padded_rows_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StepPlan, "num_tokens", property(lambda self: len(self.items) * max(item.count for item in self.items))
    )
    found = batch.measure(context, BATCH, TOY)
    assert found.verdict is Verdict.FAILS and "rows were computed that nobody needs" in found.sentence


def test_differences_count_up_to_the_first_other_token() -> None:
    def answer(*scores: tuple[int, float]) -> Answer:
        return Answer(scores=[TokenLogprobs(t, p, 1, (t, 9), (p, -3.0)) for t, p in scores])

    a = answer((1, -1.0), (2, -1.0), (3, -1.0))
    assert difference(a, a) == 0
    assert difference(a, answer((1, -1.25), (2, -1.0), (3, -1.0))) == 0.25
    assert difference(a, answer((1, -1.0), (4, -5.0), (3, -9.0))) == 0


def test_speed_of_batches(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = batch_speed.Plan((1, 3), 6, 4, 2)
    monkeypatch.setattr(batch_speed, "_GAIN", 0.0)
    found = batch_speed.measure(context, plan)
    assert found.verdict is Verdict.HOLDS and [row["batch"] for row in found.rows] == [1, 3]
    complete(found)
    rows = [batch_speed._row(size, times, [0.1, 0.1]) for size, times in ((1, [0.1, 0.1]), (4, [0.2, 0.2]))]
    monkeypatch.undo()
    assert rows[1]["times one request"] == pytest.approx(2) and rows[1]["tokens of each"] == pytest.approx(5)
    assert batch_speed._finding(plan, rows).verdict is Verdict.HOLDS
    slow = batch_speed._row(4, [0.4, 0.4], [0.1, 0.1])
    assert batch_speed._finding(plan, [rows[0], slow]).verdict is Verdict.FAILS


# ------------------------------------------------------------------------------------------------ ratio

RATIO = ratio.Plan(ratio.Load(2, 60, 4), ratio.Load(10, 4, 8), (0.01, 0.2, 1.0), 2, seats=6)


def test_ratios_and_the_automatic_split_serve_the_same_load(context: Context) -> None:
    own = Context(context.model, quick=True, threads=1, options={"dtype": "float32", "page_size": 4})
    found = ratio.measure(own, RATIO)
    by = {row["split"]: row for row in found.rows}
    # A window pool of a hundredth could not hold one request's window.
    assert by.keys() == {"automatic", "0.2", "1.0"}
    assert by["1.0"]["full pool"] == by["1.0"]["window pool"] < by["0.2"]["full pool"]
    assert by["1.0"]["waits for full"] > by["0.2"]["waits for full"]
    assert all(row["computed again"] >= 0 and 0 < row["full peak"] <= 100 for row in found.rows)
    assert all((row["computed again"] > 0) == (row["preemptions"] > 0) for row in found.rows)
    complete(found)


@pytest.mark.parametrize(("steps", "verdict"), [(100, Verdict.HOLDS), (150, Verdict.FAILS)])
def test_more_steps_than_a_ratio_needs_are_no_support(steps: int, verdict: Verdict) -> None:
    pools = [{"kind": kind, "pages": 10, "peak": 10} for kind in ("window", "full")]
    found = {
        "automatic": ratio.Reading([1.0], steps, 200, Counter(full=9), pools=pools),
        "0.5": ratio.Reading([1.0], 100, 200, Counter(window=8), preemptions=3, again=7, pools=pools),
    }
    finding = ratio._finding(RATIO, 1 << 20, [Job("a", [1, 2], 50)], found)
    assert finding.verdict is verdict
    assert "waited for the full pool, at 0.5 for the window pool" in finding.sentence


def test_what_waiting_requests_lack(context: Context) -> None:
    core = context.llm(max_model_len=64, max_num_seqs=2).core
    crowd = Crowd(core)
    crowd.add(*(Job(name, context.ids(8), 4) for name in "abc"))
    crowd.step()
    assert ratio.lacks(core) == {"seats"}
    crowd.stop()
    assert ratio.lacks(core) == set()


# ----------------------------------------------------------------------------------------------- memory


def fresh(*arguments: Any, **named: Any) -> Any:
    """``here``, as if pools had got memory that nobody used before."""
    return [{**entry, "resident before": 0} for entry in here(*arguments, **named)]


def test_the_bytes_are_true(context: Context) -> None:
    found = memory.measure(context, memory.Plan((18, 1000, 2000)), fresh)
    assert found.verdict is Verdict.HOLDS, found.sentence
    by = {(row["stack"], row["length"]): row for row in found.rows}
    assert by.keys() == {(stack, n) for stack in ("full", "hybrid", "pure") for n in (16, 1000, 2000)}
    # K and V of 32 float32 a row, 7 layers; a ring of two pages of 4 rows.
    assert by["full", 2000]["predicted"] * 2**20 == 7 * 2000 * 256 == by["pure", 2000]["uniform"] * 2**20
    assert by["hybrid", 2000]["predicted"] * 2**20 == (2000 + 6 * 8) * 256
    assert by["pure", 2000]["held"] == by["pure", 1000]["held"]
    complete(found)


def test_a_few_rows_are_not_measured(context: Context) -> None:
    with pytest.raises(NotApplicable, match="fewer than 256 tokens"):
        memory.run(Context(context.model, options=context.options, lengths=(1, 4000)))


@pytest.mark.parametrize("column", ["allocated", "held", "resident"])
def test_bytes_that_nobody_predicted_are_found(context: Context, column: str) -> None:
    def more(*arguments: Any, **named: Any) -> Any:
        found = fresh(*arguments, **named)
        found[-1][column] += found[-1]["predicted"] // 8
        return found

    assert memory.measure(context, memory.Plan((16, 64)), more).verdict is Verdict.FAILS


@pytest.mark.parametrize(("used", "verdict"), [(1, Verdict.HOLDS), (2, Verdict.SKIPPED)])
def test_requests_in_memory_that_was_used_before_are_not_measured(
    context: Context, used: int, verdict: Verdict
) -> None:
    def stale(*arguments: Any, **named: Any) -> Any:
        found = fresh(*arguments, **named)
        for entry in found[-used:]:
            entry["resident before"] = entry["resident"] = entry["predicted"] // 2
        return found

    found = memory.measure(context, memory.Plan((16, 64)), stale)
    assert found.verdict is verdict
    assert f"Requests not measured: {3 * used}" in found.sentence and "lies in memory is not measured" in found.sentence
    assert [row["resident"] is None for row in found.rows] == [used == 2, True] * 3
    assert all(draw(plot) for plot in found.plots)
    complete(found)


def test_pools_lie_in_memory_that_nobody_used_before(context: Context) -> None:
    lengths = [512, 1024]
    with_holes = apart(_weigh_among_holes, context, stack="full", lengths=lengths)
    assert [entry["resident before"] <= 0.1 * entry["predicted"] for entry in with_holes] == [True, True]


def _weigh_among_holes(context: Context, *, stack: str, lengths: list[int]) -> list[dict[str, int]]:
    """As if engines wrote and freed many blocks below the size that gets memory of its own."""
    plain, above = memory.together, []

    def leaves_holes(*arguments: Any, **named: Any) -> Any:
        answers = plain(*arguments, **named)
        blocks = [torch.ones(60_000, dtype=torch.uint8) for _ in range(1000)]
        above.append([torch.ones(60_000, dtype=torch.uint8) for _ in range(10)])
        del blocks
        return answers

    memory.together = leaves_holes
    return memory.weigh_stack(context, stack=stack, lengths=lengths)


def test_resident_bytes_are_those_that_were_touched() -> None:
    fresh = torch.empty(64 << 20, dtype=torch.uint8)
    before = memory.resident(fresh)
    fresh[1 << 20 : 33 << 20] = 1
    assert before < 1 << 20 and memory.resident(fresh) == pytest.approx(32 << 20, rel=0.1)
    fresh.fill_(1)
    assert memory.resident(fresh) == 64 << 20


def test_models_that_have_nothing_to_show_are_told(full_context: Context) -> None:
    with pytest.raises(NotApplicable, match="no layer of this model has a window"):
        ratio.run(full_context)
    found = memory.measure(full_context, memory.Plan((16, 64)), fresh)
    assert found.verdict is Verdict.HOLDS and {row["stack"] for row in found.rows} == {"full"}
    assert len(chunk.measure(full_context, CHUNKS).plots) == 1


# ------------------------------------------------------------------------------------------------ crowd


def test_a_request_that_fails_is_no_measurement(context: Context) -> None:
    llm = context.llm(max_model_len=64, request_timeout_s=1e-9)
    crowd = Crowd(llm.core)
    crowd.add(Job("a", context.ids(8), 4))
    with pytest.raises(SashError, match="ended with timeout"):
        crowd.run()


def test_results_travel_as_json(context: Context) -> None:
    assert here(lambda context, number: {1: (number,)}, context, number=2) == {"1": [2]}
