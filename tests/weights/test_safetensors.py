"""Weights of safetensors folders: layouts, shards, and everything wrong in one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import FAMILIES, build

from sash.spec.errors import ModelError
from sash.spec.hf import spec_from_hf
from sash.spec.model import ModelSpec, expected_weights
from sash.weights.load import load_weights

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def spec_of(folder: Path) -> ModelSpec:
    return spec_from_hf(json.loads((folder / "config.json").read_text()))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return load_weights(folder, spec_of(folder), dtype, CPU)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Replace a folder's tensors by ``change`` of them."""
    file = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file)


@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_expected_names_and_shapes(name: str, tmp_path: Path) -> None:
    _, folder = build(name, tmp_path)
    weights = load(folder)
    assert {key: tuple(t.shape) for key, t in weights.items()} == expected_weights(spec_of(folder))
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in weights.values())


def test_quantized_weights_are_refused_by_the_field_that_says_so(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelError, match=r"quantization_config says 'mxfp4'.*bf16"):
        load(folder)


def test_progress_ends_at_the_bytes_of_the_file(tmp_path: Path) -> None:
    _, folder = build("gemma3", tmp_path)
    steps: list[tuple[str, int, int]] = []
    load_weights(folder, spec_of(folder), torch.float32, CPU, lambda *step: steps.append(step))
    done = [step[1] for step in steps]
    assert done == sorted(done)
    assert steps[-1][1] == steps[-1][2] == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())


def test_conversion_to_bfloat16_rounds_each_number(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    wanted = load(folder)
    for name, tensor in load(folder, torch.bfloat16).items():
        assert torch.equal(tensor, wanted[name].bfloat16())


def test_shards_give_the_same_weights(tmp_path: Path) -> None:
    model, folder = build("phi3", tmp_path)
    wanted = load(folder)
    shards = tmp_path / "shards"
    model.save_pretrained(shards, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    got = load(shards)
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
    (shards / "model.safetensors.index.json").unlink()
    assert load(shards).keys() == wanted.keys()


def _fused_experts(tensors: Tensors) -> Tensors:
    """Mixtral's experts as one tensor per layer, as transformers holds them in memory."""
    out = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(4):
        old = f"model.layers.{layer}.block_sparse_moe.experts"
        gate, down, up = (torch.stack([tensors[f"{old}.{e}.{w}.weight"] for e in range(4)]) for w in ("w1", "w2", "w3"))
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = down
        out[f"model.layers.{layer}.mlp.gate.weight"] = out.pop(f"model.layers.{layer}.block_sparse_moe.gate.weight")
    return out


def test_mixtral_in_both_layouts(tmp_path: Path) -> None:
    _, folder = build("mixtral", tmp_path)
    names = load_file(folder / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    wanted = load(folder)
    rewrite(folder, _fused_experts)
    got = load(folder)
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


def _renamed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name.removeprefix("model."): t for name, t in tensors.items()}


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_other_prefixes_of_the_same_names(prefix: str, tmp_path: Path) -> None:
    _, folder = build("gemma3", tmp_path)
    wanted = load(folder)
    rewrite(folder, _renamed(prefix))
    assert load(folder).keys() == wanted.keys()


def test_known_extras_are_left_out(tmp_path: Path) -> None:
    _, folder = build("gemma3", tmp_path)
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.ones(101, 64),  # tied: the embedding's copy
        "model.vision_tower.encoder.weight": torch.ones(2),
        "multi_modal_projector.weight": torch.ones(2),
    }
    rewrite(folder, lambda tensors: tensors | extras)
    assert load(folder).keys() == expected_weights(spec_of(folder)).keys()


def test_everything_wrong_is_listed_in_one_error(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)

    def spoil(tensors: Tensors) -> Tensors:
        del tensors["model.layers.1.self_attn.o_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(5, 64)
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.surprise.weight"] = torch.zeros(3)
        return tensors

    rewrite(folder, spoil)
    with pytest.raises(ModelError) as caught:
        load(folder)
    text = str(caught.value)
    assert "missing (1)" in text and "layers.1.o [64, 64]" in text
    assert "wrong shape (1)" in text and "layers.2.up (model.layers.2.mlp.up_proj.weight) is [5, 64]" in text
    assert "unexpected (2)" in text and "model.surprise.weight [3]" in text and "model.layers.9." in text


def test_a_missing_expert_shows_in_the_shape(tmp_path: Path) -> None:
    _, folder = build("mixtral", tmp_path)
    rewrite(folder, lambda t: {n: x for n, x in t.items() if "experts.2.w1" not in n})
    with pytest.raises(ModelError, match=r"layers\.0\.gate .*is \[3, 96, 64\], must be \[4, 96, 64\]"):
        load(folder)


def test_a_tensor_of_too_few_dimensions_is_a_wrong_shape(tmp_path: Path) -> None:
    _, folder = build("gpt-oss", tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    rewrite(folder, lambda t: t | {name: torch.zeros(7)})
    with pytest.raises(ModelError, match="wrong shape"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [-4, 10]},
        {"data_offsets": [100, 0]},
        {"data_offsets": [0.0, 4.5]},
        {"data_offsets": [1, 2, 3]},
        {"shape": ["a"]},
        {"shape": [64.0, 64.0]},
        {"shape": [[1]]},
        {"shape": [2**70]},
        {"shape": None},
        {"dtype": ["F32"]},
        {"data_offsets": [0, 4]},
    ],
    ids=str,
)
def test_a_damaged_header_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    _, folder = build("llama", tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"] |= change
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + length :])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)
    file.write_bytes((20_000).to_bytes(8, "little") + b"[" * 20_000)
    with pytest.raises(ModelError, match=r"model\.safetensors is no .*download it again"):
        load(folder)


def test_a_cut_off_file_lists_its_tensors(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 40_000])
    with pytest.raises(ModelError, match=r"truncated \(\d+\)"):
        load(folder)
    for cut in (0, 5, 100):
        file.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors is no .*download it again"):
            load(folder)


def test_quantised_numbers_are_refused(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda t: t | {name: torch.zeros(96, 64, dtype=torch.int8)})
    with pytest.raises(ModelError, match=rf"{name} in .* is I8; sash reads F64, F32, F16, BF16"):
        load(folder)


def test_pickled_weights_are_refused_with_the_fix(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled weights \(pytorch_model\.bin\).*save_pretrained"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"holds no weights: expected model\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "is broken"),
        ("[]", "is broken"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', r"must name files beside it, got '\.\./secret"),
        ('{"weight_map": {"a": 3, "b": 3}}', "must name files beside it, got 3"),
        ('{"weight_map": {"a": "one.safetensors"}}', r"lacks 1 of 1 shards: one\.safetensors"),
    ],
)
def test_a_broken_index_is_named(index: str, words: str, tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    _, folder = build("llama", tmp_path)
    with pytest.raises(ModelError, match="is not a usable GGUF file"):
        load_weights(folder / "config.json", spec_of(folder), torch.float32, CPU)
