"""``sash bench ops``: single ops beside what memory and products allow, with a model's own shapes.

A case is added by a function that yields ``OpCase`` and stands in ``TABLE``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sash.bench import ceiling
from sash.bench.record import circumstances
from sash.kv.storage import KVRows, Planes
from sash.ops.base import Ops
from sash.ops.paged import PagedBatch, Segment
from sash.ops.registry import resolve_ops
from sash.spec.errors import ConfigError
from sash.spec.groups import GroupSpec, group_layers
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.spec.model import LayerSpec, ModelSpec

DECODE_CONTEXTS = (1000, 16_384, 30_000)
PREFILL_CONTEXTS = (512, 16_384)
LINEAR_ROWS = (1, 8, 32, 512)
# Up to so many rows the weights' bytes bound a product, not its operations.
_READING_ROWS = 8
_CHUNK = 512
# K and V of a layer may fit a cache, which they don't when other layers come between: calls go round so many bytes.
_ROUND_BYTES = 1 << 26
_REPEATS, _SECONDS, _TURNS = 30, 1.0, 100
DTYPES = ("bfloat16", "float32")
_GROWTH = "attention decode after 30 000 tokens / after 1000"


@dataclass(frozen=True, slots=True)
class OpCase:
    """One op on one shape. ``amount`` is what a call must do at least: operations of products (``bound`` is the
    type they run in), or bytes read (``bound`` is "memory")."""

    name: str
    call: Callable[[], object]
    amount: float
    bound: str


def run(model: str, dtype: str, only: str, threads: int, say: Any = print) -> dict[str, Any]:
    """Time every case whose name contains ``only``; returns the record.

    Raises:
        ConfigError: an unknown dtype, or no such case.
        ModelError: the model can't be found or read.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} has no ceiling to compare with; use {' or '.join(DTYPES)}")
    torch.set_num_threads(threads)
    spec, kernels = load_spec(locate(model)), resolve_ops()
    top = ceiling.measure_apart(threads)
    found = []
    for case in itertools.chain.from_iterable(make(spec, kernels, getattr(torch, dtype)) for make in TABLE):
        if only in case.name:
            found.append(_figure(case, top))
            say(_line(found[-1]))
    growth = window_growth(spec, kernels, getattr(torch, dtype)) if only in _GROWTH else {}
    for name, ratio in growth.items():
        say(f"{_GROWTH}, {name} layers: {ratio:.3f}")
    if not found and not growth:
        raise ConfigError(f"--only {only!r} is in no case's name; leave it out to see them all")
    return {
        "command": "sash bench ops",
        "seed": 0,
        **circumstances(Path(__file__)),
        "model": model,
        "dtype": dtype,
        "threads": threads,
        "kernels": f"{kernels.name} {kernels.note}".strip(),
        "ceiling": asdict(top),
        "figures": found,
        "growth": growth,
    }


def attention_cases(spec: ModelSpec, kernels: Ops, dtype: torch.dtype) -> Iterator[OpCase]:
    """One layer of each group: a decoding row, then a chunk of a prompt, at several contexts."""
    for group in group_layers(spec):
        layer = spec.layers[group.layers[0]]
        for context in DECODE_CONTEXTS:
            yield _attention(layer, group, kernels, dtype, context, 1)
        for context in PREFILL_CONTEXTS:
            yield _attention(layer, group, kernels, dtype, context, min(_CHUNK, context))


def window_growth(spec: ModelSpec, kernels: Ops, dtype: torch.dtype) -> dict[str, float]:
    """Time of a decoding row after 30 000 tokens to that after 1000, in turn, by name of each bounded group."""
    out = {}
    for group in filter(lambda group: group.bounded, group_layers(spec)):
        layer = spec.layers[group.layers[0]]
        near, far = (_attention(layer, group, kernels, dtype, context, 1).call for context in (1000, 30_000))
        times: dict[Callable[[], object], list[float]] = {near: [], far: []}
        for _ in range(_TURNS):
            for call, taken in times.items():
                taken.append(ceiling.best_time(call, repeats=3))
        out[group.name] = statistics.median(times[far]) / statistics.median(times[near])
    return out


