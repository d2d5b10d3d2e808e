"""Memory of a request in a window pool: bounded at every step, flat in its length, whatever the chunk."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from tests.equivalence.harness import MACHINE, Request, build, random_tokens, tiny_spec

from sash.engine.core import EngineCore
from sash.engine.messages import AddRequest
from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence
from sash.kv.ledger.ledger import Ledger
from sash.scheduler.plan import StepPlan
from sash.scheduler.scheduler import Scheduler, Ticket
from sash.spec.config import EngineConfig
from sash.spec.footprint import ceil_div, page_bytes
from sash.spec.groups import group_layers
from sash.spec.sampling import SamplingParams
from sash.spec.sizing import Demand
from sash.spec.span import Span

PROMPT = 20_000


class CountingRunner:
    """Token 7 for everyone, and no computing."""

    device = torch.device("cpu")

    def run(self, plan: StepPlan, sequences: dict[str, Sequence]) -> StepResult:
        """Sample what the plan samples."""
        return StepResult({name: [7] for item in plan.items if item.samples for name in (item.request_id, *item.forks)})


def idle_core(spans: list[Span], **options: object) -> EngineCore:
    """A core whose pools are numbers only."""
    config = EngineConfig(dtype="float32", device="cpu", **options).resolve(tiny_spec(spans), MACHINE)  # type: ignore[arg-type]
    return EngineCore(config, 61, CountingRunner())


def request(name: str, prompt: int, tokens: int) -> AddRequest:
    return AddRequest((name,), (3,) * prompt, SamplingParams(max_tokens=tokens, temperature=0.0), (0,))


@pytest.mark.parametrize("chunk", [64, 512, 4096])
@pytest.mark.parametrize(("window", "page"), [(512, 16), (1, 16), (15, 16), (16, 16), (17, 16), (35, 64), (35, 1)])
def test_private_window_pages_never_exceed_the_ring(window: int, page: int, chunk: int) -> None:
    core = idle_core(
        [Span.sliding(window), Span.full(), Span.sliding(2 * window, sinks=4)],
        max_model_len=PROMPT + 200,
        max_num_seqs=2,
        max_num_batched_tokens=chunk + 2,
        chunked_prefill_size=chunk,
        page_size=page,
    )
    limits = {0: ceil_div(window - 1, page) + 1, 2: ceil_div(4, page) + ceil_div(2 * window - 1, page) + 1}
    core.add(request("mate", 40, 300))
    core.add(request("long", PROMPT, 2 * window + 3 if window < 60 else 30))
    most, steps = dict.fromkeys(limits, 0), 0
    while core.has_work:
        core.step()
        steps += 1
        if "long" in core.ledger:
            for group, limit in limits.items():
                pages = core.ledger._tables["long"][group].num_private
                assert pages <= limit, f"step {steps}: {pages} pages in pool {group}, at most {limit}"
                most[group] = max(most[group], pages)
        if steps % 50 == 1:
            core.scheduler.check()
    core.scheduler.check()
    assert steps > PROMPT // chunk and all(pool.held == pool.promised == 0 for pool in core.ledger.stats())
    # The bound is met, not only kept: rows of a whole window are there, on as many pages as they touch.
    assert all(most[group] >= limit - (window == 1 and group == 0) for group, limit in limits.items()), most


def test_the_real_runner_keeps_to_the_ring_and_the_oracle_at_20_000_tokens() -> None:
    """The last scores of a very long prompt, against the same window run over the tail alone: a window model of
    three layers sees 3 (W - 1) rows back and no further."""
    window, page = 40, 16
    options = EngineConfig(max_model_len=PROMPT + 50, max_num_seqs=1, max_num_batched_tokens=4096, page_size=page)
    spec = tiny_spec([Span.sliding(window)] * 3, rope=None)
    rig = build(spec, options)
    prompt = random_tokens(PROMPT, 1)
    ask = Request("long", prompt, 20, sampling={"prompt_logprobs": None})
    seen: list[int] = []

    def look(core: EngineCore, answers: object) -> None:
        if "long" in core.ledger:
            seen.append(core.ledger.private_pages("long")["window"])

    answer = rig.run([ask], look)["long"]
    assert max(seen) == ceil_div(window - 1, page) + 1 and rig.config.pages == (max(seen),)
    tail = prompt[-4 * window :]
    wanted = rig.dense([*tail, *answer.tokens], len(tail)).log_softmax(-1)[len(tail) - 1 : -1]
    for score, row in zip(answer.logprobs, wanted, strict=True):
        got = torch.tensor(score.top_logprobs)
        torch.testing.assert_close(got, row[list(score.top_ids)], rtol=0, atol=2e-3)


def test_window_bytes_of_a_request_are_flat_in_its_length() -> None:
    held = {}
    for length in (1_000, 4_000, 32_000):
        core = idle_core([Span.sliding(512), Span.full()], max_model_len=33_000, max_num_seqs=2)
        core.add(request("a", length, 2))
        while "a" not in core.ledger or core.scheduler.running[0].computed < length:
            core.step()
        group = core.ledger.groups[0]
        held[length] = core.ledger.request_pages("a")["window"] * page_bytes(group, 16, "float32")
        assert core.ledger.request_pages("a")["full"] == ceil_div(length, 16)
        core.step()
    assert len(set(held.values())) == 1, held


def test_fifty_thousand_decode_steps_leave_the_books_as_they_were() -> None:
    """A window model with plan, settle and nothing else: no object, no column and no page more after 50 000 steps."""
    groups = group_layers(tiny_spec([Span.sliding(35), Span.sliding(64, sinks=3), Span.chunked(48)]))
    demand = Demand(groups, dtypes=("float32",) * len(groups), page_size=16, max_model_len=60_000, max_num_seqs=2)
    ledger = Ledger(demand, tuple(2 * n for n in demand.request_pages()))
    scheduler = Scheduler(ledger, max_num_seqs=2, max_batched_tokens=64, chunk=64)
    for i in range(2):
        scheduler.add(Ticket(f"r{i}", i, 100 + i, 59_000))

    def measure() -> tuple[int, int, tuple[int, ...]]:
        gc.collect()
        columns = sum(sys.getsizeof(t.columns) for tables in ledger._tables.values() for t in tables)
        return len(gc.get_objects()), columns, tuple(p.held for p in ledger.stats())

    def run(steps: int) -> None:
        for _ in range(steps):
            plan = scheduler.schedule()
            assert plan is not None and len(plan.items) == 2
            scheduler.settle(plan)

    for _ in range(8):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.settle(plan)
    run(1_000)
    scheduler.check()
    first = measure()
    run(50_000)
    objects, columns, held = measure()
    scheduler.check()
    assert scheduler.running[0].computed > 50_000
    assert (columns, held) == first[1:] and abs(objects - first[0]) < 50


def test_the_core_keeps_nothing_of_what_has_ended() -> None:
    core = idle_core([Span.sliding(35), Span.full()], max_model_len=400, max_num_seqs=4)

    def serve(count: int) -> int:
        for i in range(count):
            core.add(request(f"r{i}", 5 + i % 70, 3 + i % 40))
        while core.has_work:
            core.step()
        gc.collect()
        return len(gc.get_objects())

    serve(20)
    first = serve(20)
    assert abs(serve(200) - first) < 50
    assert all(pool.held == pool.promised == 0 for pool in core.ledger.stats())
