"""What the machine could do at best: memory reads and matrix products, measured in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from sash.spec.footprint import KV_BYTES, row_bytes
from sash.spec.groups import group_layers
from sash.spec.model import ModelSpec, expected_weights


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes per second that all threads read from memory, and operations per second of a large matrix
    product in ``dtype``."""

    read_bytes_per_s: float
    gemm_flop_per_s: float


def measure(dtype: torch.dtype) -> Ceiling:
    """Best of some repeats of each; takes about two seconds."""
    memory = torch.ones(1 << 26)
    read = memory.numel() * memory.element_size() / _best(memory.sum)
    a, b = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    gemm = 2 * 1024 * 2048 * 2048 / _best(lambda: a @ b)
    return Ceiling(read, gemm)


def _best(call: Callable[[], object], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def weight_elements(spec: ModelSpec) -> tuple[int, int]:
    """Elements of the layers' linear weights, and of the head."""
    layers = sum(
        prod(shape) for name, shape in expected_weights(spec).items() if name.startswith("layers.") and len(shape) > 1
    )
    return layers, spec.vocab_size * spec.hidden_size


def prefill_flop(spec: ModelSpec, prompt: int) -> float:
    """Operations of a prompt: linear layers, attention over visible pairs, one row of the head."""
    layers, head = weight_elements(spec)
    bounds = {span: span.bind(prompt) for span in {layer.span for layer in spec.layers}}
    pairs = {span: sum(bound.num_visible(q) for q in range(prompt)) for span, bound in bounds.items()}
    attention = sum(2 * pairs[x.span] * x.num_heads * (x.head_dim + x.v_head_dim) for x in spec.layers)
    return 2.0 * layers * prompt + attention + 2.0 * head


def decode_bytes(spec: ModelSpec, context: int, dtype: str) -> float:
    """Bytes that one decode step of one request must read: weights, and the visible K and V."""
    layers, head = weight_elements(spec)
    kv_bytes = sum(g.span.bind(context).num_visible(context) * row_bytes(g, dtype) for g in group_layers(spec))
    return float(KV_BYTES[dtype] * (layers + head) + kv_bytes)
