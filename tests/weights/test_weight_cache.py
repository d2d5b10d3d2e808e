"""Converted weights on disk: bit for bit what was converted, and nothing that doesn't fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.families import build, tokens
from tests.scored import prompt_scores

from sash.engine import build as building
from sash.ops import packed
from sash.ops.base import Weight
from sash.ops.packed import PackedLinear
from sash.spec.config import EngineConfig
from sash.weights import cache
from sash.weights.cache import WeightCache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SASH_WEIGHT_CACHE", raising=False)
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def weights() -> dict[str, Weight]:
    """Every kind of weight, one under two names, one empty, sizes that no alignment divides."""
    random = torch.Generator().manual_seed(0)
    plain = torch.randn(70, 30, generator=random)
    out: dict[str, Weight] = {kind: packed.pack(plain, kind) for kind in packed.KINDS}
    return out | {
        "tied": out["int8"],
        "bf16": plain.bfloat16(),
        "strided": plain.T,
        "vector": plain[0, :7].clone(),
        "none": torch.empty(0, 3),
    }


def same(got: dict[str, Weight] | None, wanted: dict[str, Weight]) -> bool:
    assert got is not None and list(got) == list(wanted)
    for name, weight in wanted.items():
        other = got[name]
        if isinstance(weight, torch.Tensor):
            assert isinstance(other, torch.Tensor) and torch.equal(other, weight) and other.dtype is weight.dtype
            continue
        assert isinstance(other, PackedLinear) and torch.equal(other.weight, weight.weight)
        assert (other.kind, other.outputs, other.inputs, other.block) == (
            *(weight.kind, weight.outputs, weight.inputs),
            weight.block,
        )
        for one, two in ((other.scale, weight.scale), (other.offset, weight.offset)):
            assert (one is None and two is None) or (one is not None and two is not None and torch.equal(one, two))
        assert other.weight.data_ptr() % 64 == 0
    return got["tied"] is got["int8"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back_bit_for_bit(source: Path, folder: Path) -> None:
    store = WeightCache(source, "int8-float32", "1")
    assert store.load() is None
    wanted = weights()
    store.save(wanted)
    told: list[tuple[str, int, int]] = []
    assert same(WeightCache(source, "int8-float32", "1").load(lambda *now: told.append(now)), wanted)
    assert told and told[-1][0] == "weights" and told[-1][1] == told[-1][2] > 0
    assert len(names(folder)) == 1


def test_large_files_are_read_in_blocks(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 256)
    store, wanted = WeightCache(source, "int8-float32", "1"), weights()
    store.save(wanted)
    assert same(store.load(), wanted)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda d: b"",
    "magic": lambda d: b"X" + d[1:],
    "first bytes": lambda d: d[:20],
    "header cut": lambda d: d[:300],
    "header": lambda d: d[:100] + bytes((d[100] ^ 1,)) + d[101:],
    "last byte gone": lambda d: d[:-1],
    "a byte more": lambda d: d + b"x",
    "a bit": lambda d: d[:-5000] + bytes((d[-5000] ^ 16,)) + d[-4999:],
    "zeros": lambda d: d[:-9000] + bytes(9000),
    "lines in another order": lambda d: d[:-9024] + d[-8960:-8896] + d[-9024:-8960] + d[-8896:],
    "garbage": lambda d: os.urandom(len(d)),
    "length": lambda d: d[:47] + b"\xff" * 8 + d[55:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_ignored_and_written_again(
    damage: Callable[[bytes], bytes], source: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, wanted = WeightCache(source, "int8-float32", "1"), weights()
    store.save(wanted)
    path = folder / names(folder)[0]
    path.write_bytes(damage(path.read_bytes()))
    assert store.load() is None
    logged = capsys.readouterr().err
    assert path.name in logged and len(logged.splitlines()) == 1
    store.save(wanted)
    assert same(store.load(), wanted)


def test_a_folder_in_the_files_place_is_ignored(source: Path, folder: Path) -> None:
    store = WeightCache(source, "int8-float32", "1")
    store.save(weights())
    path = folder / names(folder)[0]
    path.unlink()
    path.mkdir()
    assert store.load() is None
    store.save(weights())
    assert store.load() is None


def test_another_version_or_source_is_another_entry_and_replaces_the_old(source: Path, folder: Path) -> None:
    wanted = weights()
    WeightCache(source, "int8-float32", "1").save(wanted)
    for other in (WeightCache(source, "int8-float32", "2"), WeightCache(source, "int4-float32", "1")):
        assert other.load() is None
    WeightCache(source, "int4-float32", "1").save(wanted)
    assert len(names(folder)) == 2
    source.write_bytes(b"changed")
    changed = WeightCache(source, "int8-float32", "1")
    assert changed.load() is None
    changed.save(wanted)
    assert len(names(folder)) == 2 and same(changed.load(), wanted)
    os.utime(source, ns=(1, 1))
    older = WeightCache(source, "int8-float32", "1")
    assert older.load() is None
    older.save(wanted)
    source.write_bytes(b"Changed")
    os.utime(source, ns=(1, 1))
    assert WeightCache(source, "int8-float32", "1").load() is None, "a file of the same size that brings its time along"


def test_a_folder_of_safetensors_is_known_by_all_its_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for shard in ("a.safetensors", "b.safetensors"):
        (model / shard).write_bytes(b"weights")
    WeightCache(model, "int8-float32", "1").save(weights())
    assert WeightCache(model, "int8-float32", "1").load() is not None
    (model / "b.safetensors").write_bytes(b"other weights")
    assert WeightCache(model, "int8-float32", "1").load() is None


def test_a_header_of_another_model_under_this_name_is_refused(source: Path, folder: Path) -> None:
    store = WeightCache(source, "int8-float32", "1")
    store.save(weights())
    other = WeightCache(source, "int8-float32", "2")
    (folder / names(folder)[0]).rename(folder / other._name)
    assert other.load() is None


def test_small_models_are_not_kept(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 1 << 20)
    WeightCache(source, "int8-float32", "1").save(weights())
    assert not folder.exists() or names(folder) == []


def test_a_full_disk_costs_a_line(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    WeightCache(source, "int8-float32", "1").save(weights())
    assert "No space left on device" in capsys.readouterr().err
    assert names(folder) == []


def test_a_folder_that_cannot_be_written_costs_a_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SASH_CACHE_DIR", str(tmp_path / "file" / "below"))
    store = WeightCache(source, "int8-float32", "1")
    assert store.load() is None
    store.save(weights())
    assert "SASH_CACHE_DIR" in capsys.readouterr().err


def test_processes_at_the_same_time_leave_a_whole_file(source: Path, folder: Path) -> None:
    code = (
        "import torch; from pathlib import Path; from sash.weights import cache; cache.MIN_BYTES = 0; "
        f"store = cache.WeightCache(Path({str(source)!r}), 'int8-float32', '1')\n"
        "for _ in range(20):\n"
        "    store.save({'x': torch.arange(500_000)})\n"
        "    assert torch.equal(store.load()['x'], torch.arange(500_000))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[1] for process in processes] == [b"", b""]
    assert len(names(folder)) == 1


# ---------------------------------------------------------------- behind an engine


def scores(model: Path, **options: str) -> list[float]:
    given = {"dtype": "float32", "quantization": "int8"} | options
    built = building.build_core(model, EngineConfig(**given, max_model_len=48, kv_cache_memory_bytes=10**7))  # type: ignore[arg-type]
    return prompt_scores(built, tokens(3, 20).tolist()).tolist()


@pytest.fixture(params=["gemma3", "llama", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Tied, untied, with biases, with experts."""
    return build(request.param, tmp_path)[1]


def never(*_: object) -> None:
    raise AssertionError("the weights were read again")


def test_a_second_start_does_not_read_the_model(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = scores(model)
    assert len(names(folder)) == 1
    monkeypatch.setattr(building, "load_weights", never)
    assert scores(model) == first
    monkeypatch.setenv("SASH_WEIGHT_CACHE", "0")
    with pytest.raises(AssertionError, match="read again"):
        scores(model)


@pytest.mark.parametrize("option", [{"quantization": "none"}, {"dtype": "bfloat16"}], ids=str)
def test_another_form_is_not_taken_for_it(
    option: dict[str, str], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = build("gemma3", tmp_path)
    scores(model)
    monkeypatch.setattr(building, "load_weights", never)
    with pytest.raises(AssertionError, match="read again"):
        scores(model, **option)


def test_a_changed_description_of_the_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = build("gemma3", tmp_path)
    scores(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": 6}))
    monkeypatch.setattr(building, "load_weights", never)
    with pytest.raises(AssertionError, match="read again"):
        scores(model)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
