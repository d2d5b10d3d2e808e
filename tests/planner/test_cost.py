"""Operations, times, designs, rules of thumb and advice: each number against a count by hand or a plainer way."""

from __future__ import annotations

from typing import get_args

import pytest

from sash.planner.advice import NEEDS, Needs, advise
from sash.planner.capacity import Layout, Precision
from sash.planner.compute import attention_flop, attention_total_flop, crossover_prompt, crossover_token, linear_flop
from sash.planner.designs import MILLION, designs, forms, policies
from sash.planner.estimates import estimates, reach_of
from sash.planner.plan import Tier, document, make_plan
from sash.planner.presets import find_preset, published
from sash.planner.shapes import LayerKind, Shapes
from sash.planner.solve import Question, solve
from sash.planner.speed import Device, Habits, decode_step, devices, find_device, prefill
from sash.planner.units import amount, seconds, share, size, spaced
from sash.spec.errors import ConfigError
from sash.spec.span import Span, SpanKind

G = 2**30
TYPED = Shapes(
    "typed", (LayerKind(3, Span.sliding(20), 4, 2, 8, 8), LayerKind(1, Span.full(), 4, 2, 8, 8)), published(5000, 5000)
)


def preset(name: str) -> Shapes:
    found = find_preset(name)
    assert found is not None
    return found


def test_attention_counted_pair_by_pair() -> None:
    pair = 2 * 4 * (8 + 8)
    by_hand = [pair * (3 * min(q + 1, 20) + (q + 1)) for q in range(100)]
    assert [attention_flop(TYPED, q, 100) for q in range(100)] == by_hand
    assert attention_total_flop(TYPED, 100, 100) == sum(by_hand)


def test_crossover_is_the_first_context() -> None:
    for shapes in (TYPED, preset("gemma-3-270m"), preset("gpt-oss-20b")):
        token, prompt, linear = crossover_token(shapes), crossover_prompt(shapes), linear_flop(shapes)
        assert token is not None and prompt is not None
        assert attention_flop(shapes, token - 1, token) >= linear > attention_flop(shapes, token - 2, token)
        at, before = (attention_total_flop(shapes, n, n) >= n * linear for n in (prompt, prompt - 1))
        assert (at, before) == (True, False)
    assert crossover_token(preset("mistral-7b")) is crossover_prompt(preset("mistral-7b")) is None


def test_times_on_a_named_device_are_its_roofline() -> None:
    shapes, device = preset("llama-3-8b"), find_device("H100_SXM")
    layout, count = Layout(shapes), shapes.weights
    assert count is not None
    step = decode_step(layout, device, 8192, 8000)
    reads = 2 * (count.dense + count.head) + 8192 * 131072
    assert step.total_s == step.reads_s == pytest.approx(reads / 3.35e12)
    assert step.bound_by == "reads"
    whole = prefill(layout, device, 8192)
    flop = 2 * (8192 * count.dense + count.head) + attention_total_flop(shapes, 8192, 8192)
    assert whole.total_s == whole.products_s == pytest.approx(flop / 989e12)
    many = decode_step(layout, device, 512, 500, 512)
    assert many.total_s < 512 * decode_step(layout, device, 512, 500).total_s / 50


def test_habits_only_add() -> None:
    layout = Layout(preset("gemma-3-270m"), Precision(weights="int8"))
    rates = {"bfloat16": 9e11, "int8": 1.9e12}
    bound, real = Device("a", 5e10, rates), Device("b", 5e10, rates, habits=Habits())
    assert prefill(layout, real, 4096).total_s > prefill(layout, bound, 4096).total_s
    assert decode_step(layout, real, 4096, 4000, 8).total_s > decode_step(layout, bound, 4096, 4000, 8).total_s
    parts = decode_step(layout, real, 4096, 4000)
    assert parts.total_s == pytest.approx(parts.reads_s + parts.products_s + parts.other_s)


