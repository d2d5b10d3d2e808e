"""Windows against full attention, window sizes, reach and the myths, each on a tiny model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sash.lab import against, myths, needle, reach, sweep
from sash.lab.context import Context, windows_of
from sash.lab.experiment import Finding, NotApplicable, Verdict


def test_against_full_and_masked(context: Context) -> None:
    found = against.measure(context, against.Plan(6, 2))
    assert found.verdict is Verdict.HOLDS, found.sentence
    first, *_, last = found.rows
    assert [row["positions"] for row in found.rows] == ["0 to 4", "5 to 9", "10 to 19", "20 to 29"]
    assert first["to full"] < 1e-10 and first["token as full's"] == 100
    assert last["to full"] > 1e-3 and last["token as masked's"] == 100
    assert len(found.plots[0].lines["to masked, all positions"]) == 7


def test_against_finds_a_window_that_is_off_by_one(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = against.trace

    def wrong(weights, ids, spec, *, attention=None, **how):  # type: ignore[no-untyped-def]
        return plain(weights, ids, spec if attention else windows_of(spec, 6), attention=attention, **how)

    monkeypatch.setattr(against, "trace", wrong)
    assert against.measure(context, against.Plan(4, 1)).verdict is Verdict.FAILS


def test_sweep_scores_as_a_dense_run_does_and_counts_bytes(context: Context) -> None:
    found = sweep.measure(context, sweep.Plan((2, 16), 40))
    assert [row["window"] for row in found.rows] == [2, 5, 16, "none"]
    held = [row["all rows"] for row in found.rows]
    assert held == sorted(held) and held[0] < held[-1]
    ids = context.ids(40)
    from sash.lab.probe import trace

    logits = context.weights.decoder.logits(trace(context.weights, ids, windows_of(context.spec, 16)))
    scores = torch.log_softmax(logits[:-1], -1)[range(39), torch.tensor(ids[1:])]
    assert found.rows[2]["perplexity, all"] == pytest.approx(math.exp(-float(scores.mean())), rel=1e-3)
    assert found.rows[2]["perplexity"] == pytest.approx(math.exp(-float(scores[16:].mean())), rel=1e-3)


def test_sweep_of_a_model_without_windows_gives_them_to_all_layers(full_context: Context) -> None:
    found = sweep.measure(full_context, sweep.Plan((8,), 40))
    assert [row["window"] for row in found.rows] == [8, "none"]
    assert found.rows[0]["all rows"] < found.rows[1]["all rows"] and found.rows[1]["window rows"] == 0


def test_reach_in_the_real_model(context: Context) -> None:
    found = reach.measure(context, reach.Plan(60, 4, 2))
    assert [row["farthest, pure"] for row in found.rows] == [3 * (i + 1) for i in range(7)]
    assert found.rows[-1]["L x (W - 1)"] == 21
    assert all(len(plot.lines) == 3 for plot in found.plots)


def test_reach_in_a_random_stack(context: Context) -> None:
    found = reach.measure_toy(context, reach.Plan(60, 4, 2), depth=8)
    assert [row["farthest, pure"] for row in found.rows] == [3 * (i + 1) for i in range(8)]
    assert found.plots[0].lines["full"][-1][0] == 59 and found.plots[0].lines["pure"][-1][0] == 24


def test_reach_finds_a_token_that_arrives_from_too_far() -> None:
    far = torch.zeros(2, 12)
    far[:, :4], far[0, 4] = 1, 1
    found = {name: reach.Influence(far) for name in ("pure", "hybrid", "full")}
    assert found["pure"].farthest == [4, 3] and found["pure"].effective == [4, 3]
    assert reach._finding("reach", "a stack", 4, found, "").verdict is Verdict.FAILS


def test_myth_of_the_mask(context: Context) -> None:
    found = myths.measure_mask(context, (3.2, 12.8, 25.6))
    assert found.verdict is Verdict.HOLDS, found.sentence
    last = found.rows[-1]
    assert last["window as a mask"] == last["full attention"] > 2.5 * last["window as a ring"]


def test_myth_of_constant_memory(context: Context) -> None:
    found = myths.measure_growth(context, (3.2, 12.8, 25.6))
    assert found.verdict is Verdict.HOLDS, found.sentence
    # One row of a layer: K and V of 32 float32.
    assert {row["stack"]: row["growth"] for row in found.rows} == {"full": 7 * 256, "hybrid": 256, "pure": 0}


def test_growth_is_taken_past_the_window_between_whole_pages_or_not(context: Context) -> None:
    # In tokens: 1 lies below the window, where a hybrid grows as full attention does; 50 and 101 end within pages.
    found = myths.measure_growth(context, (0.2, 10, 20.2))
    assert found.verdict is Verdict.HOLDS, found.sentence
    with pytest.raises(NotApplicable, match="two lengths past the window of 5"):
        myths.measure_growth(context, (0.2, 10))


@pytest.mark.parametrize(
    ("short", "long", "verdict"),
    [(1.0, 1.5, Verdict.HOLDS), (1.2, 1.5, Verdict.FAILS), (1.0, 1.0, Verdict.FAILS)],
)
def test_myth_of_speed_is_judged_by_its_figures(short: float, long: float, verdict: Verdict) -> None:
    plan = myths.SpeedPlan((0.5, 50), 2, (), 1)
    rows = [
        myths._speed_row("write", length, {"windows": [0.1, 0.2, 0.3], "full": [0.1 * ratio, 0.2 * ratio, 9.0]})
        for length, ratio in ((4, short), (400, long))
    ]
    found = myths._speed_finding(8, plan, rows)
    assert found.verdict is verdict and f"{long:.2f} times as long" in found.sentence


def test_speed_is_not_judged_without_a_short_text() -> None:
    rows = [myths._speed_row("write", 400, {"windows": [0.1], "full": [0.2]})]
    with pytest.raises(NotApplicable, match="below the window of 8"):
        myths._speed_finding(8, myths.SpeedPlan((50,), 2, (), 1), rows)


def test_myth_of_speed_measures_both(context: Context) -> None:
    found = myths.measure_speed(context, myths.SpeedPlan((0.4, 8), 2, (3.2,), 1))
    assert [(row["work"], row["length"]) for row in found.rows] == [
        ("write a token", 2),
        ("write a token", 40),
        ("read a prompt", 16),
    ]
    assert all(row["windows"] > 0 and row["full"] > 0 for row in found.rows)


def test_the_needle_s_distance_is_exact(context: Context) -> None:
    number = "12345"
    near, far = needle.prompt(context, number, 10), needle.prompt(context, number, 50)
    assert len(far) - len(near) == 40 and far.count(1) == 1
    assert "12345" in context.tokenizer.decode(near)


@pytest.mark.parametrize(("hybrid", "verdict"), [(100.0, Verdict.HOLDS), (0.0, Verdict.FAILS)])
def test_the_needle_s_verdict(hybrid: float, verdict: Verdict) -> None:
    shares = {"full": {4: 100.0, 90: 100.0}, "hybrid": {4: 100.0, 90: hybrid}, "pure": {4: 90.0, 90: 0.0}}
    found = needle._finding(64, needle.Plan((4, 90), 2), shares)
    assert found.verdict is verdict and "the pure stack finds 90 %" in found.sentence


def test_the_needle_runs(context: Context) -> None:
    found = needle.measure(context, needle.Plan((1.6,), 1))
    assert [row["distance"] for row in found.rows] == [8]


def test_models_without_windows_are_told(full_context: Context) -> None:
    runs = (against.run, reach.run, needle.run, myths.run_mask, myths.run_growth, myths.run_speed)
    for run in runs:
        with pytest.raises(NotApplicable, match="no layer of this model has a window"):
            run(full_context)


def numbers_have_units(found: Finding) -> bool:
    return all(
        column in found.units
        for row in found.rows
        for column, value in row.items()
        if isinstance(value, float) and not isinstance(value, bool)
    )


def test_every_number_has_a_unit(context: Context) -> None:
    for found in (
        against.measure(context, against.Plan(2, 2)),
        reach.measure(context, reach.Plan(30, 3, 1)),
        sweep.measure(context, sweep.Plan((4,), 24)),
        myths.measure_mask(context, (3.2, 6.4)),
        myths.measure_growth(context, (6.4, 12.8)),
    ):
        assert numbers_have_units(found) and all(plot.x.unit and plot.y.unit and plot.reading for plot in found.plots)
    assert not numbers_have_units(replace(found, units={}))


@pytest.mark.parametrize("lengths", [(1,), (1, 40), (1, 2, 3)])
def test_growth_wants_two_lengths_past_the_window(folder: Path, lengths: tuple[int, ...]) -> None:
    with pytest.raises(NotApplicable, match="such as --lengths 10,20"):
        myths.run_growth(Context(str(folder), quick=True, threads=1, lengths=lengths))


def test_speed_wants_a_length_inside_the_window(folder: Path) -> None:
    with pytest.raises(NotApplicable, match="below the window of 5"):
        myths.run_speed(Context(str(folder), quick=True, threads=1, lengths=(40,)))
