"""Shapes of known models, from the package's file of presets: ``sash plan gemma-3-27b`` needs no download.

Attention shapes are those of the published configurations; weights follow from the sizes of the linear layers, or,
where only the published totals are certain, from those (rounded). What isn't certain isn't in the file.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from sash.planner.shapes import LayerKind, Shapes, WeightCount, parse_span


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Every entry by the plain form of its name (see ``plain``)."""
    text = Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
    return {plain(entry["name"]): entry for entry in json.loads(text)}


def preset_names() -> list[str]:
    """Names as they are written."""
    return [entry["name"] for entry in presets().values()]


def plain(name: str) -> str:
    """A name without case and punctuation: Gemma3-270M and gemma-3-270m are the same model."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_preset(name: str) -> Shapes | None:
    """The model of this name, or None."""
    entry = presets().get(plain(name))
    return None if entry is None else _shapes(entry)


def similar(name: str, limit: int = 3) -> list[str]:
    """Presets whose names come close; an owner's name before a slash is not looked at."""
    import difflib

    known = presets()
    text = plain(name.rpartition("/")[2])
    near = difflib.get_close_matches(text, known, n=limit, cutoff=0.6)
    near += [key for key in known if len(key) > 5 and text.startswith(key) and key not in near]
    return [known[key]["name"] for key in sorted(near, key=lambda key: not text.startswith(key))[:limit]]


def _shapes(entry: dict[str, Any]) -> Shapes:
    kinds = tuple(_kind(entry, layer) for layer in entry["layers"])
    return Shapes(
        name=entry["name"],
        kinds=kinds,
        weights=_weights(entry, kinds),
        max_position=entry.get("context", 0),
        hidden=entry.get("hidden", 0),
        vocab=entry.get("vocab", 0),
        architecture=entry["architecture"],
    )


def _kind(entry: dict[str, Any], layer: dict[str, Any]) -> LayerKind:
    own = entry | layer
    head_dim = own["head_dim"]
    return LayerKind(
        count=layer["count"],
        span=parse_span(layer["span"]),
        num_heads=own["heads"],
        num_kv_heads=own["kv_heads"],
        head_dim=head_dim,
        v_head_dim=own.get("v_head_dim", head_dim),
        shared=own.get("shared", False),
        multiplied=tuple(own["multiplied"]) if "multiplied" in own else None,
    )


def _weights(entry: dict[str, Any], kinds: tuple[LayerKind, ...]) -> WeightCount | None:
    """Linear layers only: norms and biases are below a thousandth."""
    if "parameters" in entry:
        return published(*entry["parameters"])
    if "vocab" not in entry:
        return None
    hidden, moe = entry["hidden"], entry.get("moe")
    layers = sum(kind.count for kind in kinds)
    dense = sum(k.count * hidden * _attention_width(k) for k in kinds)
    dense += 3 * hidden * entry.get("mlp", 0) * (layers - (moe["layers"] if moe else 0))
    table = entry["vocab"] * hidden
    embed = 0 if entry["tied"] else table
    if moe is None:
        return WeightCount(dense, table, embed)
    dense += moe["layers"] * hidden * (moe["experts"] + 3 * moe.get("shared", 0))
    experts = moe["layers"] * moe["experts"] * 3 * hidden * moe["size"]
    return WeightCount(dense, table, embed, experts, moe["experts"], moe["used"])


def _attention_width(kind: LayerKind) -> int:
    """Columns of q, k, v and o together."""
    return kind.num_heads * (kind.head_dim + kind.v_head_dim) + kind.num_kv_heads * (kind.head_dim + kind.v_head_dim)


def published(total: int, active: int) -> WeightCount:
    """Weights of which only the published totals are known. Where not all are used by a token, a sixteenth of the
    experts is taken to be."""
    if active >= total:
        return WeightCount(dense=total, rounded=True)
    experts = (total - active) * 16 // 15
    return WeightCount(total - experts, experts=experts, num_experts=16, used=1, rounded=True)
