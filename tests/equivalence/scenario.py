"""Runs one row of the matrix: builds the engine, plays the row's life, compares everything with the oracle."""

from __future__ import annotations

import torch
from tests.equivalence import axes
from tests.equivalence.covering import Row
from tests.equivalence.harness import Answers, Request, Rig, build, random_tokens, tiny_spec

from sash.engine.core import EngineCore, StepRunner
from sash.engine.messages import CancelRequest
from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence
from sash.scheduler.plan import StepPlan
from sash.spec.config import ResolvedConfig

VICTIM = "victim"


class FailingRunner:
    """Raises in the steps that ``fails`` picks, before or after the real work is done."""

    def __init__(self, inner: StepRunner, *, victim: str, at: int | None, after: bool) -> None:
        self._inner, self._victim, self._at, self._after = inner, victim, at, after
        self.device = inner.device
        self.raised = 0

    def _hit(self, plan: StepPlan) -> bool:
        mine = [item for item in plan.items if item.request_id == self._victim]
        if self._at is None:
            return bool(mine)
        return not self.raised and any(item.end >= self._at for item in mine)

    def run(self, plan: StepPlan, sequences: dict[str, Sequence]) -> StepResult:
        """The step, or an error."""
        if not self._hit(plan):
            return self._inner.run(plan, sequences)
        self.raised += 1
        if self._after:
            self._inner.run(plan, sequences)
        raise RuntimeError("a scripted failure")


def pages(row: Row, config: ResolvedConfig) -> tuple[int, ...]:
    """Pools of the row's size."""
    least = config.demand.request_pages()
    match row["pool"]:
        case "minimum":
            return least
        case "window short":
            return tuple(n if g.bounded else 8 * n for g, n in zip(config.groups, least, strict=True))
        case "full short":
            return tuple(8 * n if g.bounded else n for g, n in zip(config.groups, least, strict=True))
    return tuple(8 * n for n in least)


class Life:
    """What happens to a row's requests on the way; ``happened`` tells whether it did."""

    def __init__(self, row: Row, size: axes.Sizes) -> None:
        self._life = row["life"]
        self._mark = size.prompt + min(size.decode // 2, size.unit + 1)
        self.happened = False

    def __call__(self, core: EngineCore, answers: Answers) -> None:
        """Before each step."""
        if self.happened:
            return
        if self._life == "preempt":
            ticket = core.scheduler.find("main")
            if ticket is not None and ticket in core.scheduler.running and ticket.computed >= self._mark:
                core.scheduler.preempt(ticket)
                self.happened = True
        elif self._life.startswith("cancel") and self._due(core, answers):
            core.cancel(CancelRequest(VICTIM))
            self.happened = True

    def _due(self, core: EngineCore, answers: Answers) -> bool:
        ticket = core.scheduler.find(VICTIM)
        if ticket is None:
            return False
        if self._life == "cancel queued":
            return ticket not in core.scheduler.running
        if self._life == "cancel in prefill":
            return 0 < ticket.computed < ticket.prompt_tokens
        return len(answers[VICTIM].tokens) > 2


def play(row: Row, seed: int) -> Rig:
    """Run a row and assert everything; returns the engine for a closer look."""
    size = axes.sizes(row)
    asked = axes.requests(row, size, seed)
    if row["life"].startswith("cancel") or row["life"] == "request fails":
        length = size.chunk + 2 if row["life"] == "cancel in prefill" else min(size.unit + 2, 40)
        asked.append(Request(VICTIM, random_tokens(length, seed + 5), 6, at_step=1))
    longest = max(len(r.prompt) + r.max_tokens for r in asked)
    spec = tiny_spec(axes.spans(row, size.window), **axes.heads(row))
    rig = build(
        spec,
        axes.options(row, size, longest),
        pages=lambda config: pages(row, config),
        kernels=row["kernels"] if row["kernels"] in ("reference", "native") else "torch",
        fill=row["memory"],
        seed=seed,
    )
    fails_after = row["life"] == "step fails after"
    if row["life"].startswith("step fails"):
        at = min(size.prompt + size.decode // 2, size.prompt + size.decode - 1)
        rig.wrap(lambda inner: FailingRunner(inner, victim="main", at=at, after=fails_after))
    elif row["life"] == "request fails":
        rig.wrap(lambda inner: FailingRunner(inner, victim=VICTIM, at=None, after=bool(seed % 2)))
    life = Life(row, size)
    with torch.inference_mode():
        answers = rig.run(asked, life)
    _judge(row, rig, answers, life)
    return rig


def _judge(row: Row, rig: Rig, answers: Answers, life: Life) -> None:
    victim = answers.pop(VICTIM, None)
    if victim is not None:
        rig.assert_answer(VICTIM, victim)
        if row["life"] == "request fails":
            assert victim.finish_reason == "error" and "scripted failure" in (victim.error or "")
            assert rig.core.counters.failed_steps == 2
        else:
            assert victim.finish_reason == ("cancelled" if life.happened else "length")
    if row["life"].startswith("step fails"):
        assert rig.core.counters.failed_steps == 1
    rig.assert_exact(answers)
