"""One request driven by hand over a model's weights, with its window rows stored in one of several ways.

Everything but the storage is the engine's: the same runner, the same fused step, the same kernels. So a difference in
time or output is the storage's.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Items

import torch

from sash.engine.build import Built, build_beside
from sash.engine.llm import engine_config
from sash.engine.runner import Runner
from sash.engine.sequence import Sequence
from sash.kv.ledger.table import TableStep
from sash.kv.storage import KVPool
from sash.lab.context import Weights
from sash.ops.sampling import sampler_state
from sash.scheduler.plan import StepItem, StepPlan
from sash.spec.footprint import TableShape, row_bytes
from sash.spec.groups import GroupSpec
from sash.spec.model import ModelSpec
from sash.spec.sampling import SamplingParams

_REQUEST = "r"
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
STORAGES = ("ring", "full storage", "shift-left")


class Session:
    """A request of at most ``max_len`` tokens.

    Args:
        storage: ring, the engine's own; full storage, which keeps every row and masks what is out of the window; or
            shift-left, which keeps W rows in order and moves them all for each new one.
        spec: the model with other spans, or None.
        chunk: most tokens in one step.
    """

    def __init__(
        self, weights: Weights, storage: str, max_len: int, spec: ModelSpec | None = None, *, chunk: int = 512
    ) -> None:
        options = {
            "max_model_len": max_len,
            "max_num_seqs": 1,
            "max_num_batched_tokens": chunk,
            "disable_hybrid_swa_memory": storage == "full storage",
        }
        built = build_beside(weights.built, engine_config(options), spec)
        self._config, self._ledger, self._runner = built.config, built.core.ledger, built.runner
        self._ledger.admit(_REQUEST, max_len, max_len, max_len)
        self._chunk = chunk
        self._shifted: dict[int, _Shifted] = {}
        if storage == "shift-left":
            self._shift(built)
        state = sampler_state(
            _GREEDY, seed=0, stop_ids=(), prompt=(), vocab_size=built.spec.vocab_size, device=torch.device("cpu")
        )
        self._sequence = Sequence(_REQUEST, [], max_len, 1, _GREEDY, state, frozenset(), None, None)
        self.length = 0

    def _shift(self, built: Built) -> None:
        """Put pools that shift in the place of the windows' rings."""
        pools = list(self._runner.pools)
        for g, (group, dtype) in enumerate(zip(self._config.groups, self._config.demand.dtypes, strict=True)):
            if group.bounded:
                self._shifted[g] = _Shifted(group, dtype, self._chunk)
                pools[g] = self._shifted[g].pool
        decoder = self._runner.decoder
        self._runner = Runner(built.spec, decoder, decoder.ops, self._config, tuple(pools))

    def feed(self, tokens: Items[int]) -> int:
        """Read tokens, the next of the text; returns the token that the model would write after them."""
        best = -1
        for first in range(0, len(tokens), self._chunk):
            best = self._step(tokens[first : first + self._chunk])
        return best

    def _step(self, tokens: Items[int]) -> int:
        start, count = self.length, len(tokens)
        self._sequence.tokens += tokens
        tables = self._ledger.reserve(_REQUEST, start, count)
        assert tables is not None  # the pools have the pages of the longest request
        steps = [self._shifted[g].table(t, start, count) if g in self._shifted else t for g, t in enumerate(tables)]
        item = StepItem(_REQUEST, start, count, True, tuple(steps))
        result = self._runner.run(StepPlan((item,)), {_REQUEST: self._sequence})
        for shifted in self._shifted.values():
            shifted.settle(start + count)
        self.length += count
        return result.tokens[_REQUEST][0]

    def held_bytes(self) -> dict[str, int]:
        """Bytes that hold rows of the request now, by group."""
        stats = zip(self._ledger.stats(), self._config.demand.page_bytes(), strict=True)
        out = {pool.group: pool.held * size for pool, size in stats}
        return out | {s.group.name: s.held_bytes for s in self._shifted.values()}


class _Shifted:
    """Rows of a window group in the order of their positions: the oldest in slot 0. New rows come behind them; then all
    move left until the window starts at slot 0 again."""

    def __init__(self, group: GroupSpec, dtype: str, chunk: int) -> None:
        self.group, self._window = group, group.span.window
        self._slots, self._row_bytes = self._window + chunk, row_bytes(group, dtype)
        self.pool = KVPool(group, self._slots, 1, getattr(torch, dtype), "cpu")
        self._base = self._held = 0  # position in slot 0, and rows that are stored

    @property
    def held_bytes(self) -> int:
        return self._held * self._row_bytes

    def table(self, step: TableStep, start: int, count: int) -> TableStep:
        """Where the step finds and leaves rows: position p in slot p - base."""
        turn = self._base % self._slots
        columns = array("i", (*range(self._slots - turn, self._slots), *range(self._slots - turn)))
        shape = TableShape(1, 0, self._slots, 0)
        return TableStep(shape, step.bound, columns, columns, step.bound.retained_from(start + count))

    def settle(self, end: int) -> None:
        """Move the rows left after a step that ended before position ``end``."""
        by = max(end - self._window - self._base, 0)
        self._held = end - self._base - by
        self._base += by
        if not by:
            return
        for plane in self.pool.planes:
            row = plane.stride(2) * plane.element_size()
            for part in plane.flatten(0, 1):
                # The best that shifting can do: one move over memory that overlaps.
                ctypes.memmove(part.data_ptr(), part.data_ptr() + by * row, self._held * row)
