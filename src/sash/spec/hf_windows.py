"""Which layers of a config.json have a window, how wide, and which field said so.

A window comes from two answers: how wide (``sliding_window`` and its relatives) and which layers
(``layer_types``, id lists, patterns). Both are looked for in every field that is known to carry
them, whatever the architecture, so that no window is dropped in silence. Where several fields
select layers, the first of SELECTORS that is present decides; id lists must not contradict it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sash.spec.errors import ModelError
from sash.spec.hf_fields import Fields
from sash.spec.span import Span

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
WIDTH_FIELDS = ("sliding_window", "sliding_window_size", "window_size", "attention_window")
REFUSED_FIELDS = ("reference_window", "rswa_window", "use_reference_attention")
WINDOW_FIELDS = (
    *WIDTH_FIELDS,
    "swa_layers",
    "swa_attention_layer_ids",
    "full_attention_layer_ids",
    "sliding_window_pattern",
    "use_sliding_window",
    "swa_rotary_base",
    "attention_chunk_size",
    *REFUSED_FIELDS,
)


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """Span of one layer, its name among Hugging Face's layer types, and the field that decided."""

    span: Span
    layer_type: str
    source: str


def layer_windows(fields: Fields, num_layers: int, full_every: int) -> tuple[LayerWindow, ...]:
    """Spans of all layers.

    Args:
        fields: the config with its architecture's defaults.
        num_layers: number of layers.
        full_every: the architecture's own rule when nothing selects layers: every n-th layer is
            full and the others slide; 0: all slide if there is a window.

    Raises:
        ModelError: fields contradict each other, have the wrong length or type, or ask for a kind
            of window that this version doesn't have; the message names the field.
    """
    for name in REFUSED_FIELDS:
        if fields.get(name):
            raise ModelError(
                f"{name}={fields.get(name)!r} asks for a reference window, which this version doesn't have. "
                f"Remove {name} only if the model was trained without it."
            )
    width, width_source = _width(fields)
    types, source = _layer_types(fields, num_layers, full_every, width, width_source)
    _check_id_lists(fields, types, source)
    return tuple(_layer_window(fields, i, kind, source, width) for i, kind in enumerate(types))


def window_fields_of(config: Mapping[str, Any]) -> list[str]:
    """``name=value`` of every field of a foreign config that speaks of a window."""
    found = [f"{name}={config[name]!r}" for name in WINDOW_FIELDS if config.get(name) not in (None, False, [])]
    kinds = {t for t in config.get("layer_types") or () if t != FULL}
    return found + [f"layer_types={sorted(map(str, kinds))!r}"] * bool(kinds)


def _width(fields: Fields) -> tuple[int | None, str | None]:
    """The one window of all sliding layers (None: no window) and the field that decided, if any.

    What the config itself says goes before the architecture's default, null included.
    """
    if fields.get("use_sliding_window") is False:
        return None, fields.source("use_sliding_window")
    mentioned = [name for name in WIDTH_FIELDS if fields.mentioned(name)]
    values = {name: fields.get(name) for name in mentioned or WIDTH_FIELDS}
    found = {
        name: _window(fields, name, value)
        for name, value in values.items()
        if value is not None and not (name == "attention_window" and isinstance(value, list))
    }
    if len(set(found.values())) > 1:
        both = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ModelError(
            f"windows contradict each other in config.json: {both}; keep the one that the model was made with"
        )
    if found:
        name, width = next(iter(found.items()))
        return width, fields.source(name)
    if mentioned and fields.given("use_sliding_window"):
        raise ModelError(
            f"use_sliding_window is true but {mentioned[0]} is null: set sliding_window to the window in tokens"
        )
    return None, mentioned[0] if mentioned else None


