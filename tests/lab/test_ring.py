"""Ring, full storage, shift-left and re-computation: the same tokens, and the bytes that each should hold."""

from __future__ import annotations

import pytest
import torch

from sash.kv.storage import KVPool
from sash.lab import ring, ring_layer, ring_long
from sash.lab.context import Context
from sash.lab.experiment import NotApplicable, Verdict
from sash.lab.session import STORAGES, Session
from sash.spec.sampling import SamplingParams

LAYER = ring_layer.Plan((4, 16, 40), 5, window=8, heads=(2, 1), dim=16, hidden=24)


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts of tests rest on outputs and bytes, never on how fast the machine is."""
    monkeypatch.setattr(ring_layer, "_GROWTH", float("inf"))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_each_storage_writes_what_the_engine_writes(context: Context, storage: str, chunk: int) -> None:
    prompt = context.ids(23)
    [out] = context.llm(max_model_len=64).generate(
        [prompt], SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    )
    session = Session(context.weights, storage, 64, chunk=chunk)
    tokens = [session.feed(prompt)]
    while len(tokens) < 14:
        tokens.append(session.feed([tokens[-1]]))
    assert tokens == out.outputs[0].token_ids


def test_each_storage_holds_what_it_should(context: Context) -> None:
    # Window 5 in 6 layers and 1 full layer; pages of 16, rows of 2 x 32 x 4 bytes a layer; 20 tokens.
    row = 256
    held = {}
    for storage in STORAGES:
        session = Session(context.weights, storage, 64)
        session.feed(context.ids(20))
        held[storage] = session.held_bytes()
    assert held["shift-left"] == {"window": 5 * 6 * row, "full": 32 * row}
    assert held["full storage"] == {"window": 32 * 6 * row, "full": 32 * row}
    assert held["ring"]["window"] <= 32 * 6 * row and held["ring"]["full"] == 32 * row


def test_the_real_model_s_ring(context: Context) -> None:
    found = ring.measure(context, ring.Plan((3, 40, 200), 6, 2))
    assert found.verdict is Verdict.HOLDS, found.sentence
    by = {(row["length"], row["storage"]): row for row in found.rows}
    assert by.keys() == {(n, name) for n in (3, 40, 200) for name in (*STORAGES, "re-computation")}
    assert all(row["tokens as the ring's"] == 100 for row in found.rows)
    assert by[200, "ring"]["window rows"] == by[40, "ring"]["window rows"] < by[200, "full storage"]["window rows"]


def test_short_texts_alone_are_no_failure(context: Context) -> None:
    found = ring.measure(context, ring.Plan((3,), 2, 1))
    assert found.verdict is Verdict.HOLDS, found.sentence
    assert "reading 3 tokens again" in found.plots[1].reading


def test_lengths_that_overlap_are_not_measured(context: Context) -> None:
    with pytest.raises(NotApplicable, match="lengths 40 and 44 are nearer than the 6 tokens written after each"):
        ring.measure(context, ring.Plan((40, 44), 6, 1))


def test_lengths_too_long_to_read_again(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_RECOMPUTED", 30)
    found = ring.measure(context, ring.Plan((40,), 3, 1))
    assert found.verdict is Verdict.HOLDS and "tokens again" not in found.sentence
    assert [list(plot.lines) for plot in found.plots] == [list(STORAGES)] * 2


def test_a_storage_that_loses_a_row_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from sash.lab.session import _Shifted

    plain = _Shifted.settle

    def forgets(self: _Shifted, end: int) -> None:
        plain(self, end)
        for plane in self.pool.planes:
            plane.zero_()

    monkeypatch.setattr(_Shifted, "settle", forgets)
    assert ring.measure(context, ring.Plan((40,), 12, 1)).verdict is Verdict.FAILS


def test_one_layer(context: Context) -> None:
    found = ring_layer.measure(context, LAYER)
    assert found.verdict is Verdict.HOLDS, found.sentence
    by = {(row["length"], row["storage"]): row["held"] * 2**20 for row in found.rows}
    # K and V of 16 float32 a row: a ring of two pages of 16 rows, W rows in order, W inputs, all rows in pages.
    assert [by[40, name] for name in ring_layer.FOUR] == [32 * 128, 48 * 128, 8 * 128, 8 * 24 * 4]


def test_a_layer_whose_ring_is_wrong_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KVPool.write

    def shifted(self: KVPool, layer: int, rows: object, which: object, slots: object) -> None:
        plain(self, layer, rows, which, slots)  # type: ignore[arg-type]
        self.v[..., 0, :] += 1

    monkeypatch.setattr(KVPool, "write", shifted)
    assert ring_layer.measure(context, LAYER).verdict is Verdict.FAILS


def test_a_long_answer(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ring_long.Plan(150, prompt=8, every=20, checked=16)
    found = ring_long.measure(context, plan)
    assert found.verdict is Verdict.HOLDS, found.sentence
    assert found.rows[-1]["length"] == 158
    # 157 rows are stored on pages of 4, two at a time; of the prompt only the later page.
    assert found.rows[-1]["pages overwritten"] == 40 - 3
    monkeypatch.setattr(Session, "feed", lambda self, tokens: -1)
    assert ring_long.measure(context, plan).verdict is Verdict.FAILS


def test_a_model_without_windows_has_no_ring(full_context: Context) -> None:
    for run in (ring.run, ring_long.run):
        with pytest.raises(NotApplicable, match="no layer of this model has a window"):
            run(full_context)
    # One layer alone needs no model with windows.
    assert torch.is_inference_mode_enabled() is False
