"""Published models against figures that were worked out by hand: KV memory, weights, crossovers."""

from __future__ import annotations

import pytest
from tests.real_models import real_model

from sash.planner.capacity import Layout, Precision
from sash.planner.compute import crossover_prompt, crossover_token
from sash.planner.presets import find_preset, preset_names, presets, similar
from sash.planner.shapes import Shapes, shapes_of
from sash.planner.sources import TypedShapes, find_shapes
from sash.spec.load import load_spec
from sash.spec.locate import ModelSource
from sash.spec.span import Span, SpanKind

K = 1024
# bfloat16, one sequence. Bytes of a token in full and in bounded layers, and MiB at 8K, 32K and 128K tokens: with
# windows / with every layer full. Rows that a query sees, not rounded to pages; a chunk counts whole.
TABLE = """
mistral-7b | 0 | 131072 | 512 / 1024 | 512 / 4096 | 512 / 16384
gemma-2-2b | 53248 | 53248 | 624 / 832 | 1872 / 3328 | 6864 / 13312
gemma-2-9b | 172032 | 172032 | 2016 / 2688 | 6048 / 10752 | 22176 / 43008
gemma-2-27b | 188416 | 188416 | 2208 / 2944 | 6624 / 11776 | 24288 / 47104
gemma-3-1b | 4096 | 22528 | 43 / 208 | 139 / 832 | 523 / 3328
gemma-3-4b | 20480 | 118784 | 276 / 1088 | 756 / 4352 | 2676 / 17408
gemma-3-12b | 65536 | 327680 | 832 / 3072 | 2368 / 12288 | 8512 / 49152
gemma-3-27b | 81920 | 425984 | 1056 / 3968 | 2976 / 15872 | 10656 / 63488
gemma-3n-e2b | 8192 | 32768 | 80 / 320 | 272 / 1280 | 1040 / 5120
gemma-3n-e4b | 8192 | 32768 | 80 / 320 | 272 / 1280 | 1040 / 5120
gemma-4-e2b | 6144 | 12288 | 54 / 144 | 198 / 576 | 774 / 2304
gemma-4-e4b | 16384 | 40960 | 148 / 448 | 532 / 1792 | 2068 / 7168
gemma-4-26b-a4b | 20480 | 204800 | 360 / 1760 | 840 / 7040 | 2760 / 28160
gemma-4-31b | 81920 | 819200 | 1440 / 7040 | 3360 / 28160 | 11040 / 112640
gpt-oss-20b | 24576 | 24576 | 195 / 384 | 771 / 1536 | 3075 / 6144
gpt-oss-120b | 36864 | 36864 | 292.5 / 576 | 1156.5 / 2304 | 4612.5 / 9216
ministral-8b | 36864 | 110592 | 1152 / 1152 | 4608 / 4608 | 8064 / 18432
command-r7b | 32768 | 98304 | 640 / 1024 | 1408 / 4096 | 4480 / 16384
command-a | 65536 | 196608 | 1280 / 2048 | 2816 / 8192 | 8960 / 32768
exaone-4.0-32b | 65536 | 196608 | 1280 / 2048 | 2816 / 8192 | 8960 / 32768
olmo-3-32b | 65536 | 196608 | 1280 / 2048 | 2816 / 8192 | 8960 / 32768
olmo-3-7b | 131072 | 393216 | 2560 / 4096 | 5632 / 16384 | 17920 / 65536
llama-4-scout | 49152 | 147456 | 1536 / 1536 | 2688 / 6144 | 7296 / 24576
llama-4-maverick | 49152 | 147456 | 1536 / 1536 | 2688 / 6144 | 7296 / 24576
mimo-v2-flash | 23040 | 199680 | 204.6 / 1740 | 744.6 / 6960 | 2904.6 / 27840
step-3.5-flash | 49152 | 135168 | 450 / 1440 | 1602 / 5760 | 6210 / 23040
trinity-mini | 16384 | 49152 | 224 / 512 | 608 / 2048 | 2144 / 8192
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
# Published numbers of weights, in billions, to the digits that are printed; text models without their image parts.
PUBLISHED = {
    "llama-2-7b": "6.74",
    "llama-3-8b": "8.03",
    "llama-3-70b": "70.55",
    "llama-3.2-1b": "1.24",
    "llama-3.2-3b": "3.21",
    "mistral-7b": "7.24",
    "mixtral-8x7b": "46.7",
    "mistral-nemo-12b": "12.2",
    "mistral-small-24b": "23.6",
    "ministral-8b": "8.02",
    "gemma-2-2b": "2.61",
    "gemma-2-9b": "9.24",
    "gemma-2-27b": "27.2",
    "gemma-3-270m": "0.268",
    "gemma-3-1b": "1.00",
    "gpt-oss-20b": "20.91",
    "command-r7b": "8.03",
    "command-a": "111",
    "exaone-4.0-32b": "32.0",
    "olmo-3-7b": "7.30",
    "olmo-3-32b": "32.2",
    "mimo-v2-flash": "309",
    "phi-3-mini-4k": "3.82",
    "qwen2.5-7b": "7.62",
    "qwen2.5-72b": "72.7",
    "qwen3-0.6b": "0.60",
    "qwen3-4b": "4.02",
    "qwen3-8b": "8.19",
    "qwen3-32b": "32.8",
    "qwen3-30b-a3b": "30.5",
    "smollm2-135m": "0.134",
    "smollm3-3b": "3.07",
}


def preset(name: str) -> Shapes:
    shapes = find_preset(name)
    assert shapes is not None, name
    return shapes


def mib(shapes: Shapes, tokens: int) -> float:
    return sum(Layout(shapes).row_bytes(tokens, tokens).values()) / 2**20


def printed(value: float, like: str) -> str:
    """``value`` with as many decimals as the table has."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_kv_memory_to_the_printed_digit(row: list[str]) -> None:
    name, full_token, window_token, *lengths = row
    shapes, layout = preset(name), Layout(preset(name))
    by_kind = {True: 0, False: 0}
    for group in shapes.groups:
        by_kind[group.bounded] += layout.token_bytes[group.name]
    assert by_kind == {False: int(full_token), True: int(window_token)}
    for tokens, pair in zip((8 * K, 32 * K, 128 * K), lengths, strict=True):
        own, full = (text.strip() for text in pair.split("/"))
        assert printed(mib(shapes, tokens), own) == own
        assert printed(mib(shapes.respanned(Span.full()), tokens), full) == full


