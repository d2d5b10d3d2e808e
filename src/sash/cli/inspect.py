"""``sash inspect``: what sash makes of a model's description. Loads no torch and no weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from sash.cli.report import plain
from sash.cli.streams import print_json
from sash.spec.footprint import row_bytes
from sash.spec.groups import group_layers
from sash.spec.load import load_spec
from sash.spec.locate import ModelSource, locate
from sash.spec.model import BlockKind, LayerSpec, ModelSpec, NormKind, RopeKind

if TYPE_CHECKING:
    from rich.console import Console

NORMS = {NormKind.RMS: "RMS norm", NormKind.RMS_PLUS_ONE: "RMS norm (times 1 + weight)", NormKind.LAYER: "layer norm"}
BLOCKS = {
    BlockKind.PRE: "before attention and MLP",
    BlockKind.SANDWICH: "before and after attention and MLP",
    BlockKind.POST: "after attention and MLP",
    BlockKind.PARALLEL: "before attention and MLP, which run side by side",
}


def inspect(
    model: Annotated[
        str, typer.Argument(help="A model as for generate, or a bare config.json, which needs no weights.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show each layer's span and the field it came from, heads, rope, and the KV groups; equal layers share a row."""
    source = locate(model, allow_config=True)
    spec = load_spec(source)
    if as_json:
        print_json(_document(source, spec))
    else:
        from rich.console import Console

        # A terminal folds what is too wide; a pipe or a file gets whole lines, so that they can be searched.
        terminal = sys.stdout.isatty()
        console = Console(highlight=False, soft_wrap=not terminal, width=None if terminal else 240)
        print_spec(console, source, spec)


def _document(source: ModelSource, spec: ModelSpec) -> dict[str, object]:
    document = plain(spec)
    assert isinstance(document, dict)
    head: dict[str, object] = {"name": source.name, "kind": source.kind, "path": str(source.path)}
    return head | document | {"groups": plain(list(group_layers(spec)))}


def print_spec(console: Console, source: ModelSource, spec: ModelSpec) -> None:
    """A model for people: equal layers share a row, and what decided their spans stands below once."""
    from rich.table import Table

    console.print(f"{source.name}: {spec.architecture} ({source.kind} {source.path})", markup=False)
    console.print(
        f"{len(spec.layers)} layers, width {spec.hidden_size}, vocabulary {spec.vocab_size}, "
        f"context {spec.max_position}, {NORMS[spec.norm]} {BLOCKS[spec.block]}, "
        f"{'output weights shared with the embedding' if spec.tied_embeddings else 'output weights of its own'}, "
        f"stop tokens {list(spec.stop_token_ids)}",
        markup=False,
    )
    rows, sources = _rows(spec)
    extras = {row[-1] for row in rows}
    also = len(extras) > 1
    layers = Table(title="Layers", title_justify="left")
    for heading in ("layers", "span", "from", "Q/KV heads", "head dim", "rope", *["also"] * also):
        layers.add_column(heading, overflow="fold")
    for row, numbers in rows.items():
        layers.add_row(ranges(numbers), *(row if also else row[:-1]))
    console.print(layers)
    if not also and (shared := "".join(extras)):
        console.print(f"every layer: {shared}", markup=False)
    for number, text in enumerate(sources, 1):
        console.print(f"from {number}: {text}", markup=False)
    groups = Table(title="KV groups", title_justify="left")
    for heading in ("group", "span", "layers", "KV heads", "head dim", "bytes/token", "in int8"):
        groups.add_column(heading, overflow="fold")
    for group in group_layers(spec):
        groups.add_row(
            str(group.name),
            group.span.describe(),
            ranges(group.layers),
            str(group.num_kv_heads),
            _head(group.head_dim, group.v_head_dim),
            str(row_bytes(group, "bfloat16")),
            str(row_bytes(group, "int8")),
        )
    console.print(groups)
    for note in spec.notes:
        console.print(f"note: {note}", markup=False)


def _rows(spec: ModelSpec) -> tuple[dict[tuple[str, ...], list[int]], list[str]]:
    """The table's rows with the layers that share each, and the texts that their column "from" counts from 1."""
    rows: dict[tuple[str, ...], list[int]] = {}
    sources: list[str] = []
    for number, layer in enumerate(spec.layers):
        # A list that gives each layer its own window is one source, not one per layer.
        source = layer.span_source.removesuffix(f"[{number}]")
        if source not in sources:
            sources.append(source)
        row = (
            layer.span.describe(),
            str(sources.index(source) + 1),
            f"{layer.num_heads}/{layer.num_kv_heads}",
            _head(layer.head_dim, layer.v_head_dim),
            _rope(layer),
            _also(layer),
        )
        rows.setdefault(row, []).append(number)
    return rows, sources


def _head(k_dim: int, v_dim: int) -> str:
    return str(k_dim) if k_dim == v_dim else f"K {k_dim}, V {v_dim}"


def _rope(layer: LayerSpec) -> str:
    rope = layer.rope
    if rope is None:
        return "none"
    scaling = "" if rope.kind is RopeKind.DEFAULT else f" {rope.kind} ×{rope.factor:g}"
    part = "" if rope.rotary_dim == layer.head_dim else f" on {rope.rotary_dim} dims"
    return f"base {rope.base:g}{scaling}{part}"


def _also(layer: LayerSpec) -> str:
    extras = [
        f"soft cap {layer.softcap:g}" if layer.softcap else "",
        "learned sinks" if layer.learned_sinks else "",
        f"{layer.mlp.num_experts} experts, {layer.mlp.experts_per_token} used" if layer.mlp.num_experts else "",
    ]
    return ", ".join(extra for extra in extras if extra)


def ranges(numbers: Iterable[int]) -> str:
    """``0-4, 6-10, 12`` for 0 1 2 3 4 6 7 8 9 10 12; a long regular row becomes ``0, 2, …, 22``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(runs)}
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join([*texts[:2], "…", texts[-1]] if len(runs) > 4 and len(steps) == 1 else texts)
