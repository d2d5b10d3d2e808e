"""Times of a prompt and of a decoding step by the roofline: reads at the memory's rate, products at the machine's.

On a named device these are bounds: nothing runs faster, and reads and products overlap wholly. On the measured CPU they
are predictions: kernels reach a known share of a large product, a step costs something per layer and request, and
with few rows reads and products don't overlap (``Habits``, fitted to measurements at 37 to 69 GB/s, see docs/log.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sash.planner.capacity import WEIGHT_BYTES, Layout
from sash.planner.compute import attention_flop, attention_prompt_flop
from sash.planner.shapes import WeightCount
from sash.spec.errors import ConfigError

# Greedy steps of at most so many requests read six of an int8 head's eight bits.
_SEARCHED_ROWS, _SEARCHED_SHARE = 4, 0.75


@dataclass(frozen=True, slots=True)
class Habits:
    """What sash's kernels make of a CPU's ceilings.

    ``linear``, ``attention`` of a prompt and ``attention_of_one`` query are shares of a large product's rate,
    ``layer_s`` seconds of a layer in a step that are none of these, ``row_s`` of a layer for each request that decodes,
    ``chunk`` the tokens of a prompt that one step computes.
    """

    linear: float = 0.74
    attention: float = 0.95
    attention_of_one: float = 0.12
    layer_s: float = 42e-6
    row_s: float = 5e-6
    chunk: int = 512


@dataclass(frozen=True, slots=True)
class Device:
    """What a device does at best: bytes read per second, operations per second of large products by type, bytes of
    its memory (0: not said). ``habits`` make predictions of the bounds."""

    name: str
    read_bytes_per_s: float
    op_per_s: Mapping[str, float]
    memory_bytes: int = 0
    habits: Habits | None = None

    def rate(self, kind: str) -> float:
        """Operations per second of products of weights stored as ``kind``. int4 is multiplied as int8 on a measured
        CPU, elsewhere as bfloat16."""
        if kind == "int4":
            kind = "int8" if self.habits else "bfloat16"
        found = self.op_per_s.get(kind) or self.op_per_s.get("float16" if kind == "bfloat16" else "bfloat16")
        return found or max(self.op_per_s.values())


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, and where they go. ``reads_s`` and ``products_s`` (attention in both) and what is neither."""

    total_s: float
    reads_s: float
    products_s: float
    other_s: float

    @property
    def bound_by(self) -> str:
        """What takes longest: reads, products, or the rest."""
        parts = {"reads": self.reads_s, "products": self.products_s, "overhead": self.other_s}
        return max(parts, key=lambda name: parts[name])


def decode_step(layout: Layout, device: Device, context: int, prompt: int, requests: int = 1) -> Times:
    """A step that adds one token to each of ``requests`` requests of ``context`` tokens.

    Raises:
        ConfigError: the weights are unknown.
    """
    shapes, count = layout.shapes, _count(layout)
    kind, habits = layout.precision.weights, device.habits
    reads_s = _weights_read(count, kind, requests, searched=habits is not None) / device.read_bytes_per_s
    rows_s = requests * sum(layout.row_bytes(context, prompt).values()) / device.read_bytes_per_s
    linear = 2.0 * requests * count.active / device.rate(kind)
    attention = requests * attention_flop(shapes, context - 1, prompt) / device.rate("bfloat16")
    if habits is None:
        return _bound(reads_s + rows_s, linear + attention)
    products, other = linear / habits.linear, shapes.num_layers * (habits.layer_s + requests * habits.row_s)
    # The kernel reads K and V as it multiplies them: the slower of both is its pace.
    own = attention / habits.attention_of_one
    if rows_s > own:
        reads_s += rows_s
    else:
        products += own
    return Times(reads_s + products + other, reads_s, products, other)


def prefill(layout: Layout, device: Device, prompt: int) -> Times:
    """A prompt of ``prompt`` tokens of one request; of the head one row.

    Raises:
        ConfigError: the weights are unknown.
    """
    shapes, count = layout.shapes, _count(layout)
    kind, habits = layout.precision.weights, device.habits
    chunk = habits.chunk if habits else max(prompt, 1)
    steps = -(-prompt // chunk)
    reads_s = steps * _weights_read(count, kind, min(chunk, prompt), searched=False) / device.read_bytes_per_s
    linear = 2.0 * (prompt * (count.active - count.head) + count.head) / device.rate(kind)
    attention = attention_prompt_flop(shapes, prompt) / device.rate("bfloat16")
    if habits is None:
        return _bound(reads_s, linear + attention)
    # With many rows the next weights are fetched while these are multiplied, and of the top layer one row goes on.
    lower = 1 - 1 / shapes.num_layers
    products = lower * (linear / habits.linear + attention / habits.attention)
    other = steps * shapes.num_layers * habits.layer_s
    return Times(products + other, 0.0, products, other)


def _count(layout: Layout) -> WeightCount:
    if layout.shapes.weights is None:
        raise ConfigError(f"the weights of {layout.shapes.name} are not known: give --params, such as 7B")
    return layout.shapes.weights


def _weights_read(count: WeightCount, kind: str, rows: int, *, searched: bool) -> float:
    each = WEIGHT_BYTES[kind]
    head = WEIGHT_BYTES["int8" if kind == "int4" else kind]
    if searched and kind in ("int8", "int4") and rows <= _SEARCHED_ROWS:
        head *= _SEARCHED_SHARE
    return each * (count.touched(rows) - count.head) + head * count.head


def _bound(reads_s: float, products_s: float) -> Times:
    return Times(max(reads_s, products_s), reads_s, products_s, 0.0)


@cache
def devices() -> dict[str, Device]:
    """Devices by name; rates of products are dense and, where it differs, with float32 sums."""
    text = Path(__file__).with_name("devices.json").read_text(encoding="utf-8")
    return {
        entry["name"]: Device(
            entry["name"],
            entry["read_gb_per_s"] * 1e9,
            {kind: rate * 1e12 for kind, rate in entry["top_per_s"].items()},
            int(entry["memory_gb"] * 1e9),
        )
        for entry in json.loads(text)
    }


def find_device(name: str) -> Device:
    """A device by name.

    Raises:
        ConfigError: it is unknown.
    """
    import difflib

    known = devices()
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key in known:
        return known[key]
    near = [known_name for known_name in known if known_name.startswith(key)] or difflib.get_close_matches(
        key, known, n=2, cutoff=0.5
    )
    hint = f"did you mean {' or '.join(near)}? Known" if near else "known"
    raise ConfigError(f"--device {name!r} is unknown; {hint}: {', '.join(known)}; --measure takes this machine")
