"""The axes of the equivalence matrix, and what each value means for one case."""

from __future__ import annotations

from dataclasses import dataclass

from tests.equivalence.covering import Row
from tests.equivalence.harness import Request, random_tokens

from sash.ops import native
from sash.spec.config import EngineConfig
from sash.spec.span import Span, SpanKind

AXES: dict[str, tuple[str, ...]] = {
    "window": ("1", "P-1", "P", "P+1", "2P+3", "over prompt", "over max"),
    "page": ("1", "5", "16", "64"),
    "prompt": (
        "1", "W-2", "W-1", "W", "W+1", "W+2", "2W", "2W+1", "kP", "kP-1", "kP+1", "C-1", "C", "C+1", "2C+W",
    ),
    "chunk": ("one token", "below W", "W", "above W", "pages", "whole step"),
    "decode": ("1", "to W", "to 2W", "2W+1", "few"),
    "layers": ("window first", "full first", "all window", "all full", "odd at end", "two windows"),
    "kind": ("sliding", "sinks", "chunked", "reference", "prefill window"),
    "heads": ("grouped", "learned sinks", "softcap", "value size", "one kv head"),
    "batch": ("solo", "mixed", "joins", "shrinks", "identical", "long head"),
    "pool": ("roomy", "minimum", "window short", "full short"),
    "ratio": ("none", "0", "0.5", "1", "disabled"),
    "kernels": ("torch", "reference", "deterministic", *(["native"] if native.load()[0] else [])),
    "life": (
        "calm", "cancel queued", "cancel in prefill", "cancel in decode", "preempt", "step fails before",
        "step fails after", "request fails",
    ),
    "memory": ("nan", "ff", "large"),
    "drafts": ("none", "3", "11"),
    "stored": ("same", "int8", "int8 windows", "int8 full", "bf16"),
}  # fmt: skip
BASE: Row = {name: values[0] for name, values in AXES.items()}


def active(row: Row) -> Row:
    """The axes that matter in a row; the others are meaningless beside its values."""
    out = dict(row)
    if row["layers"] == "all full":
        drop = ["window", "kind", "ratio", *["stored"] * (row["stored"] == "int8 windows")]
        # Lengths still count in W, but nothing slides.
    elif row["layers"] == "all window":
        drop = [] if row["pool"] in ("roomy", "minimum") else ["pool"]
        drop += ["stored"] * (row["stored"] == "int8 full")
    else:
        drop = []
    if row["layers"] == "all full" and row["pool"] == "window short":
        drop.append("pool")
    for name in drop:
        out.pop(name)
    return out


@dataclass(frozen=True)
class Sizes:
    """A row in numbers. ``window`` is the model's; ``unit`` is the W that lengths are made of."""

    page: int
    window: int
    unit: int
    chunk: int
    budget: int
    prompt: int
    decode: int


