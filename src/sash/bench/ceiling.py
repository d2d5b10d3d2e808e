"""What the machine could do at best: memory reads and matrix products, measured in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

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
    layers = 0
    for name, shape in expected_weights(spec).items():
        if name.startswith("layers.") and len(shape) > 1:
            count = 1
            for size in shape:
                count *= size
            layers += count
    return layers, spec.vocab_size * spec.hidden_size


def visible_rows(spec: ModelSpec, layer: int, prompt: int) -> int:
    """Query-key pairs that a layer must look at for a prompt."""
    bound = spec.layers[layer].span.bind(prompt)
    return sum(q - bound.first(q) + 1 for q in range(prompt))


def prefill_flop(spec: ModelSpec, prompt: int) -> float:
    """Operations of a prompt: linear layers, attention over visible pairs, one row of the head."""
    layers, head = weight_elements(spec)
    pairs: dict[object, int] = {}
    attention = 0
    for i, layer in enumerate(spec.layers):
        rows = pairs.setdefault(layer.span, 0) or visible_rows(spec, i, prompt)
        pairs[layer.span] = rows
        attention += 2 * rows * layer.num_heads * (layer.head_dim + layer.v_head_dim)
    return 2.0 * layers * prompt + attention + 2.0 * head


def decode_bytes(spec: ModelSpec, context: int, itemsize: int) -> float:
    """Bytes that one decode step of one request must read: weights, and the visible K and V."""
    layers, head = weight_elements(spec)
    rows = 0
    for layer in spec.layers:
        bound = layer.span.bind(context)
        rows += (context - bound.first(context) + 1) * layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    return float(itemsize) * (layers + head + rows)
