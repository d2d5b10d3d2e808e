"""One attention layer on the engine's own ledger, pool and kernel, without a model around it."""

from __future__ import annotations

import time

import torch

from sash.engine.step import GroupStep, Rows
from sash.kv.ledger.ledger import Ledger
from sash.kv.storage import KVPool
from sash.ops.base import Ops
from sash.scheduler.plan import StepItem
from sash.spec.groups import GroupSpec
from sash.spec.sizing import Demand
from sash.spec.span import Span

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_REQUEST = "r"


class OneLayer:
    """One request in one layer. ``heads`` are KV heads of ``dim`` dimensions.

    Args:
        span: what a token sees.
        ops: whose attention runs.
        keeps_all: store the full length, whatever the span is.
    """

    def __init__(
        self,
        span: Span,
        ops: Ops,
        *,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        max_len: int,
        page_size: int = 16,
        keeps_all: bool = False,
    ) -> None:
        group = GroupSpec("layer", span, (0,), heads, dim, dim)
        demand = Demand((group,), (_NAMES[dtype],), page_size, max_len, 1, hybrid_ratio=0.0 if keeps_all else 1.0)
        self._ledger = Ledger(demand, demand.request_pages())
        self._ledger.admit(_REQUEST, max_len, max_len, max_len)
        self._page_bytes = demand.page_bytes()[0]
        self._ops = ops
        self.pool = KVPool(group, demand.request_pages()[0], page_size, dtype, "cpu")
        self.length = 0
        self.attention_s = 0.0  # of the last step

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that the request holds now."""
        return self._ledger.stats()[0].held * self._page_bytes

    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float = 0.0
    ) -> torch.Tensor:
        """Attend with the next rows and store them: q [N, Hq, D], k and v [N, H, D] to [N, Hq, D].

        Rows are written before they attend, or after it, as in the engine's steps.
        """
        start, count = self.length, len(k)
        tables = self._ledger.reserve(_REQUEST, start, count)
        assert tables is not None  # the pool has the pages of the longest request
        item = StepItem(_REQUEST, start, count, False, tables)
        view = GroupStep.build((item,), 0, (Rows(start, start),), (True,), torch.device("cpu"))
        rows = self.pool.rows(k, v)
        if view.early is not None:
            self.pool.write(0, rows, *view.early)
        started = time.perf_counter()
        out: torch.Tensor = self._ops.attention(q, rows, self.pool.layers[0], view.batch, scale=scale, softcap=softcap)[
            0
        ]
        self.attention_s = time.perf_counter() - started
        if view.late is not None:
            self.pool.write(0, rows, *view.late)
        self.length += count
        return out
