"""What can be told from a model's description and the engine's options alone. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sash.doctor.finding import Finding, Status, ok, skipped
from sash.doctor.rule import most_pages
from sash.spec.config import DEFAULT_CONTEXT, EngineConfig, ResolvedConfig
from sash.spec.model import ModelSpec
from sash.spec.span import SpanKind

SPLIT, CHUNK, USED, LINE = "pool-split", "chunk-and-window", "window-used", "memory-line"
LENGTH, REJECTED, REACH, REFERENCE, SHORT = (
    "length-limited",
    "rejected",
    "reach",
    "reference-window",
    "short-text",
)
# From so many rows on products, not reading, take a chunk's time.
_ENOUGH_ROWS = 512
# A share of the requests that the same bytes could hold. The automatic split never falls below half of them: it
# gives windows at most half of the budget beyond what full-length requests need.
_GOOD_SHARE = 0.5
# Pages that no request could ever take while another pool is short.
_SPARE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool: its pages, what one request of the longest length needs of them, and bytes of a page."""

    name: str
    bounded: bool
    pages: int
    longest_pages: int
    page_bytes: int


def pools_of(config: ResolvedConfig) -> list[PoolFacts]:
    """The pools that a configuration makes."""
    demand = config.demand
    rows = zip(config.groups, config.pages, demand.request_pages(), demand.page_bytes(), strict=True)
    return [PoolFacts(g.name, g.bounded, pages, need, size) for g, pages, need, size in rows]


def split_finding(pools: Sequence[PoolFacts], max_model_len: int, max_num_seqs: int, asked: str = "") -> Finding:
    """Whether the pools run out together. ``asked``: the option that set them, if one did."""
    fits = {p.name: p.pages / max(p.longest_pages, 1) for p in pools}
    total = sum(p.pages * p.page_bytes for p in pools)
    best = total / max(sum(p.longest_pages * p.page_bytes for p in pools), 1)
    name = min(fits, key=lambda n: fits[n])
    have = fits[name]
    told = ", ".join(f"{n} {count:.1f}" for n, count in fits.items())
    seen = f"requests of {max_model_len} tokens that each pool holds: {told}; {max_num_seqs} may run at once"
    if len(pools) < 2:
        return ok(SPLIT, seen)
    spare = sum(max(p.pages - max_num_seqs * p.longest_pages, 0) * p.page_bytes for p in pools)
    fair = have >= _GOOD_SHARE * min(best, max_num_seqs) and spare <= _SPARE_SHARE * total
    if have >= max_num_seqs or fair:
        return ok(SPLIT, seen)
    idle = sum((p.pages - have * p.longest_pages) * p.page_bytes for p in pools) / total
    return Finding(
        SPLIT,
        Status.FAIL,
        f"{seen}; the same {total / 2**20:.1f} MiB could hold {best:.1f}",
        f"the {name} pool is short while the other is not: {idle:.0%} of the KV memory can't be used at that length"
        + (f" ({asked})" if asked else ""),
        f"leave {asked.partition('=')[0]} out, so that the split is computed"
        if asked
        else "give neither --swa-full-tokens-ratio nor --max-total-tokens, so that the split is computed",
    )


def chunk_finding(spec: ModelSpec, chunk: int, steps: str = "") -> Finding:
    """Whether a prompt's chunks are long enough for the window. ``steps``: what was seen of them, if anything was."""
    window = max([layer.span.window for layer in spec.layers if layer.span.bounded], default=0)
    if not window:
        return skipped(CHUNK, "the model has no windows")
    reread = (window - 1 + chunk) / chunk
    seen = f"chunks of {chunk} rows, windows of {window}{steps}"
    if chunk >= window or chunk >= _ENOUGH_ROWS:
        return ok(CHUNK, f"{seen}: {reread:.1f} rows of a window are read for each row that is added")
    return Finding(
        CHUNK,
        Status.WARN,
        f"{seen}: each row of a prompt costs {reread:.1f} rows of reading in window layers, and all weights are read "
        f"{-(-window // chunk)} times per window",
        "the chunk is smaller than the window: prompts are read slowly (the answer stays the same)",
        f"--chunked-prefill-size -1 --max-num-batched-tokens {max(_ENOUGH_ROWS, min(window, 2048))}",
    )


