"""From what a user types to shapes: a file or folder, a preset's name, a hub id, or sizes alone. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sash.planner.presets import find_preset, preset_names, published, similar
from sash.planner.shapes import LayerKind, Shapes, shapes_of
from sash.spec.errors import ConfigError, ModelError
from sash.spec.load import load_spec
from sash.spec.locate import HUB_ID, SHOWN, ModelSource, locate
from sash.spec.model import MAX_LAYERS
from sash.spec.span import Span, SpanKind

# No model is wider; more would only leave the numbers that can be counted with.
_MAX_SIZE = 1 << 20
_SIZES = ("layers", "heads", "kv_heads", "head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class TypedShapes:
    """Sizes that were typed in; None: not given. With a model only the spans and the weights may be.

    Args:
        layers, heads, kv_heads, head_dim, v_head_dim: sizes of a stack of equal layers.
        window, chunk, reference_window: what layers see; at most one.
        sinks: first positions that a window always sees.
        full_layers: layers without it.
        parameters: weights in all.
    """

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    reference_window: int | None = None
    sinks: int | None = None
    full_layers: int | None = None
    parameters: int | None = None

    def span(self) -> Span | None:
        """The span that was typed in, if one was.

        Raises:
            ConfigError: more than one, or one that means nothing.
        """
        given = {name: getattr(self, name) for name in ("window", "chunk", "reference_window")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(map(_flag, given))} contradict each other: give one of them")
        for name, value in given.items():
            if value < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1 token (it counts the query itself), got {value}")
        if self.sinks is not None and (self.sinks < 0 or "window" not in given):
            raise ConfigError(f"--sinks must be 0 or more and belongs to --window, got --sinks {self.sinks}")
        if self.full_layers is not None and not given:
            raise ConfigError("--full-layers says which layers have no window: give --window (or another span) as well")
        if "window" in given:
            return Span.sliding(given["window"], self.sinks or 0)
        if "chunk" in given:
            return Span.chunked(given["chunk"])
        return Span(SpanKind.REFERENCE, given["reference_window"]) if given else None


def find_shapes(model: str | None, typed: TypedShapes) -> Shapes:
    """The shapes to plan for.

    Raises:
        ModelError: the model isn't found, or its description isn't understood.
        ConfigError: typed sizes that are missing, out of range or at odds.
    """
    span = typed.span()
    if model is None:
        shapes = _typed(typed, span)
    else:
        sizes = [name for name in _SIZES if getattr(typed, name) is not None]
        if sizes:
            raise ConfigError(f"{', '.join(map(_flag, sizes))} describe a model, and {model!r} is one: leave one out")
        shapes = _named(model)
    if typed.parameters is not None:
        if typed.parameters < 1:
            raise ConfigError(f"--params must be a number of weights such as 7B, got {typed.parameters}")
        shapes = replace(shapes, weights=published(typed.parameters, typed.parameters))
    if span is None:
        return shapes
    full = typed.full_layers or 0
    if not 0 <= full <= shapes.num_layers:
        raise ConfigError(f"--full-layers must be between 0 and the {shapes.num_layers} layers, got {full}")
    return replace(shapes.respanned(span, full), name=f"{shapes.name}, {span.describe()}")


def _typed(typed: TypedShapes, span: Span | None) -> Shapes:
    for name in ("layers", "kv_heads", "head_dim"):
        value = getattr(typed, name)
        if value is None:
            raise ConfigError(
                "no model: name one (such as gemma-3-27b, a config.json, a .gguf file or a hub id), or give "
                f"--layers, --kv-heads and --head-dim; {_flag(name)} is missing"
            )
    for name in _SIZES:
        value = getattr(typed, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} must be at least 1, got {value}")
        most = MAX_LAYERS if name == "layers" else _MAX_SIZE
        if value is not None and value > most:
            raise ConfigError(f"{_flag(name)} must be at most {most}, got more")
    assert typed.layers and typed.kv_heads and typed.head_dim
    heads = typed.heads or typed.kv_heads
    if heads % typed.kv_heads:
        raise ConfigError(f"--kv-heads {typed.kv_heads} must divide --heads {heads}")
    kind = LayerKind(
        typed.layers, span or Span.full(), heads, typed.kv_heads, typed.head_dim, typed.v_head_dim or typed.head_dim
    )
    return Shapes("typed shapes", (kind,))


def _named(model: str) -> Shapes:
    path = Path(model)
    try:
        there = path.expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a null character, ~ of a user who has no home
        there = False
    if there:
        return _described(locate(model, allow_config=True))
    preset = find_preset(model)
    if preset is not None:
        return preset
    if HUB_ID.fullmatch(model) and path.suffix not in (".gguf", ".json"):
        return _described(_hub_config(model))
    near = similar(model)
    hint = f" Did you mean {', '.join(near)}?" if near else f" Known: {', '.join(preset_names())}."
    raise ModelError(
        f"no file, folder or preset {model[:SHOWN]!r}.{hint} A config.json, a .gguf file or a hub id do, too."
    )


def _described(source: ModelSource) -> Shapes:
    try:
        return shapes_of(load_spec(source), source.name)
    except ModelError as error:
        raise ModelError(
            f"{error} (any model can be planned by its sizes: --layers, --kv-heads, --head-dim …)"
        ) from error


def _hub_config(hub_id: str) -> ModelSource:
    """The hub's config.json alone: no weights are downloaded."""
    # Imported here: it takes longer than a plan, and only hub ids need it.
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        kept = try_to_load_from_cache(hub_id, "config.json")
        path = kept if isinstance(kept, str) else hf_hub_download(hub_id, "config.json")
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        near = similar(hub_id)
        hint = f"The preset {near[0]} needs no hub." if near else f"Presets need none: {', '.join(preset_names())}."
        raise ModelError(f"the hub has not given {hub_id}'s config.json ({lines[0]}). {hint}") from error
    return ModelSource("config", Path(path), hub_id)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
