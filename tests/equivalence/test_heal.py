"""A plan that rebuilds lost windows exactly: per layer the first row still computed, and whether it is written.

At the j-th window layer from the top, K and V of j (W - 1) rows are computed and attention for (j - 1)(W - 1);
full layers between read their cached rows; nothing is computed above the top window layer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.equivalence.harness import Request, Rig, build, random_tokens, tiny_spec

from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence as Answering
from sash.kv.ledger.table import EMPTY, TableStep
from sash.kv.storage import KVRows
from sash.scheduler.plan import StepItem, StepPlan
from sash.spec.config import EngineConfig
from sash.spec.span import Span

W, V = Span.sliding(6), Span.sliding(9)
F = Span.full()
N = 41  # rows of the prefix


def heal_rows(spans: Sequence[Span], n: int) -> tuple[int, tuple[int, ...], tuple[bool, ...]]:
    """First row of the plan, first row that leaves each layer, and which layers are written."""
    need, first_rows, writes = 0, [], []
    for span in reversed(spans):
        first_rows.append(max(n - need, 0))
        writes.append(span.bounded)
        need += span.window - 1 if span.bounded else 0
    return max(n - need, 0), tuple(reversed(first_rows)), tuple(reversed(writes))


class Healer:
    """Before the step at row ``n``: forgets every window row, rebuilds them by a plan, then lets the step go on."""

    def __init__(self, rig: Rig, n: int) -> None:
        self._inner, self._rig, self._n = rig.core.runner, rig, n
        self.device = self._inner.device
        self.rows: list[int] = []  # rows that enter each layer while healing
        self.healed = False

    def run(self, plan: StepPlan, sequences: dict[str, Answering]) -> StepResult:
        """The step, after healing where it is due."""
        if plan.items[0].start == self._n and not self.healed:
            self.healed = True
            self._heal(plan, sequences)
        return self._inner.run(plan, sequences)

    def _heal(self, plan: StepPlan, sequences: dict[str, Answering]) -> None:
        runner, item = self._rig.runner, plan.items[0]
        spans = [layer.span for layer in self._rig.spec.layers]
        start, first_rows, writes = heal_rows(spans, self._n)
        tables = []
        for group, pool, step in zip(self._rig.config.groups, runner.pools, item.tables, strict=True):
            if group.bounded:
                pool.k.fill_(float("nan"))
                pool.v.fill_(float("nan"))
            read = array("i", [EMPTY] * len(step.read)) if group.bounded else step.read
            kept = step.bound.retained_from(self._n)
            tables.append(TableStep(step.shape, step.bound, read, step.read, kept))
        healing = StepItem(
            item.request_id, start, self._n - start, False, tuple(tables), first_rows=first_rows, writes=writes
        )
        ops = runner._ops

        def attention(q: torch.Tensor, rows: KVRows, *args: object, **how: object) -> object:
            self.rows.append(rows.k.shape[0])
            return ops.attention(q, rows, *args, **how)

        runner._ops = replace(ops, attention=attention)
        runner.run(StepPlan((healing,)), sequences)
        runner._ops = ops


@pytest.mark.parametrize("kernels", ["torch", "reference", "deterministic"])
@pytest.mark.parametrize("n", [N, 7, 12])
@pytest.mark.parametrize(
    "spans",
    [[W, F, W], [F, W, W, F], [W, W, W, F], [W, F, F], [F, F, W], [W, F, V, F, W], [W], [F, W, F, Span.chunked(7)]],
    ids=lambda spans: "-".join(s.kind[0] + str(s.window) for s in spans),
)
def test_windows_rebuilt_from_the_full_layers_rows_give_the_same_scores(
    spans: list[Span], n: int, kernels: str
) -> None:
    options = EngineConfig(
        max_model_len=90,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        page_size=4,
        deterministic=kernels == "deterministic",
    )
    rig = build(tiny_spec(spans), options, kernels="reference" if kernels == "reference" else "torch", fill=None)
    healer = Healer(rig, n)
    rig.core.runner = healer
    rig.assert_exact(rig.run([Request("a", random_tokens(n, 1), 20)]))
    assert healer.healed and rig.core.counters.failed_steps == 0
    # What the step's K and V cost: exactly the rows of the formula.
    start, first_rows, _ = heal_rows(spans, n)
    enter = [start, *first_rows[:-1]]
    assert healer.rows == [n - max(a, start) for a in enter]
