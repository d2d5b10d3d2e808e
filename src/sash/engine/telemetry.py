"""What a core counts, and how its report is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sash.engine.report import EngineReport, PoolReport, RequestReport
from sash.engine.sequence import Sequence
from sash.scheduler.plan import StepPlan
from sash.scheduler.scheduler import Scheduler, Ticket
from sash.spec.footprint import uniform_bytes
from sash.spec.sizing import Demand


@dataclass(slots=True)
class Counters:
    """What a core has done since its start; the names are those of ``EngineReport``. ``late_masks`` are rows that were
    computed again because their grammar had no mask for them yet."""

    steps: int = 0
    computed_tokens: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    late_masks: int = 0
    uniform_peak_bytes: int = 0
    busy_s: float = 0.0
    step_tokens: dict[int, int] = field(default_factory=dict)

    def note_step(self, plan: StepPlan, demand: Demand, running: list[Ticket]) -> None:
        """A step is about to run."""
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        size = 1 << (plan.num_tokens - 1).bit_length()
        self.step_tokens[size] = self.step_tokens.get(size, 0) + 1
        self.uniform_peak_bytes = max(self.uniform_peak_bytes, _uniform_bytes(demand, running))


def _uniform_bytes(demand: Demand, running: list[Ticket]) -> int:
    """What one cache without windows would hold of these requests."""
    return sum(uniform_bytes(demand.groups, t.scheduled, demand.page_size, demand.dtypes) for t in running)


def make_report(
    demand: Demand,
    scheduler: Scheduler,
    sequences: Mapping[str, Sequence],
    counters: Counters,
    *,
    page_maps: bool = False,
) -> EngineReport:
    """The engine now. ``page_maps`` asks for what stands on every page."""
    running, waiting = len(scheduler.running), len(sequences) - len(scheduler.running)
    return EngineReport(
        pools=_pools(demand, scheduler, page_maps),
        requests=[_request(seq, scheduler.find(seq.answer_id)) for seq in sequences.values()],
        max_model_len=demand.max_model_len,
        max_num_seqs=demand.max_num_seqs,
        running=running,
        waiting=waiting,
        waiting_for={scheduler.lack: waiting} if waiting else {},
        steps=counters.steps,
        failed_steps=counters.failed_steps,
        preemptions=scheduler.num_preemptions,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        draft_tokens=counters.draft_tokens,
        accepted_tokens=counters.accepted_tokens,
        uniform_peak_bytes=counters.uniform_peak_bytes,
        busy_s=counters.busy_s,
        step_tokens=counters.step_tokens,
        computed_tokens=counters.computed_tokens,
        uniform_bytes=_uniform_bytes(demand, scheduler.running),
    )


def _pools(demand: Demand, scheduler: Scheduler, page_maps: bool) -> list[PoolReport]:
    ledger = scheduler.ledger
    holders = {r: ledger.request_pages(r) for r in ledger.requests}
    sizes = zip(demand.dtypes, demand.page_bytes(), demand.request_pages(), strict=True)
    return [
        PoolReport(
            name=group.name,
            span=group.span.describe(),
            layers=len(group.layers),
            dtype=dtype,
            page_size=demand.page_size,
            page_bytes=page_bytes,
            num_pages=pool.total,
            free_pages=pool.free,
            held_pages=pool.held,
            promised_pages=pool.promised,
            peak_pages=pool.peak,
            longest_pages=longest,
            slid_pages=pool.slid,
            written_rows=pool.written_rows,
            requests={r: pages[group.name] for r, pages in holders.items()},
            page_map=ledger.page_map(i) if page_maps else None,
            kind=group.span.kind.value,
            window=group.span.window,
            sinks=group.span.sinks,
        )
        for i, (group, pool, (dtype, page_bytes, longest)) in enumerate(
            zip(demand.groups, ledger.stats(), sizes, strict=True)
        )
    ]


def _request(seq: Sequence, ticket: Ticket | None) -> RequestReport:
    computed = ticket.computed if ticket else 0
    if ticket is None or not ticket.scheduled:
        state = "waiting"
    else:
        state = "decode" if computed >= seq.prompt_tokens else "prefill"
    return RequestReport(
        answer_id=seq.answer_id,
        state=state,
        prompt_tokens=seq.prompt_tokens,
        computed_tokens=computed,
        generated_tokens=seq.generated,
        max_tokens=seq.max_tokens,
        preemptions=ticket.preemptions if ticket else 0,
    )
