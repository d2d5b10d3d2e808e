"""What the planner knows of a model: kinds of layers, and how many weights there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from sash.spec.groups import GroupSpec, group_rows
from sash.spec.model import LayerSpec, ModelSpec, expected_weights
from sash.spec.span import Span, SpanKind


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Equal layers.

    Args:
        count: how many there are.
        span: what they see.
        num_heads: query heads.
        num_kv_heads: heads of K and V that a row stores.
        head_dim, v_head_dim: elements of a stored key and of a stored value, per KV head.
        shared: they read the K and V of an earlier layer and store none.
        multiplied: dimensions of key and value that each query head multiplies, where these aren't the stored
            ones: latent attention (MLA) stores one narrow row and makes keys and values of it.
    """

    count: int
    span: Span
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    shared: bool = False
    multiplied: tuple[int, int] | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Dimensions of the key and of the value that a query head multiplies."""
        return self.multiplied or (self.head_dim, self.v_head_dim)

    @property
    def pair_flop(self) -> int:
        """Operations of one layer for one query and one key that it sees."""
        return 2 * self.num_heads * sum(self.head_dims)


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Weights by what a step does with them, in elements.

    Args:
        dense: of linear layers that every token goes through, the head apart.
        experts: of all experts together; ``used`` of ``num_experts`` multiply a token.
        head: of the output layer.
        embed: of an embedding that the head doesn't share.
        rounded: only the published totals are known; the head is among ``dense``.
    """

    dense: int
    head: int = 0
    embed: int = 0
    experts: int = 0
    num_experts: int = 0
    used: int = 0
    rounded: bool = False

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.head + self.embed

    @property
    def active(self) -> int:
        """Those that one token needs; an embedding's row is not counted, the table that the head shares is."""
        used = self.experts * self.used // self.num_experts if self.num_experts else 0
        return self.dense + used + self.head

    def touched(self, rows: int) -> float:
        """Elements that a step of ``rows`` tokens reads: of the experts those that at least one token chooses, where
        choices are spread evenly."""
        if not self.num_experts:
            return float(self.dense + self.head)
        missed = (1 - self.used / self.num_experts) ** rows
        return self.dense + self.head + self.experts * (1 - missed)


@dataclass(frozen=True)
class Shapes:
    """A model to plan for.

    Args:
        name: for people.
        kinds: its layers; the order within the stack doesn't matter here.
        weights: how many there are; None: unknown.
        max_position: longest context that the model was made for, in tokens; 0: unknown.
        hidden: width; 0: unknown.
        vocab: tokens of the vocabulary; 0: unknown.
        architecture: as config.json names it; empty where shapes were typed in.
    """

    name: str
    kinds: tuple[LayerKind, ...]
    weights: WeightCount | None = None
    max_position: int = 0
    hidden: int = 0
    vocab: int = 0
    architecture: str = ""

    @cached_property
    def groups(self) -> tuple[GroupSpec, ...]:
        """KV groups, as the engine makes them; layers that share another's rows have none."""
        return group_rows(
            (k.span, k.num_kv_heads, k.head_dim, k.v_head_dim)
            for k in self.kinds
            if not k.shared
            for _ in range(k.count)
        )

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return sum(kind.count for kind in self.kinds)

    @property
    def windows(self) -> tuple[int, ...]:
        """Widths of bounded spans, narrowest first."""
        return tuple(sorted({kind.span.window for kind in self.kinds if kind.span.bounded}))

    @property
    def hybrid(self) -> bool:
        """Whether some layers are bounded and some are not."""
        return len({kind.span.bounded for kind in self.kinds}) == 2

    def count(self, bounded: bool) -> int:
        """Layers whose span is bounded, or isn't."""
        return sum(kind.count for kind in self.kinds if kind.span.bounded is bounded)

    def respanned(self, span: Span, full_layers: int = 0) -> Shapes:
        """The same layers with other spans: ``full_layers`` of them, a share of every kind, full, and ``span`` else."""
        kinds: list[LayerKind] = []
        left, layers = full_layers, self.num_layers
        for kind in self.kinds:
            full = min(left, round(left * kind.count / layers)) if layers else 0
            left, layers = left - full, layers - kind.count
            kinds += [replace(kind, span=s, count=n) for s, n in ((span, kind.count - full), (Span.full(), full)) if n]
        return replace(self, kinds=tuple(kinds))

    def bounded(self, span: Span) -> Shapes:
        """The same model with ``span`` in place of its full layers'; windows stay as they are."""
        return replace(self, kinds=tuple(k if k.span.bounded else replace(k, span=span) for k in self.kinds))


def shapes_of(spec: ModelSpec, name: str) -> Shapes:
    """The shapes of a described model."""
    counts = Counter(_kind(layer) for layer in spec.layers)
    return Shapes(
        name=name,
        kinds=tuple(replace(kind, count=n) for kind, n in counts.items()),
        weights=_count(spec),
        max_position=spec.max_position,
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        architecture=spec.architecture,
    )


def _kind(layer: LayerSpec) -> LayerKind:
    return LayerKind(1, layer.span, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)


def _count(spec: ModelSpec) -> WeightCount:
    """Elements of everything that ``expected_weights`` names; norms and biases count as dense."""
    sizes = {name: prod(shape) for name, shape in expected_weights(spec).items()}
    experts = sum(n for name, n in sizes.items() if name.rpartition(".")[2] in _EXPERTS and _has_experts(spec, name))
    table = spec.vocab_size * spec.hidden_size
    mlp = next((layer.mlp for layer in spec.layers if layer.mlp.num_experts), None)
    embed = 0 if spec.tied_embeddings else table
    return WeightCount(
        dense=sum(sizes.values()) - experts - table - embed,
        head=table,
        embed=embed,
        experts=experts,
        num_experts=mlp.num_experts if mlp else 0,
        used=mlp.experts_per_token if mlp else 0,
    )


_EXPERTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def _has_experts(spec: ModelSpec, name: str) -> bool:
    return name.startswith("layers.") and spec.layers[int(name.split(".")[1])].mlp.num_experts > 0


def parse_span(text: str) -> Span:
    """``full``, ``window 512``, ``chunk 8192`` or ``reference 128``, as the file of presets has them."""
    kind, _, width = text.partition(" ")
    kinds = {"window": SpanKind.SLIDING, "chunk": SpanKind.CHUNKED, "reference": SpanKind.REFERENCE}
    return Span.full() if kind == "full" else Span(kinds[kind], int(width))
