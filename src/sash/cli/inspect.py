"""``sash inspect``: what sash makes of a model's description. Loads no torch and no weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from sash.cli.report import plain
from sash.cli.streams import print_json
from sash.spec.footprint import row_bytes
from sash.spec.groups import group_layers
from sash.spec.load import load_spec
from sash.spec.locate import ModelSource, locate
from sash.spec.model import LayerSpec, ModelSpec, RopeKind


def inspect(
    model: Annotated[
        str, typer.Argument(help="A model as for generate, or a bare config.json, which needs no weights.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every layer's span and the field it came from, heads, rope, and the KV groups."""
    source = locate(model, allow_config=True)
    spec = load_spec(source)
    if as_json:
        print_json(_document(source, spec))
    else:
        _print(source, spec)


def _document(source: ModelSource, spec: ModelSpec) -> dict[str, object]:
    document = plain(spec)
    assert isinstance(document, dict)
    head: dict[str, object] = {"name": source.name, "kind": source.kind, "path": str(source.path)}
    return head | document | {"groups": plain(list(group_layers(spec)))}


def _print(source: ModelSource, spec: ModelSpec) -> None:
    from rich.console import Console
    from rich.table import Table

    # A terminal folds what is too wide; a pipe or a file gets whole lines, so that they can be searched.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 240)
    console.print(f"{source.name}: {spec.architecture} ({source.kind} {source.path})", markup=False)
    console.print(
        f"{len(spec.layers)} layers, width {spec.hidden_size}, vocabulary {spec.vocab_size}, "
        f"context {spec.max_position}, block {spec.block}, norm {spec.norm}, "
        f"{'tied' if spec.tied_embeddings else 'own'} head, stop tokens {list(spec.stop_token_ids)}",
        markup=False,
    )
    layers = Table(title="Layers")
    for heading in ("layer", "span", "from", "heads", "KV heads", "head", "rope", "also"):
        layers.add_column(heading, overflow="fold")
    for number, layer in enumerate(spec.layers):
        layers.add_row(
            str(number),
            layer.span.describe(),
            layer.span_source,
            str(layer.num_heads),
            str(layer.num_kv_heads),
            _head(layer.head_dim, layer.v_head_dim),
            _rope(layer),
            _also(layer),
        )
    console.print(layers)
    groups = Table("group", "span", "layers", "KV heads", "head", "elements per token", title="KV groups")
    for group in group_layers(spec):
        groups.add_row(
            str(group.name),
            group.span.describe(),
            ranges(group.layers),
            str(group.num_kv_heads),
            _head(group.head_dim, group.v_head_dim),
            str(row_bytes(group, itemsize=1)),
        )
    console.print(groups)
    for note in spec.notes:
        console.print(f"note: {note}", markup=False)


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
    """``0-4, 6-10, 12`` for 0 1 2 3 4 6 7 8 9 10 12."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
