"""``sash plan``: what a model takes, what fits, and what to do. Loads no torch unless ``--measure`` asks for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sash.cli.options import option_panel, with_options
from sash.cli.streams import print_json
from sash.spec.errors import ConfigError
from sash.spec.footprint import KV_BYTES
from sash.spec.locate import SHOWN

# The planner loads inside the command: no other command needs it.
if TYPE_CHECKING:
    from sash.planner.plan import Plan, Tier
    from sash.planner.solve import Question
    from sash.planner.sources import TypedShapes
    from sash.planner.speed import Device

_BYTES = {"": 1} | {unit: 1000**n for n, unit in enumerate("kmgtp", 1)}
_BYTES |= {f"{unit}i": 1024**n for n, unit in enumerate("kmgtp", 1)}
_MOST = 10**24
_TOKENS = {"": 1, "k": 2**10, "m": 2**20}
_WEIGHTS = {"": 1, "m": 10**6, "b": 10**9, "t": 10**12}
_DTYPES = {
    **dict.fromkeys(("fp32", "f32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "float16", "half"), "float16"),
    "int8": "int8",
    "int4": "int4",
}

_known, _sizes, _extras = option_panel("Known"), option_panel("Sizes"), option_panel("More")


@dataclass
class Known:
    """What is known of memory, precision, context and requests; what is left out is found."""

    memory: Annotated[str | None, _known("Of the device, such as 24GiB: weights, pools and reserve.")] = None
    kv_memory: Annotated[
        str | None, _known("Of the pools alone, such as 2GiB.", "--kv-memory", "--kv-cache-memory-bytes")
    ] = None
    reserve: Annotated[str, _known("Of the memory for activations and all else: 10% or 2GiB.")] = "10%"
    stored: Annotated[
        str | None, _known("Weights, K and V: fp32, bf16, fp16, int8, int4 (weights alone).", "--dtype")
    ] = None
    weights: Annotated[str | None, _known("Weights alone: int8, int4 or a dtype.", "--quantization")] = None
    rows: Annotated[str | None, _known("K and V alone: fp32, bf16, fp16, int8.", "--kv-cache-dtype")] = None
    window_rows: Annotated[str | None, _known("K and V of window layers.", "--swa-kv-cache-dtype")] = None
    context: Annotated[str | None, _known("Tokens of a request, such as 32k.", "--context", "--max-model-len")] = None
    concurrency: Annotated[int | None, _known("Requests that run at once.", "--concurrency", "--max-num-seqs")] = None
    answer: Annotated[str, _known("Tokens of the context that are generated; half of it at most.")] = "512"
    tokens_per_page: Annotated[int, _known("Tokens in a page.", "--page-size")] = 16

    def question(self) -> Question:
        """What to solve.

        Raises:
            ConfigError: a value of the wrong form; the option is named.
        """
        from sash.planner.solve import Question

        rows, weights = self._dtypes()
        return Question(
            memory_bytes=_size("--memory", self.memory),
            kv_bytes=_size("--kv-memory", self.kv_memory),
            reserve=self._reserve(),
            weights=weights,
            kv=rows,
            window_kv=_dtype("--swa-kv-cache-dtype", self.window_rows, KV_BYTES),
            context=_number("--context", self.context, _TOKENS, "32768 or 32k"),
            requests=self.concurrency,
            answer=_number("--answer", self.answer, _TOKENS, "512 or 4k") or 0,
            page_size=self.tokens_per_page,
        )

    def _dtypes(self) -> tuple[str | None, str | None]:
        """Of rows, and of weights."""
        both = _dtype("--dtype", self.stored, _DTYPES.values())
        weights = _dtype("--quantization", self.weights, _DTYPES.values()) or both
        rows = _dtype("--kv-cache-dtype", self.rows, KV_BYTES)
        return rows or (both if both in KV_BYTES else None), weights

    def _reserve(self) -> float:
        text = self.reserve.strip()
        if not text.endswith("%"):
            return float(_size("--reserve", text) or 0)
        try:
            percent = float(text.removesuffix("%"))
        except ValueError:
            percent = -1.0
        if not 0 <= percent < 100:
            raise ConfigError(f"--reserve must be a share from 0% to 99% or a size such as 2GiB, got {self.reserve!r}")
        return percent / 100


@dataclass
class Sizes:
    """A model by its sizes, or other spans for the named one."""

    layers: Annotated[int | None, _sizes("Instead of a model: its layers …")] = None
    heads: Annotated[int | None, _sizes("… query heads (default: as KV heads) …")] = None
    kv_heads: Annotated[int | None, _sizes("… KV heads …")] = None
    head_dim: Annotated[int | None, _sizes("… and head size.")] = None
    v_head_dim: Annotated[int | None, _sizes("Size of a value, where it differs from a key's.")] = None
    params: Annotated[str | None, _sizes("Weights in all, such as 7B.")] = None
    window: Annotated[str | None, _sizes("What if: windows of so many tokens in every layer …")] = None
    full_layers: Annotated[int | None, _sizes("… but for so many full ones.")] = None
    sinks: Annotated[int | None, _sizes("First tokens that such windows keep.")] = None
    chunk: Annotated[str | None, _sizes("What if: chunked local attention.")] = None
    reference_window: Annotated[str | None, _sizes("What if: the prompt stays, answers slide.")] = None

    def typed(self) -> TypedShapes:
        """Checked numbers."""
        from sash.planner.sources import TypedShapes

        return TypedShapes(
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.v_head_dim,
            _number("--window", self.window, _TOKENS, "4096 or 4k"),
            _number("--chunk", self.chunk, _TOKENS, "8192 or 8k"),
            _number("--reference-window", self.reference_window, _TOKENS, "128"),
            self.sinks,
            self.full_layers,
            _number("--params", self.params, _WEIGHTS, "7B or 270M"),
        )


@dataclass
class Extras:
    """What else to show."""

    on_device: Annotated[
        str | None,
        _extras("Bounds of times on it, such as h100-sxm; its memory counts as given.", "--device"),
    ] = None
    measure: Annotated[bool, _extras("Predict times on this machine (takes some seconds).", "--measure")] = False
    needs: Annotated[str, _extras("What answers draw on: distant facts, recent text, the prompt.")] = "distant"
    ratio: Annotated[list[float] | None, _extras("A swa_full_tokens_ratio to compare; repeatable.")] = None
    tier: Annotated[list[str] | None, _extras("Where prefixes are kept, NAME=SIZE@RATE: disk=1TB@2GB; repeatable.")] = (
        None
    )
    everything: Annotated[bool, _extras("All tables.", "--all")] = False
    as_json: Annotated[bool, _extras("Print one JSON object.", "--json")] = False
    plot: Annotated[Path | None, _extras("Draw memory and operations by context into this file.")] = None


@with_options
def plan(
    known: Known,
    sizes: Sizes,
    extras: Extras,
    model: Annotated[
        str | None, typer.Argument(help="A preset (gemma-3-27b), config.json, folder, .gguf file or hub id.")
    ] = None,
) -> None:
    """What a model takes and what fits: give any three of memory, dtype, context and concurrency, get the fourth.

    Exit code 1 says that it doesn't fit.
    """
    from sash.planner.advice import NEEDS
    from sash.planner.plan import RATIOS, make_plan
    from sash.planner.sources import find_shapes

    needs = next((name for name in NEEDS if name == extras.needs), None)
    if needs is None:
        raise ConfigError(f"--needs {extras.needs!r} is unknown; use {', '.join(NEEDS)}")
    question, shapes = known.question(), find_shapes(model, sizes.typed())
    note = ""
    if extras.measure and question.weights is None:
        question = _as_here(question)
        note = (
            f"{question.weights} weights are what sash takes on this machine by itself (--quantization asks for others)"
        )
    result = make_plan(
        shapes,
        question,
        needs=needs,
        ratios=extras.ratio or RATIOS,
        device=_device(extras),
        tiers=[_tier(text) for text in extras.tier or ()],
    )
    show(result, extras, note)
    if not result.answer.fits:
        raise typer.Exit(1)


def _as_here(question: Question) -> Question:
    """With the precision that the engine takes on this machine by itself, where none was asked for."""
    from sash.ops.registry import resolve_ops
    from sash.spec.machine import probe_cpu

    quantization, wide = resolve_ops(quantization="auto").quantization, not probe_cpu().has_bf16
    dtype = "float32" if wide else "bfloat16"
    weights = dtype if quantization == "none" else quantization
    return replace(question, weights=weights, kv=question.kv or (dtype if wide else None))


def show(result: Plan, extras: Extras, note: str = "") -> None:
    """Print it with a line about its precision, and draw it where that was asked for."""
    if extras.plot is not None:
        from sash.planner.plot import draw

        draw(result, extras.plot)
    if extras.as_json:
        from sash.planner.plan import document

        print_json(document(result))
        return
    from sash.cli.plan_tables import print_plan

    print_plan(result, everything=extras.everything, note=note)
    if extras.plot is not None:
        print(f"drawn: {extras.plot}")


def _device(extras: Extras) -> Device | None:
    from sash.planner.speed import Device, Habits, find_device

    if extras.measure and extras.on_device is not None:
        raise ConfigError("--device names a device and --measure takes this machine: give one of them")
    if extras.on_device is not None:
        return find_device(extras.on_device)
    if not extras.measure:
        return None
    import os

    from sash.bench.ceiling import measure_apart

    top = measure_apart(int(os.environ.get("OMP_NUM_THREADS") or min(2, os.cpu_count() or 1)))
    return Device("this machine", top.read_bytes_per_s, top.gemm_op_per_s, habits=Habits())


def _tier(text: str) -> Tier:
    from sash.planner.plan import Tier

    match = re.fullmatch(r"([\w-]+)=([^@]+)(?:@(.+?)(?:/s)?)?", text)
    if not match:
        raise ConfigError(f"--tier must be NAME=SIZE@RATE, such as disk=1TB@2GB, got {text!r}")
    rate = _size("--tier", match[3]) if match[3] else 0
    return Tier(match[1], _size("--tier", match[2]) or 0, float(rate or 0))


def _size(option: str, text: str | None) -> int | None:
    return _number(option, text, _BYTES, "512MiB, 24GiB or 80GB", suffix="b?")


def _number(option: str, text: str | None, units: dict[str, int], example: str, suffix: str = "") -> int | None:
    """``32k`` and the like, in the option's units.

    Raises:
        ConfigError: another form.
    """
    if text is None:
        return None
    names = "|".join(sorted(filter(None, units), key=len, reverse=True))
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({names})?{suffix}", text.strip().lower())
    if not match:
        raise ConfigError(f"{option} must be a number such as {example}, got {text!r}")
    value = Decimal(match[1]) * units[match[2] or ""]
    if value > _MOST:
        raise ConfigError(f"{option} must be below 10^24, such as {example}, got {text[:SHOWN]!r}")
    return int(value)


def _dtype(option: str, text: str | None, allowed: object) -> str | None:
    if text is None:
        return None
    name, known = _DTYPES.get(text.strip().lower()), list(dict.fromkeys(allowed))  # type: ignore[call-overload]
    if name not in known:
        raise ConfigError(f"{option} {text!r} is unknown; use {', '.join(known)}")
    return name