def linear_cases(spec: ModelSpec, kernels: Ops, dtype: torch.dtype) -> Iterator[OpCase]:
    """The first layer's products and the head, as int8 and as they are, from one row to a prompt's chunk."""
    layer = spec.layers[0]
    shapes = {
        "qkv": (
            layer.num_heads * layer.head_dim + layer.num_kv_heads * (layer.head_dim + layer.v_head_dim),
            spec.hidden_size,
        ),
        "o": (spec.hidden_size, layer.num_heads * layer.v_head_dim),
        "gate_up": (2 * layer.mlp.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, layer.mlp.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }
    for quantization in ("int8", "none"):
        table = resolve_ops(kernels=kernels.name, quantization=quantization) if kernels.name == "native" else kernels
        for name, (outputs, inputs) in shapes.items():
            for rows in LINEAR_ROWS[:-1] if name == "head" else LINEAR_ROWS:
                yield _linear(f"linear {name} {quantization}, rows {rows}", (rows, inputs, outputs), table, dtype)


def _linear(name: str, shape: tuple[int, int, int], table: Ops, dtype: torch.dtype) -> OpCase:
    """``shape`` is rows, inputs, outputs. Few rows are bound by reading the weights, many by products."""
    rows, inputs, outputs = shape
    item = 1 if table.quantization == "int8" else dtype.itemsize
    copies = max(1, min(64, _ROUND_BYTES // (inputs * outputs * item)))
    weights = itertools.cycle([table.pack(torch.randn(outputs, inputs).to(dtype)) for _ in range(copies)])
    x = torch.randn(rows, inputs).to(dtype)
    reads, products = float(inputs * outputs * item), 2.0 * rows * inputs * outputs
    kind = "int8" if table.quantization == "int8" else str(dtype).removeprefix("torch.")
    amount, bound = (reads, "memory") if rows <= _READING_ROWS else (products, kind)
    return OpCase(name, lambda: table.linear(x, next(weights), None), amount, bound)


TABLE: list[Callable[[ModelSpec, Ops, torch.dtype], Iterator[OpCase]]] = [attention_cases, linear_cases]


def _attention(layer: LayerSpec, group: GroupSpec, kernels: Ops, dtype: torch.dtype, context: int, rows: int) -> OpCase:
    """Attention of the last ``rows`` of ``context`` tokens. One row is in the pool already, a chunk is in hand."""
    bound, start = group.span.bind(context), context - rows
    in_hand = rows if rows > 1 else 0
    past = torch.tensor([p for p in range(context - in_hand) if p < bound.sinks or p >= bound.first(start)])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    heads, slots = group.num_kv_heads, max(len(past), 1)
    q = random(rows, layer.num_heads, group.head_dim)
    k, v = random(in_hand, heads, group.head_dim), random(in_hand, heads, group.v_head_dim)
    layer_bytes = heads * slots * (group.head_dim + group.v_head_dim) * dtype.itemsize
    planes = itertools.cycle(
        [
            Planes(random(heads, slots, group.head_dim), random(heads, slots, group.v_head_dim))
            for _ in range(max(1, min(64, _ROUND_BYTES // layer_bytes)))
        ]
    )
    rows_in_hand = KVRows(k, v)
    segment = Segment(bound, 0, start, rows, 0, context - in_hand, in_hand, past, torch.arange(len(past)))
    batch = PagedBatch((segment,))
    pairs = sum(bound.num_visible(p) for p in range(start, context))
    single = rows == 1
    return OpCase(
        f"attention {'decode' if single else f'prefill {rows}'}, {group.name}, context {context}",
        lambda: kernels.attention(q, rows_in_hand, next(planes), batch, scale=layer.scale, softcap=layer.softcap),
        float(layer_bytes) if single else 2.0 * pairs * layer.num_heads * (group.head_dim + group.v_head_dim),
        "memory" if single else str(dtype).removeprefix("torch."),
    )


def _figure(case: OpCase, top: ceiling.Ceiling) -> dict[str, Any]:
    times: list[float] = []
    case.call()
    began = time.perf_counter()
    while len(times) < _REPEATS and (len(times) < 3 or time.perf_counter() - began < _SECONDS):
        started = time.perf_counter()
        case.call()
        times.append(time.perf_counter() - started)
    limit = top.read_bytes_per_s if case.bound == "memory" else top.gemm_op_per_s[case.bound]
    seconds = statistics.median(times)
    return {
        "name": case.name,
        "seconds": seconds,
        "best_s": min(times),
        "runs": len(times),
        "per_s": case.amount / seconds,
        "unit": "GB/s" if case.bound == "memory" else "GFLOP/s",
        "ceiling_per_s": limit,
    }


def _line(figure: dict[str, Any]) -> str:
    limit = figure["ceiling_per_s"]
    share = f"{100 * figure['per_s'] / limit:5.0f} % of {limit / 1e9:.0f}"
    rate = f"{figure['per_s'] / 1e9:8.1f} {figure['unit']:7s}"
    return f"{figure['name']:48s} {1e6 * figure['seconds']:10.1f} us {rate} {share}"
