"""A whole plan, and its form as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sash.planner.advice import Advice, Needs, advise
from sash.planner.capacity import MAX_CONTEXT, Layout
from sash.planner.compute import attention_flop, attention_prompt_flop, crossover_prompt, crossover_token, linear_flop
from sash.planner.designs import Cost, Policy, designs, policies
from sash.planner.estimates import Estimate, estimates
from sash.planner.shapes import Shapes
from sash.planner.solve import Answer, Question, instead, solve
from sash.planner.speed import Device, Times, decode_step, prefill
from sash.spec.errors import ConfigError

RATIOS = (0.5, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One split of the budget: pages by group, and the requests of the whole context that fit at once. ``ratio`` None
    is the automatic split."""

    ratio: float | None
    pages: tuple[int, ...]
    requests: int


@dataclass(frozen=True, slots=True)
class Tier:
    """A place below the pools, for kept prefixes: bytes, and bytes per second of reading back."""

    name: str
    num_bytes: int
    read_bytes_per_s: float


@dataclass(frozen=True)
class Plan:
    """Everything about one model under one question."""

    answer: Answer
    question: Question
    needs: Needs
    ratios: tuple[float, ...] = RATIOS
    device: Device | None = None
    tiers: tuple[Tier, ...] = ()

    @property
    def layout(self) -> Layout:
        """How rows are stored."""
        return self.answer.layout

    @property
    def shapes(self) -> Shapes:
        """The model."""
        return self.answer.shapes

    def pools(self) -> tuple[PoolRow, ...]:
        """The automatic split, and those at given ratios where a model has two kinds of pool."""
        a = self.answer
        splits: list[tuple[float | None, tuple[int, ...]]] = [(None, a.pages)]
        if self.shapes.hybrid and a.context:
            splits += [(r, self.layout.ratio_pools(a.context, max(a.requests, 1), a.kv_bytes, r)) for r in self.ratios]
        return tuple(PoolRow(r, pages, self.layout.fitting(pages, max(a.context, 1), a.prompt)) for r, pages in splits)

    def longest(self) -> int:
        """The longest context of a request that has the pools for itself, at most the model's own or what was asked."""
        a = self.answer
        limit = max(self.shapes.max_position, a.context) if self.shapes.max_position else MAX_CONTEXT
        return self.layout.longest_context(1, a.kv_bytes, limit, a.context - a.prompt or 1)

    def instead(self) -> tuple[Answer, ...]:
        """Where it doesn't fit: what would; a device's memory is what it is."""
        fixed = self.device is not None and self.device.memory_bytes == self.question.memory_bytes is not None
        return tuple(o for o in instead(self.answer, self.question) if not (fixed and o.solved == "memory"))

    def advice(self) -> tuple[Advice, ...]:
        """What to do."""
        return advise(self.answer, self.needs)

    def policies(self) -> tuple[Policy, ...]:
        """Ways to store this model's rows."""
        return policies(self.layout)

    def estimates(self) -> tuple[Estimate, ...]:
        """Rules of thumb beside exact values."""
        a = self.answer
        return estimates(self.layout, max(a.context, 1), a.prompt, a.kv_bytes)

    def million(self) -> tuple[Cost, ...]:
        """What a million tokens cost each way."""
        return designs(self.layout)

    def times(self) -> dict[str, Times]:
        """Of the prompt, of a step of one request and of all, on the device; empty without one or without weights."""
        a = self.answer
        if self.device is None or self.shapes.weights is None or not a.context:
            return {}
        out = {"prefill": prefill(self.layout, self.device, a.prompt)}
        for requests in dict.fromkeys((1, max(a.requests, 1))):
            out[f"decode {requests}"] = decode_step(self.layout, self.device, a.context, a.prompt, requests)
        return out


def make_plan(
    shapes: Shapes,
    question: Question,
    *,
    needs: Needs = "distant",
    ratios: Sequence[float] = RATIOS,
    device: Device | None = None,
    tiers: Sequence[Tier] = (),
) -> Plan:
    """Solve and wrap up. A named device's memory limits the pools where no limit is given.

    Raises:
        ConfigError: see ``solve``; a ratio out of range.
    """
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise ConfigError(f"--ratio must be above 0 and at most 1, got {ratio:g}; 0.8 is usual")
    if device is not None and question.memory_bytes is None and question.kv_bytes is None and device.memory_bytes:
        question = replace(question, memory_bytes=device.memory_bytes)
    return Plan(solve(shapes, question), question, needs, tuple(ratios), device, tuple(tiers))


