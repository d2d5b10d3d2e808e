"""What the machine could do at best: memory reads and matrix products, measured in a process of its own.

``python -m sash.bench.ceiling THREADS`` prints a ``Ceiling`` as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod

from sash.spec.footprint import row_bytes
from sash.spec.groups import group_layers
from sash.spec.model import ModelSpec, expected_weights


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes per second that all threads read from memory, and operations per second of a large matrix product
    by type: float32, bfloat16, int8."""

    read_bytes_per_s: float
    gemm_op_per_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of the linear weights, what each KV group's rows are stored as (names of
    ``sash.spec.footprint.KV_BYTES``), and the type in which large products run."""

    weight_bytes: float
    kv: list[str]
    gemm: str


def measure(threads: int) -> Ceiling:
    """Best of some repeats of each; takes about three seconds."""
    import torch

    torch.set_num_threads(threads)
    memory = torch.ones(1 << 26)
    read = memory.numel() * memory.element_size() / best_time(memory.sum)
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    (a16, b16), (a8, b8) = ((a.to(t), b.to(t)) for t in (torch.bfloat16, torch.int8))
    products: dict[str, Callable[[], object]] = {
        "float32": lambda: a @ b,
        "bfloat16": lambda: a16 @ b16,
        "int8": lambda: torch._int_mm(a8, b8),
    }
    ops = 2 * a.numel() * b.shape[1]
    return Ceiling(read, {name: ops / best_time(call) for name, call in products.items()})


def measure_apart(threads: int) -> Ceiling:
    """``measure`` in a fresh process."""
    command = [sys.executable, "-m", "sash.bench.ceiling", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Ceiling(**json.loads(done.stdout.splitlines()[-1]))


def best_time(call: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of the fastest of some calls."""
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


def decode_bytes(spec: ModelSpec, context: int, precision: Precision, requests: int = 1) -> float:
    """Bytes that one decode step must read: the weights once, and each request's visible K and V."""
    layers, head = weight_elements(spec)
    visible = sum(
        g.span.bind(context).num_visible(context) * row_bytes(g, dtype)
        for g, dtype in zip(group_layers(spec), precision.kv, strict=True)
    )
    return float(precision.weight_bytes * (layers + head) + requests * visible)


def prefill_ceiling(top: Ceiling, spec: ModelSpec, precision: Precision, prompt: int) -> float:
    """Prompt tokens per second if every operation ran like a large product."""
    return prompt * top.gemm_op_per_s[precision.gemm] / prefill_flop(spec, prompt)


def decode_ceiling(top: Ceiling, spec: ModelSpec, precision: Precision, context: int, requests: int = 1) -> float:
    """Tokens per second of all requests if a step took only its reads, or its products where they take longer."""
    reads_s = decode_bytes(spec, context, precision, requests) / top.read_bytes_per_s
    products_s = 2.0 * requests * sum(weight_elements(spec)) / top.gemm_op_per_s[precision.gemm]
    return requests / max(reads_s, products_s)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1])))))
