"""What a run took: the pools' bytes at their peak beside one uniform cache, and the rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any


def pool_rows(stats: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per pool: its size, what it held at its peak, and its layers' share of one uniform cache at its peak.

    Args:
        stats: the engine's; each entry of ``pools`` has name, layers, page_bytes, num_pages and
            peak_pages, and ``uniform_peak_bytes`` is a whole number of pages of all layers.
    """
    pools = stats["pools"]
    uniform_pages = stats["uniform_peak_bytes"] // sum(pool["page_bytes"] for pool in pools)
    return [
        {
            "pool": pool["name"],
            "layers": pool["layers"],
            "size_bytes": pool["num_pages"] * pool["page_bytes"],
            "peak_bytes": pool["peak_pages"] * pool["page_bytes"],
            "uniform_bytes": uniform_pages * pool["page_bytes"],
        }
        for pool in pools
    ]


def longest_line(stats: Mapping[str, Any]) -> str:
    """What the longest request would hold, here and in one uniform cache."""
    length, pools = stats["max_model_len"], stats["pools"]
    here = sum(pool["longest_pages"] * pool["page_bytes"] for pool in pools)
    uniform = sum(-(-length // pool["page_size"]) * pool["page_bytes"] for pool in pools)
    return f"A request of {length} tokens would hold {mib(here)}, in one uniform cache {mib(uniform)}."


def mib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**20:.2f} MiB"


def print_stats(stats: Mapping[str, Any], timings: Mapping[str, float | int | None]) -> None:
    """The rates, the pools at their peak and what the longest request would take, on standard error."""
    from rich.console import Console
    from rich.table import Table

    rows = pool_rows(stats)
    console = Console(stderr=True, highlight=False)
    console.print(
        f"prompt {timings['prompt_tokens']} tokens at {_rate(timings['prefill_tokens_per_s'])}, "
        f"answer {timings['generated_tokens']} tokens at {_rate(timings['decode_tokens_per_s'])}, "
        f"loaded in {timings['load_s']:.1f} s",
        soft_wrap=True,
    )
    if stats.get("draft_tokens"):
        drafted, accepted = stats["draft_tokens"], stats["accepted_tokens"]
        console.print(
            f"drafts {drafted} tokens, of them {accepted} accepted ({accepted / drafted:.0%})", soft_wrap=True
        )
    table = Table(title="KV memory at its peak", title_justify="left")
    for heading, justify in (("pool", "left"), ("layers", "right"), ("sash", "right"), ("one uniform cache", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(str(row["pool"]), str(row["layers"]), mib(row["peak_bytes"]), mib(row["uniform_bytes"]))
    total, uniform = sum(row["peak_bytes"] for row in rows), sum(row["uniform_bytes"] for row in rows)
    table.add_section()
    table.add_row("together", str(sum(row["layers"] for row in rows)), mib(total), mib(uniform))
    console.print(table)
    console.print(longest_line(stats), soft_wrap=True)


def _rate(value: float | int | None) -> str:
    return "an unmeasured rate" if value is None else f"{value:.1f} tokens/s"


def plain(value: object) -> object:
    """Something that json can write: dataclasses, mappings with any keys and sequences unfolded."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value