def sizes(row: Row) -> Sizes:
    """Numbers of a row. Windows that no prompt fills take their lengths from a W of P + 3."""
    page = int(row["page"])
    odd = {"1": 1, "P-1": max(page - 1, 1), "P": page, "P+1": page + 1, "2P+3": 2 * page + 3}
    unit = odd.get(row["window"], page + 3)
    below = max(unit // 2, 1)
    chunk = {
        "one token": 1,
        "below W": below + (below % page == 0 and below > 1),
        "W": unit,
        "above W": 2 * unit + 1,
        "pages": 2 * page,
        "whole step": unit + page + 8,
    }[row["chunk"]]
    prompt = max(1, _prompt(row["prompt"], unit, page, chunk))
    decode = {"1": 1, "to W": unit - prompt + 1, "to 2W": 2 * unit - prompt + 1, "2W+1": 2 * unit + 1, "few": 9}
    tokens = decode[row["decode"]] if decode[row["decode"]] > 0 else page + 2
    window = unit
    if row["window"] == "over prompt":
        window = prompt + max(tokens // 2, 1)
    elif row["window"] == "over max":
        window = 16 * (3 * unit + prompt + tokens + 16)
    budget = chunk if row["chunk"] == "whole step" else chunk + 8
    return Sizes(page, window, unit, chunk, budget, prompt, tokens)


def _prompt(name: str, unit: int, page: int, chunk: int) -> int:
    pages = page * max(1, (unit + page) // page)
    return {
        "1": 1,
        "W-2": unit - 2,
        "W-1": unit - 1,
        "W": unit,
        "W+1": unit + 1,
        "W+2": unit + 2,
        "2W": 2 * unit,
        "2W+1": 2 * unit + 1,
        "kP": pages,
        "kP-1": pages - 1,
        "kP+1": pages + 1,
        "C-1": chunk - 1,
        "C": chunk,
        "C+1": chunk + 1,
        "2C+W": 2 * chunk + unit,
    }[name]


def spans(row: Row, window: int) -> list[Span]:
    """The layers of a row."""

    def make(width: int) -> Span:
        match row["kind"]:
            case "sinks":
                return Span.sliding(width, sinks=3)
            case "chunked":
                return Span.chunked(width)
            case "reference" | "prefill window":
                return Span(SpanKind(row["kind"].replace(" ", "_")), width)
        return Span.sliding(width)

    w, full = make(window), Span.full()
    return {
        "window first": [w, w, full],
        "full first": [full, w, w],
        "all window": [w, w, w],
        "all full": [full, full],
        "odd at end": [full, full, full, w],
        "two windows": [w, full, make(2 * window + 1)],
    }[row["layers"]]


def heads(row: Row) -> dict[str, object]:
    """Overrides of the layers."""
    return {
        "grouped": {},
        "learned sinks": {"learned_sinks": True},
        "softcap": {"softcap": 3.0},
        "value size": {"v_head_dim": 12},
        "one kv head": {"num_kv_heads": 1},
    }[row["heads"]]


def requests(row: Row, size: Sizes, seed: int) -> list[Request]:
    """The prompts of a row: its own is called ``main``."""
    unit, decode = size.unit, size.decode

    def ask(name: str, length: int, tokens: int, at_step: int = 0) -> Request:
        return Request(name, random_tokens(max(length, 1), seed * 31 + len(name) * 7 + length), tokens, at_step)

    main = ask("main", size.prompt, decode)
    match row["batch"]:
        case "mixed":
            lengths = (3, unit - 1, unit, unit + 1, 3 * unit)
            return [main, *(ask(f"r{i}", n, min(decode, 24)) for i, n in enumerate(lengths))]
        case "joins":
            return [main, ask("leaves", 4, 3, 1), ask("joins", unit + 2, min(decode, 24), 5)]
        case "shrinks":
            short = [ask(f"s{i}", 3 + i, 2) for i in range(3)]
            return [main, *short, *(ask(f"l{i}", unit % 23 + i, 12) for i in range(4))]
        case "identical":
            return [Request(f"same{i}" if i else "main", main.prompt, decode if i == 0 else 7) for i in range(5)]
        case "long head":
            return [ask("long", 3 * unit + size.chunk, 5), main, *(ask(f"b{i}", 2 + i, 4) for i in range(3))]
    return [main]


def options(row: Row, size: Sizes, longest: int) -> EngineConfig:
    """The engine's options."""
    ratio = {"0": 0.0, "0.5": 0.5, "1": 1.0}.get(row["ratio"])
    full, window = {
        "same": ("auto", None),
        "int8": ("int8", None),
        "int8 windows": ("auto", "int8"),
        "int8 full": ("int8", "auto"),
        "bf16": ("bfloat16", None),
    }[row["stored"]]
    return EngineConfig(
        kv_cache_dtype=full,
        swa_kv_cache_dtype=window,
        max_model_len=longest,
        max_num_seqs={"identical": 3, "long head": 2}.get(row["batch"], 8),
        max_num_batched_tokens=max(size.budget, 8),
        page_size=size.page,
        chunked_prefill_size=None if row["chunk"] == "whole step" else size.chunk,
        hybrid_kvcache_ratio=ratio,
        disable_hybrid_swa_memory=row["ratio"] == "disabled",
        deterministic=row["kernels"] == "deterministic",
        speculative="none" if row["drafts"] == "none" else "ngram",
        num_speculative_tokens=3 if row["drafts"] == "none" else int(row["drafts"]),
        prompt_lookup_min=1,
    )
