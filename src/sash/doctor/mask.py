"""Which stored rows a query really sees: each is disturbed in the pool, and the step run again.

A row that is masked must change nothing, whatever it holds; one that is seen must change the scores. So the window's
edge is found to the row, on any kernel and in any precision, where scores alone could not tell 511 rows from 512.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sash.doctor.finding import Finding, Status, ok, skipped
from sash.doctor.rule import sees
from sash.doctor.watch import Watch
from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence as Answering
from sash.kv.storage import KVPool
from sash.scheduler.plan import StepPlan
from sash.spec.groups import GroupSpec
from sash.spec.span import Span, SpanKind

EDGE, BY_POSITION = "mask-edge", "mask-by-position"
# Large enough to show at the smallest weight, small enough that its square is a float32.
_LOUD = 1e18
# Stored rows of one query that are all tried; of more a selection.
_ALL = 64
# Scores of two runs of one step differ by less.
_NOISE = 0.05
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Sight:
    """Whether the query at position ``q`` (in ``q_slot``) saw the stored row of position ``k`` (in ``k_slot``)."""

    group: GroupSpec
    prompt_tokens: int
    q: int
    q_slot: int
    k: int
    k_slot: int
    seen: bool

    def agrees(self, span: Span, *, by_slot: bool = False) -> bool:
        """Whether the rule with this span tells the same."""
        key = self.k_slot if by_slot else self.k
        return bool(sees(span, self.prompt_tokens, self.q, key)) == self.seen


class Sights:
    """A probe (``sash.doctor.watch.Probe``) that looks at single rows at the positions ``queries``."""

    def __init__(self, queries: Sequence[int]) -> None:
        self._queries = frozenset(queries)
        self.found: list[Sight] = []

    def __call__(self, watch: Watch, plan: StepPlan, sequences: dict[str, Answering], result: StepResult) -> None:
        """Look, if this is a step of one row of one request at one of the positions."""
        item = plan.items[0]
        if len(plan.items) > 1 or item.count != 1 or item.start not in self._queries:
            return
        base = _scores(result, item.request_id)
        for group, memory in zip(watch.groups, watch.memories, strict=True):
            slots = memory.slot_of(item.request_id)
            own = slots.get(item.start, -1)
            prompt = sequences[item.request_id].prompt_tokens
            for position in _selected(group.span, slots, item.start):
                if slots[position] == own:
                    continue
                with _disturbed(memory.pool, slots[position]):
                    now = _scores(watch.inner.run(plan, sequences), item.request_id)
                seen = _differ(base, now)
                self.found.append(Sight(group, prompt, item.start, own, position, slots[position], seen))
        watch.inner.run(plan, sequences)  # the step's own rows once more, from rows as they were


def _selected(span: Span, slots: dict[int, int], q: int) -> list[int]:
    """Positions of stored rows before ``q``: all of few, of many those where masks go wrong and some others."""
    stored = sorted(p for p in slots if p < q)
    if len(stored) <= _ALL:
        return stored
    edge = q - span.window
    wanted = {0, 1, span.sinks - 1, span.sinks, q - 1, q - 2, *range(edge - 1, edge + 3)}
    by_slot = sorted(stored, key=lambda p: slots[p])
    wanted |= {*by_slot[:2], *by_slot[-2:], *random.Random(q).sample(stored, 10), stored[0], stored[-1]}
    return [p for p in stored if p in wanted]


def _scores(result: StepResult, name: str) -> tuple[float, ...] | None:
    """Log-probabilities of the best tokens; None where the step gave none."""
    scored = result.logprobs.get(name)
    return scored[0].top_logprobs if scored else None


def _differ(a: tuple[float, ...] | None, b: tuple[float, ...] | None) -> bool:
    if a is None or b is None:
        return a is not b
    return not all(abs(x - y) <= _NOISE for x, y in zip(a, b, strict=True))


@contextmanager
def _disturbed(pool: KVPool, slot: int) -> Iterator[None]:
    """Another row in every layer: a key of zeros, so that it gets some weight, and values that are loud."""
    planes = pool.planes
    before = [plane[:, :, slot].clone() for plane in planes]
    loud = min(_LOUD, torch.finfo(pool.v.dtype).max / 2) if pool.v.is_floating_point() else 127
    pool.k[:, :, slot] = 0
    pool.v[:, :, slot] = loud
    if pool.v_scale is not None:
        pool.v_scale[:, :, slot] = _LOUD / 127
    try:
        yield
    finally:
        for plane, rows in zip(planes, before, strict=True):
            plane[:, :, slot] = rows


def mask_findings(sights: Sequence[Sight]) -> list[Finding]:
    """The edge of the window, and whether everything else is masked by position."""
    if not sights:
        why = "no query could be looked at: the text is too short"
        return [skipped(EDGE, why), skipped(BY_POSITION, why)]
    wrong = [s for s in sights if not s.agrees(s.group.span)]
    if not wrong:
        return _healthy(sights)
    spans = {s.group.span for s in wrong}
    for step in (1, -1):
        if all(_shifted_explains(sights, span, step) for span in spans):
            return [_edge_off(wrong, step), skipped(BY_POSITION, f"explained by {EDGE}")]
    return [skipped(EDGE, f"explained by {BY_POSITION}"), _not_by_position(sights, wrong)]


def _shifted_explains(sights: Sequence[Sight], span: Span, step: int) -> bool:
    if span.kind is SpanKind.FULL or span.window + step < 1:
        return False
    other = Span(span.kind, span.window + step, span.sinks)
    return all(s.agrees(other) for s in sights if s.group.span == span)


def _healthy(sights: Sequence[Sight]) -> list[Finding]:
    windows = [s for s in sights if s.group.span.kind is not SpanKind.FULL]
    by_position = ok(
        BY_POSITION,
        f"{len(sights)} stored rows were disturbed: the {sum(s.seen for s in sights)} that the rule shows changed the "
        f"scores, the {sum(not s.seen for s in sights)} that it hides changed nothing",
    )
    if not windows:
        return [skipped(EDGE, "no row of a window is stored before its query"), by_position]
    parts = []
    for group in dict.fromkeys(s.group for s in windows):
        own = [s for s in windows if s.group == group and s.k >= group.span.sinks]
        farthest = max((s.q - s.k for s in own if s.seen), default=0)
        nearest = min((s.q - s.k for s in own if not s.seen), default=None)
        unseen = f", distance {nearest} is not" if nearest is not None else ""
        parts.append(f"{group.name} ({group.span.describe()}): distance {farthest} is seen{unseen}")
    return [ok(EDGE, "; ".join(parts)), by_position]


def _edge_off(wrong: Sequence[Sight], step: int) -> Finding:
    sight = wrong[0]
    distance, window = sight.q - sight.k, sight.group.span.window
    what = "is seen, and must not be" if sight.seen else "is not seen, and must be"
    return Finding(
        EDGE,
        Status.FAIL,
        f"{sight.group.name} layers, window {window}: for the query at position {sight.q} the row at distance "
        f"{distance} {what} (disturbing it {'changes' if sight.seen else 'does not change'} the scores)",
        f"the window is off by one: {window + step} rows are seen instead of {window}; W counts the query itself, so "
        f"the farthest row stands at distance W - 1",
        "make the rule first(q) = q - W + 1 everywhere: in sash.spec.span and where kernels take a window_left, "
        "which is W - 1",
    )


def _not_by_position(sights: Sequence[Sight], wrong: Sequence[Sight]) -> Finding:
    q = wrong[0].q
    here = [s for s in wrong if s.q == q and s.group == wrong[0].group]
    hidden, shown = [s.k for s in here if not s.seen], [s.k for s in here if s.seen]
    parts = [f"must see and doesn't: {_listed(hidden)}"] * bool(hidden) + [
        f"sees and mustn't: {_listed(shown)}"
    ] * bool(shown)
    bounded = {s.group for s in wrong}
    own = [s for s in sights if s.group in bounded]
    before = [s for s in own if s.q < min(s.q for s in wrong) and s.q_slot == s.q]
    if all(s.agrees(s.group.span, by_slot=True) for s in own) or before:
        cause = (
            f"the mask compares slots instead of positions: {'all was right before the ring wrapped; ' * bool(before)}"
            f"now position {here[0].k} lies in slot {here[0].k_slot} and is judged by that"
        )
    elif all(s.seen for s in own):
        cause = "no window is applied: every row that is still stored is seen"
    else:
        right = sum(s.agrees(s.group.span, by_slot=True) for s in own) / len(own)
        cause = (
            f"the mask is not the rule over true positions (slots in their place would explain {right:.0%} of what was "
            f"seen)"
        )
    return Finding(
        BY_POSITION,
        Status.FAIL,
        f"{here[0].group.name} layers: the query at position {q} {'; '.join(parts)}",
        cause,
        "give the kernel each key's position beside its slot (Segment.past_positions and past_slots of "
        "sash.ops.paged) and compare positions",
    )


def _listed(positions: Sequence[int]) -> str:
    more = f" and {len(positions) - _NAMED} more" if len(positions) > _NAMED else ""
    return f"position{'s' * (len(positions) > 1)} {', '.join(map(str, sorted(positions)[:_NAMED]))}{more}"