def _window(fields: Fields, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise fields.error(name, value, "a window of 1 or more tokens (it counts the query itself), or null for none")
    return value


Kinds = list[tuple[str, int | None]]
Selector = Callable[[Fields, int, int | None], Kinds | None]


def _layer_types(
    fields: Fields, num_layers: int, full_every: int, width: int | None, width_source: str | None
) -> tuple[Kinds, str]:
    """Each layer's type with a window of its own if a list gave one, and the deciding field."""
    for name, select in SELECTORS.items():
        kinds = select(fields, num_layers, width)
        if kinds is not None:
            if fields.get("use_sliding_window") is False and any(kind == SLIDING for kind, _ in kinds):
                raise ModelError(
                    f"{name} names window layers but use_sliding_window is false: "
                    f"remove {name} or set use_sliding_window to true"
                )
            return kinds, name
    if fields.get("attention_chunk_size") is not None:
        raise ModelError(
            "attention_chunk_size needs layer_types that name the chunked_attention layers; add layer_types "
            "or set attention_chunk_size to null"
        )
    if width is None:
        if full_every and fields.get("use_sliding_window") is None:
            raise ModelError(
                f"{fields.architecture} has window layers, but sliding_window is null: set sliding_window to the "
                "window in tokens, or layer_types to full_attention for every layer"
            )
        return [(FULL, None)] * num_layers, width_source or "no window field"
    if full_every:
        return _every(full_every, num_layers), f"{width_source}, every {full_every}. layer full (default)"
    return [(SLIDING, None)] * num_layers, width_source or "sliding_window"


def _every(n: int, num_layers: int) -> Kinds:
    return [(FULL if (i + 1) % n == 0 else SLIDING, None) for i in range(num_layers)]


def _by_layer_types(fields: Fields, num_layers: int, width: int | None) -> Kinds | None:
    value = _per_layer(fields, "layer_types", num_layers)
    if value is None:
        return None
    for i, kind in enumerate(value):
        if kind not in (FULL, SLIDING, CHUNKED):
            raise fields.error(f"layer_types[{i}]", kind, f"{FULL}, {SLIDING} or {CHUNKED}")
    if CHUNKED in value and fields.get("attention_chunk_size") is None:
        raise ModelError("layer_types names chunked_attention layers: set attention_chunk_size to the chunk in tokens")
    if SLIDING in value and width is None and fields.get("use_sliding_window") is not False:
        raise ModelError(
            "layer_types names sliding_attention layers but there is no window: set sliding_window to it, in tokens, "
            "or layer_types to full_attention"
        )
    return [(kind, None) for kind in value]


def _by_attention_window(fields: Fields, num_layers: int, width: int | None) -> Kinds | None:
    if not isinstance(fields.get("attention_window"), list):
        return None
    value = _per_layer(fields, "attention_window", num_layers) or []
    return [
        (FULL, None) if w is None else (SLIDING, _window(fields, f"attention_window[{i}]", w))
        for i, w in enumerate(value)
    ]


def _by_swa_layers(fields: Fields, num_layers: int, width: int | None) -> Kinds | None:
    """One entry per layer: true or false, or the layer's window in tokens with 0 for a full layer."""
    value = _per_layer(fields, "swa_layers", num_layers)
    if value is None:
        return None
    kinds: Kinds = []
    for i, entry in enumerate(value):
        if entry is None or entry is False or entry == 0:
            kinds.append((FULL, None))
        elif entry is True or (entry == 1 and width is not None):
            if width is None:
                raise ModelError(f"swa_layers[{i}] is true but there is no window: set sliding_window to it, in tokens")
            kinds.append((SLIDING, None))
        else:
            kinds.append((SLIDING, _window(fields, f"swa_layers[{i}]", entry)))
    return kinds


def _by_ids(name: str, inside: str, outside: str) -> Selector:
    def select(fields: Fields, num_layers: int, width: int | None) -> Kinds | None:
        ids = _ids(fields, name, num_layers)
        if ids is None:
            return None
        kinds: Kinds = [(inside if i in ids else outside, None) for i in range(num_layers)]
        if width is None and (SLIDING, None) in kinds:
            raise ModelError(
                f"{name} asks for window layers but there is no window: set sliding_window to it, in tokens"
            )
        return kinds

    return select


def _by_pattern(fields: Fields, num_layers: int, width: int | None) -> Kinds | None:
    value = fields.get("sliding_window_pattern")
    if value is None or width is None:
        return None
    if isinstance(value, str) and value and set(value) <= {"L", "G"}:
        kinds: Kinds = [(SLIDING if value[i % len(value)] == "L" else FULL, None) for i in range(num_layers)]
        return [*kinds[:-1], (FULL, None)]  # EXAONE: the last layer is global whatever the pattern says
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise fields.error(
            "sliding_window_pattern", value, "a number n (every n-th layer is full) or letters such as LLLG"
        )
    return _every(value, num_layers)


def _by_max_window_layers(fields: Fields, num_layers: int, width: int | None) -> Kinds | None:
    if width is None or fields.get("max_window_layers") is None:
        return None
    first = fields.integer("max_window_layers", least=0)
    return [(SLIDING if i >= first else FULL, None) for i in range(num_layers)]


SELECTORS: dict[str, Selector] = {
    "layer_types": _by_layer_types,
    "attention_window": _by_attention_window,
    "swa_layers": _by_swa_layers,
    "swa_attention_layer_ids": _by_ids("swa_attention_layer_ids", SLIDING, FULL),
    "full_attention_layer_ids": _by_ids("full_attention_layer_ids", FULL, SLIDING),
    "sliding_window_pattern": _by_pattern,
    "max_window_layers": _by_max_window_layers,
}


def _per_layer(fields: Fields, name: str, num_layers: int) -> list[Any] | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != num_layers:
        got = f"{len(value)} entries" if isinstance(value, list) else repr(value)
        raise ModelError(
            f"{name} in config.json must be a list with one entry for each of {num_layers} layers, got {got}"
        )
    return value


def _ids(fields: Fields, name: str, num_layers: int) -> set[int] | None:
    value = fields.get(name)
    if value is None:
        return None
    good = isinstance(value, list) and all(type(i) is int and 0 <= i < num_layers for i in value)
    if not good:
        raise fields.error(name, value, f"a list of layer numbers from 0 to {num_layers - 1}")
    return set(value)


def _check_id_lists(fields: Fields, kinds: Kinds, source: str) -> None:
    for name, inside in (("swa_attention_layer_ids", SLIDING), ("full_attention_layer_ids", FULL)):
        ids = _ids(fields, name, len(kinds))
        if ids is not None and ids != {i for i, (kind, _) in enumerate(kinds) if kind == inside}:
            raise ModelError(f"{name}={sorted(ids)} contradicts {source}: keep the one that the model was made with")


def _layer_window(
    fields: Fields, index: int, kind: tuple[str, int | None], source: str, width: int | None
) -> LayerWindow:
    layer_type, own = kind
    if layer_type == SLIDING:
        window = own or width
        assert window is not None
        return LayerWindow(Span.sliding(window), layer_type, source if own is None else f"{source}[{index}]")
    if layer_type == CHUNKED:
        return LayerWindow(Span.chunked(fields.integer("attention_chunk_size")), layer_type, source)
    return LayerWindow(Span.full(), layer_type, source)