def document(plan: Plan) -> dict[str, Any]:
    """The plan as data for JSON; bytes, tokens, seconds and operations are plain numbers."""
    a, layout, shapes = plan.answer, plan.layout, plan.shapes
    context = max(a.context, 1)
    return {
        "model": _model(shapes),
        "answer": {
            "solved": a.solved,
            "fits": a.fits,
            "precision": asdict(layout.precision),
            "context_tokens": a.context,
            "beyond_model_tokens": a.beyond,
            "prompt_tokens": a.prompt,
            "requests": a.requests,
            "memory_bytes": a.memory_bytes,
            "reserve_bytes": a.reserve_bytes,
            "weight_bytes": a.weight_bytes,
            "kv_bytes": a.kv_bytes,
            "needed_kv_bytes": a.needed_bytes,
            "longest_context_alone": plan.longest(),
        },
        "instead": [_offer(other) for other in plan.instead()],
        "groups": _groups(plan, context),
        "request": {
            "bytes": layout.request_bytes(context),
            "held_bytes": layout.held_bytes(context, a.prompt),
            "row_bytes": sum(layout.row_bytes(context, a.prompt).values()),
            "uniform_bytes": layout.uniform_bytes(context),
        },
        "pools": [
            {
                "ratio": row.ratio,
                "pages": dict(zip([g.name for g in shapes.groups], row.pages, strict=True)),
                "requests": row.requests,
            }
            for row in plan.pools()
        ],
        "policies": [
            {
                "name": p.name,
                "bytes": p.layout.held_bytes(context, a.prompt),
                "requests": p.layout.most_requests(context, a.prompt, a.kv_bytes),
                "exact": p.exact,
                "note": p.note,
            }
            for p in plan.policies()
        ],
        "tiers": [asdict(t) | {"prefixes": t.num_bytes // layout.held_bytes(context, a.prompt)} for t in plan.tiers],
        "compute": _compute(plan, context),
        "device": None
        if plan.device is None
        else {"name": plan.device.name, "measured": plan.device.habits is not None},
        "times": {name: asdict(times) | {"bound_by": times.bound_by} for name, times in plan.times().items()},
        "estimates": [asdict(e) | {"factor": e.factor} for e in plan.estimates()],
        "million_tokens": [asdict(cost) for cost in plan.million()],
        "advice": [asdict(advice) for advice in plan.advice()],
    }


def _offer(other: Answer) -> dict[str, Any]:
    return {
        "change": other.solved,
        "memory_bytes": other.memory_bytes,
        "kv_bytes": other.kv_bytes,
        "precision": asdict(other.layout.precision),
        "context_tokens": other.context,
        "requests": other.requests,
    }


def _model(shapes: Shapes) -> dict[str, Any]:
    count = shapes.weights
    return {
        "name": shapes.name,
        "architecture": shapes.architecture,
        "layers": shapes.num_layers,
        "max_position": shapes.max_position,
        "weights": None if count is None else asdict(count) | {"total": count.total, "active": count.active},
        "kinds": [
            {"count": k.count, "span": k.span.describe(), "heads": k.num_heads, "kv_heads": k.num_kv_heads}
            | {"head_dim": k.head_dim, "v_head_dim": k.v_head_dim, "shared": k.shared}
            for k in shapes.kinds
        ],
    }


def _groups(plan: Plan, context: int) -> list[dict[str, Any]]:
    a, layout = plan.answer, plan.layout
    demand = layout.demand(context, 1)
    rows = layout.row_bytes(context, a.prompt)
    parts = zip(plan.shapes.groups, layout.dtypes, demand.request_pages(), demand.page_bytes(), a.pages, strict=True)
    return [
        {
            "name": g.name,
            "span": g.span.describe(),
            "layers": len(g.layers),
            "dtype": dtype,
            "token_bytes": layout.token_bytes[g.name],
            "page_bytes": page,
            "request_pages": pages,
            "request_row_bytes": rows[g.name],
            "pool_pages": pool,
            "pool_bytes": pool * page,
        }
        for g, dtype, pages, page, pool in parts
    ]


def _compute(plan: Plan, context: int) -> dict[str, Any]:
    shapes, prompt = plan.shapes, plan.answer.prompt
    known = shapes.weights is not None
    return {
        "linear_flop_per_token": linear_flop(shapes) if known else None,
        "attention_flop_last_token": attention_flop(shapes, context - 1, prompt),
        "attention_flop_prompt": attention_prompt_flop(shapes, prompt),
        "crossover_token": crossover_token(shapes) if known else None,
        "crossover_prompt": crossover_prompt(shapes) if known else None,
    }