def window_used_finding(spec: ModelSpec, config: ResolvedConfig) -> Finding:
    """Misconception: a window mask over storage of full length saves nothing."""
    groups = [g for g in config.groups if g.bounded]
    if not groups:
        return ok(USED, "the model has no window layers, so there is nothing that a ring could save")
    demand = config.demand
    length, size = demand.max_model_len, demand.page_size
    whole = -(-length // size)
    for group in groups if demand.hybrid_ratio < 1 else ():
        need = min(most_pages(group.span, length, size, demand.slack) or whole, whole)
        have = demand.shape(group).pages(length)
        if have > need:
            option = "disable_hybrid_swa_memory" if demand.hybrid_ratio == 0 else "hybrid_kvcache_ratio"
            return Finding(
                USED,
                Status.WARN,
                f"{group.name} layers ({group.span.describe()}) store {have} pages of {length} tokens, and {need} "
                f"would do",
                f"a window mask over full storage saves no memory: {option} keeps rows that nothing sees",
                f"leave --{option.replace('_', '-')} out",
            )
    wasted = [g for g in groups if g.span.window >= length]
    if wasted:
        return ok(
            USED, f"windows of {wasted[0].span.window} are not shorter than max_model_len {length}: nothing slides"
        )
    stored = ", ".join(f"{g.name} {demand.shape(g).pages(length)} of {whole} pages" for g in groups)
    return ok(USED, f"a request of {length} tokens stores: {stored}")


def line_finding(spec: ModelSpec, config: ResolvedConfig) -> Finding:
    """Misconception: a hybrid's memory still grows, with the slope of its full layers."""
    demand = config.demand
    rows = list(zip(config.groups, demand.page_bytes(), strict=True))
    slope = sum(size for g, size in rows if not g.bounded) / demand.page_size
    every = sum(size for _, size in rows) / demand.page_size
    kind = "full attention" if slope == every else "hybrid" if slope else "pure windows"
    tail = {
        "full attention": "each token costs as much as the one before",
        "hybrid": "the full layers' part never stops growing",
        "pure windows": "past the windows a token costs nothing",
    }[kind]
    return ok(
        LINE,
        f"{kind}: {slope / 1024:.2f} KiB a token past the windows, {every / 1024:.2f} before; a request of "
        f"{demand.max_model_len} tokens takes {demand.request_bytes() / 2**20:.1f} MiB; {tail}",
    )


def length_finding(spec: ModelSpec, config: ResolvedConfig) -> Finding:
    """Whether a request's length is limited to what the memory and the model bear."""
    demand, length = config.demand, config.max_model_len
    fits = min((p.pages / max(p.longest_pages, 1) for p in pools_of(config)), default=0.0)
    seen = f"max_model_len {length} of the model's {spec.max_position}; {fits:.1f} such requests fit at once"
    shortened = [r for r in config.reasons if r.startswith("max_model_len")]
    if shortened:
        wanted = replace(demand, max_model_len=min(spec.max_position, DEFAULT_CONTEXT))
        return Finding(
            LENGTH,
            Status.WARN,
            f"{seen} ({shortened[0]})",
            "the KV budget is too small for the context that is usual for this model",
            f"--kv-cache-memory-bytes {wanted.request_bytes()}",
        )
    return ok(LENGTH, f"{seen}; pages of one size, so pools don't fragment")


def rejected_finding(config: ResolvedConfig) -> Finding:
    """Options that were given and have no effect."""
    ignored = [r for r in config.reasons if " is ignored" in r]
    if ignored:
        names = " ".join(f"--{r.split(' ')[0].replace('_', '-')}" for r in ignored)
        return Finding(REJECTED, Status.WARN, "; ".join(ignored), "an option has no effect here", f"leave {names} out")
    return ok(REJECTED, "no option was ignored")


def reach_finding(spec: ModelSpec) -> Finding:
    """Misconception: distant facts in pure windows; and what a window too small for the text looks like."""
    windows = [layer.span for layer in spec.layers if layer.span.bounded]
    if not windows:
        return ok(REACH, f"every layer sees the whole text, up to {spec.max_position} tokens")
    if len(windows) < len(spec.layers):
        count = len(spec.layers) - len(windows)
        return ok(
            REACH, f"{count} of {len(spec.layers)} layers see the whole text; the others the last {windows[0].window}"
        )
    chunked = any(span.kind is SpanKind.CHUNKED for span in windows)
    most = sum(span.window - 1 for span in windows)
    sinks = max(span.sinks for span in windows)
    reach = "nothing before the own chunk" if chunked else f"at most {most} tokens back through all layers"
    return ok(
        REACH,
        f"no layer sees the whole text: {reach}, in practice far fewer"
        + (f", and the first {sinks}" if sinks else "")
        + "; facts farther back are lost by the model's design",
    )


def reference_finding(spec: ModelSpec, config: ResolvedConfig) -> Finding:
    """From the deployment document: KV runs away because no reference window is set."""
    kinds = {layer.span.kind for layer in spec.layers}
    if SpanKind.REFERENCE in kinds:
        return ok(REFERENCE, "the prompt stays and generated tokens slide")
    grows = [g for g in config.groups if not g.bounded]
    if not grows:
        return ok(REFERENCE, "not needed: every layer has a window")
    return ok(
        REFERENCE, f"not set: {', '.join(g.name for g in grows)} layers keep every token, as the model was trained"
    )


def short_finding(spec: ModelSpec, config: ResolvedConfig) -> Finding:
    """Misconception: a window is not faster, and saves nothing, before the text is longer than it."""
    window = min([g.span.window for g in config.groups if g.bounded], default=0)
    if not window:
        return skipped(SHORT, "the model has no windows")
    return ok(
        SHORT, f"texts up to {window} tokens cost what they would cost with full attention; the gain starts there"
    )


def asked_split(options: EngineConfig) -> str:
    """The option that sets the size of one pool against the other; empty where it is computed."""
    if options.swa_full_tokens_ratio is not None:
        return f"--swa-full-tokens-ratio={options.swa_full_tokens_ratio}"
    if options.max_total_tokens is not None:
        return f"--max-total-tokens={options.max_total_tokens}"
    return ""


def setting_findings(spec: ModelSpec, config: ResolvedConfig) -> list[Finding]:
    """Everything that needs no engine."""
    options = config.options
    return [
        length_finding(spec, config),
        window_used_finding(spec, config),
        line_finding(spec, config),
        split_finding(pools_of(config), config.max_model_len, options.max_num_seqs, asked_split(options)),
        chunk_finding(spec, config.chunk),
        rejected_finding(config),
        reference_finding(spec, config),
        reach_finding(spec),
        short_finding(spec, config),
    ]
