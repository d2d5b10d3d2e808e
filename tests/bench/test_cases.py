"""Cases, their rates and figures, and the ceilings that they are held against."""

from __future__ import annotations

import pytest
from tests.equivalence.harness import tiny_spec

from sash.bench import ceiling
from sash.bench.cases import Case, Timing, figures, line, parse_cases, summary
from sash.bench.ceiling import Ceiling, Precision
from sash.spec.errors import ConfigError
from sash.spec.span import Span

# A row of 32 numbers has four scales of four bytes.
BYTES = Precision(1, ["int8", "int8"], "int8")
HALF = Precision(2, ["bfloat16", "bfloat16"], "bfloat16")


def test_cases_are_lengths_and_batches_between_commas() -> None:
    assert parse_cases("512, 8x256,") == (Case(512, 64), Case(16, 256, 8))
    assert [case.tokens for case in parse_cases("512,8x256")] == [576, 8 * 272]
    for text in ("0", "-4", "12;13", "1e3", "many", "1x8", "0x8", "8x1", "8x", "8x0"):
        with pytest.raises(ConfigError, match=r"--cases must be prompt lengths .* got"):
            parse_cases(text)
    with pytest.raises(ConfigError, match=r"--cases must name at least one"):
        parse_cases(" ,")


def test_prompts_are_neighbours_behind_the_first_token() -> None:
    text = [2, *range(10, 100)]
    assert Case(4, 8).prompts(text) == [[2, 10, 11, 12]]
    assert Case(3, 8, 3).prompts(text) == [[2, 10, 11], [2, 12, 13], [2, 14, 15]]


def test_rates_are_tokens_per_second() -> None:
    one, many = Case(512, 65), Case(16, 100, 8)
    assert (one.rate("prefill", Timing(0.5, 2.0)), one.rate("decode", Timing(0.5, 2.0))) == (1024.0, 32.0)
    assert many.rate("batch", Timing(0.5, 1.5)) == 400.0
    assert [one.name("prefill"), one.name("decode"), many.name("batch")] == [
        "prefill 512",
        "decode after 512",
        "8 requests x 100",
    ]


def test_figures_are_medians_and_the_ratio_is_to_the_best_peer() -> None:
    timings = {
        "sash": [Timing(1.0, 3.0), Timing(2.0, 3.0), Timing(4.0, 3.0)],
        "fast": [Timing(4.0, 1.0)],
        "slow": [Timing(8.0, 6.0)],
        "gone": [],
    }
    prefill, decode = figures(Case(8, 4), timings, lambda case, kind: {"prefill": 16.0, "decode": 3.0}[kind])
    assert prefill["sash"] == {"median": 4.0, "low": 2.0, "high": 8.0, "runs": 3}
    assert prefill["peers"] == {"fast": summary([2.0]), "slow": summary([1.0])}
    assert (prefill["best_peer"], prefill["ratio"]) == ("fast", 2.0)
    assert (decode["best_peer"], decode["ratio"]) == ("fast", pytest.approx(1 / 3))
    assert " ".join(line(prefill).split()) == (
        "prefill 8 4.0 tok/s (2.0 to 8.0) fast 2.0 slow 1.0 ratio 2.00 to fast ceiling 16.0 (25 %)"
    )
    [alone] = figures(Case(8, 4, 2), {"sash": timings["sash"]}, lambda case, kind: 2.0)
    assert "ratio" not in alone and line(alone).endswith("ceiling 2.0 (80 %)")


def test_a_window_bounds_what_decode_reads_and_prefill_multiplies() -> None:
    spec = tiny_spec([Span.sliding(4), Span.full()])
    # Hidden 16, 4 heads over 2 of size 8, MLP 24: q and o 512 each, k and v 256 each, the MLP 1152.
    assert ceiling.weight_elements(spec) == (2 * 2688, 61 * 16)
    # 6352 weights of two bytes; of K and V the window sees 4 rows and the full layer 10, each of 32 numbers.
    assert ceiling.decode_bytes(spec, 9, HALF) == 12_704 + 896
    assert ceiling.decode_bytes(spec, 9, BYTES, requests=3) == 6352 + 3 * 672
    # 9 rows of 5376 weights; 30 pairs in the window and 45 in the full layer, 64 products each; one row of the head.
    assert ceiling.prefill_flop(spec, 9) == 2 * (48_384 + 4_800 + 976)


def test_ceilings_are_what_reads_or_products_allow() -> None:
    spec, top = tiny_spec([Span.sliding(4), Span.full()]), Ceiling(1e6, {"bfloat16": 1e9, "int8": 2e3})
    assert Case(9, 4).ceiling("prefill", top, spec, HALF) == 9 * 1e9 / 108_320
    assert Case(8, 2).ceiling("decode", top, spec, HALF) == 1e6 / 13_600
    assert Case(8, 2, 3).ceiling("batch", top, spec, HALF) == 3e6 / (12_704 + 3 * 896)
    # Slow products bound a batch instead: 2 operations for each of 6352 weights and each request.
    assert Case(8, 2, 3).ceiling("batch", top, spec, BYTES) == pytest.approx(2e3 / 12_704)