@pytest.mark.parametrize(
    ("name", "read", "context", "requests", "measured_ms"),
    [
        ("smollm2-135m", 69e9, 544, 1, 4.36),
        ("smollm2-135m", 69e9, 4128, 1, 6.55),
        ("smollm2-135m", 69e9, 48, 8, 7.31),
        ("smollm2-135m", 40e9, 48, 1, 4.16),
        ("smollm2-135m", 40e9, 48, 8, 7.05),
        ("gemma3-270m", 62e9, 48, 1, 4.75),
        ("gemma3-270m", 62e9, 16_416, 1, 7.31),
        ("gemma3-270m", 62e9, 48, 8, 9.76),
        ("gemma3-270m", 62e9, 48, 16, 13.47),
        ("gemma3-270m", 42e9, 544, 1, 7.37),
        ("gemma3-270m", 37e9, 544, 1, 7.46),
    ],
)
def test_steps_are_predicted_at_any_pace_of_memory(
    name: str, read: float, context: int, requests: int, measured_ms: float
) -> None:
    """Measured on two cores of an AMD EPYC with AVX-512 while memory gave so many bytes a second."""
    layout = Layout(preset(name), Precision(weights="int8"))
    device = Device("measured", read, {"bfloat16": 9e11, "int8": 1.9e12}, habits=Habits())
    predicted = 1e3 * decode_step(layout, device, context, context - 32, requests).total_s
    assert predicted == pytest.approx(measured_ms, rel=0.2)


def test_every_device_has_what_times_need() -> None:
    for device in devices().values():
        assert device.memory_bytes > 0
        assert device.rate("int4") == device.rate("bfloat16") > device.rate("float32")
    with pytest.raises(ConfigError, match="did you mean h100"):
        find_device("h100")


def test_a_million_tokens_each_way() -> None:
    layout = Layout(preset("gemma-3-27b"))
    cost = {c.name: c for c in designs(layout)}
    assert list(cost) == ["full", "hybrid", "pure window", "R-SWA", "sparse", "linear"]
    token = 507_904
    assert cost["full"].held_bytes == token * MILLION
    assert cost["hybrid"].held_bytes == 81_920 * MILLION + 425_984 * 1024
    assert cost["pure window"].held_bytes == token * 1024
    assert cost["R-SWA"].held_bytes == token * (32_768 + 128)
    assert cost["sparse"].held_bytes == (token + 132 * 62) * MILLION
    assert cost["sparse"].read_bytes == token * 2048 + 132 * 62 * MILLION
    assert cost["linear"].held_bytes == 62 * 32 * 128 * 128 * 4
    assert cost["full"].total_flop > cost["hybrid"].total_flop > cost["pure window"].total_flop
    short = {c.name: c for c in designs(layout, 1000)}
    assert short["full"].held_bytes == short["hybrid"].held_bytes == short["R-SWA"].held_bytes


def test_other_forms_keep_every_layer() -> None:
    for name in ("gemma-3-27b", "llama-3-8b", "mistral-7b", "gemma-4-e4b", "mimo-v2-flash"):
        shapes = preset(name)
        assert {form.num_layers for form in forms(shapes).values()} == {shapes.num_layers}
    assert forms(preset("llama-3-8b"))["hybrid"].count(False) == 5


def test_policies_bound_full_layers_alone() -> None:
    layout = Layout(preset("gemma-3-27b"))
    held = {p.name: p.layout.held_bytes(32_768, 32_000) for p in policies(layout)}
    assert held["one uniform cache"] == layout.uniform_bytes(32_768)
    rings = 65 * 16 * 425_984
    assert held["4 sinks + recent, 1024"] == rings + 16 * 81_920 * (1 + 65)
    assert held["int8 rows"] < 0.52 * held["as it is"]