def test_pages_stand_beside_the_rows() -> None:
    """What the pools hold is the table's figure and at most a page of each group and the ring's own page more."""
    for name, *_ in ROWS:
        layout = Layout(preset(name))
        page = sum(layout.token_bytes.values()) * layout.page_size
        rows = sum(layout.row_bytes(32 * K, 32 * K).values())
        assert rows <= layout.request_bytes(32 * K) <= rows + 2 * page


def test_a_reference_window_keeps_the_prompt() -> None:
    """Unlimited-OCR: 7.5 MiB of window and 60 KiB for each token of the prompt, however long the answer."""
    layout = Layout(preset("unlimited-ocr"))
    for answer in (128, 8000, 100_000):
        rows = sum(layout.row_bytes(2816 + answer, 2816).values())
        assert rows == 7.5 * 2**20 + 2816 * 60 * 2**10
    assert layout.shapes.groups[0].span == Span(SpanKind.REFERENCE, 128)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_the_published_number(name: str) -> None:
    count = preset(name).weights
    assert count is not None
    assert not count.rounded
    assert printed(count.total / 1e9, PUBLISHED[name]) == PUBLISHED[name]


def test_active_weights() -> None:
    used = {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13, "mimo-v2-flash": 15, "llama-4-maverick": 17}
    for name, billions in used.items():
        count = preset(name).weights
        assert count is not None
        assert (count.active + count.embed) / 1e9 == pytest.approx(
            billions, rel=0.17 if name.startswith("gpt") else 0.03
        )


def test_crossovers_and_memory_of_the_long_context_guide() -> None:
    """About 38 K and 54 K tokens, linear layers as 2 × all parameters; 7.5 and 42.9 GB at 128 K."""
    qwen, llama = preset("qwen2.5-7b"), preset("llama-3-70b")
    assert [round((crossover_token(s) or 0) / 1000) for s in (qwen, llama)] == [38, 54]
    assert [f"{mib(s, 128 * K) * 2**20 / 1e9:.1f}" for s in (qwen, llama)] == ["7.5", "42.9"]
    for shapes in (qwen, llama):  # a whole prompt's attention: twice as far
        assert crossover_prompt(shapes) == pytest.approx(2 * (crossover_token(shapes) or 0), rel=1e-4)


def test_ring_memory_corrected() -> None:
    """12 layers, 12 heads of 64, window 1024, fp16: 37 748 736 bytes; 32, 32, 128, 4096: 2 147 483 648."""
    for layers, heads, dim, window, wanted in ((12, 12, 64, 1024, 37_748_736), (32, 32, 128, 4096, 2_147_483_648)):
        shapes = find_shapes(None, TypedShapes(layers=layers, kv_heads=heads, head_dim=dim, window=window))
        rows = Layout(shapes, Precision(kv="float16")).row_bytes(10 * window, 10 * window)
        assert rows == {"window": wanted}


def test_one_formula_from_quest() -> None:
    assert mib(preset("llama-2-7b"), 32 * K) == 16 * 1024


def test_there_are_forty_presets_and_each_reads() -> None:
    assert len(preset_names()) >= 40
    assert len(presets()) == len(preset_names())
    for name in preset_names():
        shapes = preset(name)
        assert shapes.name == name
        assert shapes.num_layers and shapes.groups


@pytest.mark.real
@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_presets_are_the_real_models(name: str) -> None:
    """Shapes equal; weights but for the norms, which presets leave out."""
    path = real_model(name)
    real, known = shapes_of(load_spec(ModelSource("gguf", path, name)), name), preset(name)
    assert set(real.kinds) == set(known.kinds)
    assert (real.max_position, real.hidden, real.vocab) == (known.max_position, known.hidden, known.vocab)
    assert real.weights is not None and known.weights is not None
    assert 0 <= real.weights.total - known.weights.total < 0.001 * real.weights.total


def test_names_that_come_close() -> None:
    assert preset("Gemma3_27B").name == "gemma-3-27b"
    assert similar("google/gemma-3-27b-it")[0] == "gemma-3-27b"
    assert find_preset("gpt-4") is None