def test_rules_of_thumb_beside_exact_values() -> None:
    layout = Layout(preset("gemma-3-27b"))
    found = {e.name: e for e in estimates(layout, 32_768, 32_000, 16 * G)}
    assert found["KV calculators"].estimate == 507_904 * 32_768
    assert found["KV calculators"].factor == pytest.approx(15_872 / 2976)
    assert found["memory of a sequence"].estimate == 4 * 32_768 * (1024 + 5376)
    assert found["batch"].estimate == (16 * G // 507_904) // (1024 * 5376) == 0
    assert found["batch"].exact == layout.most_requests(32_768, 32_000, 16 * G)
    assert found["ring memory"].estimate == 62 * 32 * 256 * 2 * 1024
    assert found["ring memory"].exact == 52 * 16 * 256 * 2 * 1024
    assert (found["window memory in prefill"].estimate, found["window memory in prefill"].exact) == (2064, 1040)
    reach = found["receptive field of the windows"]
    assert (reach.estimate, reach.exact) == (52 * 1024, 1536)
    pure = found["a hybrid's memory"]
    assert (pure.estimate, pure.exact) == (507_904 * 1024, 81_920 * 32_768 + 425_984 * 1024)
    assert found["ratio of the pools"].exact == pytest.approx(65 / 2048)
    assert found["gain over a uniform cache"].estimate == pytest.approx(1.20, abs=0.005)
    equal = {e.name: e for e in estimates(Layout(preset("gemma-2-2b")), 8192, 8000, G)}
    assert equal["gain over a uniform cache"].estimate == pytest.approx(1.11, abs=0.005)
    assert found["context from which windows pay"].exact == 65 * 16 + 1
    overtakes = found["attention overtakes the linear layers"]
    assert overtakes.factor == pytest.approx(0.5, rel=0.01)
    full = {e.name: e for e in estimates(Layout(preset("llama-3-8b")), 8192, 8000, 16 * G)}
    assert full["KV calculators"].factor == 1
    assert "ring memory" not in full


def typed(count: int, span: Span) -> Shapes:
    return Shapes("typed", (LayerKind(count, span, 4, 2, 8, 8),))


def test_reach_is_never_more_than_the_layers_can_pass_on() -> None:
    assert reach_of(typed(1, Span.sliding(100))) == (100, 100)
    assert reach_of(typed(10, Span.sliding(100))) == (991, 150)
    assert reach_of(typed(10, Span.chunked(100)))[1] is None
    for span in (Span.chunked(100), Span(SpanKind.REFERENCE, 100)):
        assert not any("receptive" in e.name for e in estimates(Layout(typed(10, span)), 1000, 900, G))
    assert "nothing from before their chunk" in " ".join(
        a.because for a in advise(solve(typed(10, Span.chunked(100)), Question()), "distant")
    )


def test_a_reference_window_pays_at_no_length_of_its_own() -> None:
    names = {e.name: e.exact for e in estimates(Layout(preset("unlimited-ocr")), 16_384, 8000, G)}
    assert names["reference window"] == 128
    assert "context from which windows pay" not in names and "window memory in prefill" not in names


def test_rules_of_rings_take_the_rows_of_rings() -> None:
    layout = Layout(preset("mimo-v2-flash"), Precision(window_kv="int8"))
    found = {e.name: e for e in estimates(layout, 4096, 4000, G)}
    assert found["ring memory"].exact == 39 * 8 * (192 + 128) * 129


@pytest.mark.parametrize("span", [Span.full(), Span.sliding(64), Span.chunked(64)], ids=str)
def test_one_layer_is_no_hybrid(span: Span) -> None:
    plan = make_plan(typed(1, span), Question(context=4096))
    assert [cost["name"] for cost in document(plan)["million_tokens"]] == [
        "full",
        "pure window",
        "R-SWA",
        "sparse",
        "linear",
    ]
    assert plan.advice()[0].do.startswith("full")


def test_latent_attention_multiplies_other_heads_than_it_stores() -> None:
    """DeepSeek-V3 stores 512 + 64 numbers; each of 128 heads multiplies a key of 192 and a value of 128."""
    layout = Layout(preset("deepseek-v3"))
    assert sum(layout.token_bytes.values()) == 61 * 576 * 2
    assert attention_flop(layout.shapes, 99, 100) == 100 * 61 * 2 * 128 * (192 + 128)
    linear = {c.name: c for c in designs(layout)}["linear"]
    assert linear.held_bytes == 61 * 128 * 192 * 128 * 4


def spoken(name: str, needs: Needs = "distant", **question: int) -> dict[str, str]:
    return {a.topic: f"{a.do}: {a.because}" for a in advise(solve(preset(name), Question(**question)), needs)}


def test_advice_brings_its_number() -> None:
    said = spoken("gemma-3-27b", memory_bytes=80 * 10**9, context=32_768)
    assert list(said) == ["span", "ring", "ratio", "chunk", "rows", "time"]
    assert said["span"].startswith("hybrid")
    assert "2.91 GiB instead of 15.5 GiB" in said["ring"] and "16 %" in said["ring"]
    assert "0.032 window tokens per full token" in said["ratio"] and "instead of 5" in said["ratio"]
    assert all(any(c.isdigit() for c in text) for text in said.values())


def test_advice_follows_length_needs_and_memory() -> None:
    assert "2048 tokens lie within a window of 4096" in spoken("mistral-7b", "recent", context=2048)["span"]
    assert spoken("mistral-7b", context=2048)["ring"].startswith("no ring is needed")
    assert spoken("mistral-7b", "recent", context=32_768)["span"].startswith("pure window")
    assert spoken("unlimited-ocr", "prompt", context=16_384, answer=8000)["span"].startswith("R-SWA")
    assert spoken("unlimited-ocr", "prompt", context=16_384, answer=100)["span"].startswith("full")
    assert spoken("llama-3.1-70b", context=2048)["span"].startswith("full")
    assert spoken("llama-3.1-70b", context=100_000, requests=8)["span"].startswith("hybrid")
    assert spoken("llama-3.1-8b", context=8192)["ring"].startswith("no ring is needed")
    assert "memory from a window here, not speed" in spoken("llama-3.1-8b", context=8192)["time"]
    assert "windows save time as well" in spoken("llama-3.1-8b", context=24_576)["time"]
    assert "2.1 × the linear layers" in spoken("llama-3.1-8b", context=65_536)["time"]
    for name, own in (("llama-3.1-70b", "full"), ("mistral-7b", "pure window")):
        said = spoken(name, context=32_768, requests=32)["span"]
        assert said.startswith("hybrid") and f"this model is {own}: that needs another one" in said
    assert "needs another" not in spoken("gemma-3-27b", context=32_768, requests=32)["span"]
    assert "needs another" not in spoken("gemma-3-27b", context=2048)["span"]  # full rows would do, and it has them
    assert "needs another" not in spoken("mistral-7b", context=2048)["span"]
    assert set(NEEDS) == set(get_args(Needs))


def test_the_document_holds_every_part() -> None:
    plan = make_plan(
        preset("gpt-oss-20b"), Question(), device=find_device("h100-sxm"), tiers=[Tier("disk", 10**12, 2e9)]
    )
    data = document(plan)
    assert data["answer"]["memory_bytes"] == 80 * 10**9  # the device's
    assert data["answer"]["solved"] == "requests"
    assert [g["name"] for g in data["groups"]] == ["window", "full"]
    assert sum(g["pool_bytes"] for g in data["groups"]) <= data["answer"]["kv_bytes"]
    assert [row["ratio"] for row in data["pools"]] == [None, 0.5, 0.8, 1.0]
    assert data["pools"][0]["requests"] == data["answer"]["requests"]
    assert data["tiers"][0]["prefixes"] == 10**12 // data["request"]["held_bytes"]
    assert set(data["times"]) == {"prefill", "decode 1", f"decode {data['answer']['requests']}"}
    assert len(data["million_tokens"]) == 6
    with pytest.raises(ConfigError, match="--ratio"):
        make_plan(preset("gpt-oss-20b"), Question(), ratios=[1.5])


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 2**20 - 1, 3.5 * 2**40)] == [
        "0 B",
        "1.00 KiB",
        "1.00 KiB",
        "1.00 MiB",
        "3.50 TiB",
    ]
    assert [amount(n) for n in (5, 999.6, 27e9, 1.5e20)] == ["5", "1.00 k", "27.0 G", "150 E"]
    assert [seconds(n) for n in (5e-6, 0.0123, 3, 600, 10_000)] == [
        "5.00 µs",
        "12.3 ms",
        "3.00 s",
        "10.0 min",
        "2.78 h",
    ]
    assert [share(n, 100) for n in (0, 0.01, 1.26, 50)] == ["0 %", "under 0.1 %", "1.3 %", "50 %"]
    assert (spaced(9999), spaced(10_000)) == ("9999", "10\u202f000")
