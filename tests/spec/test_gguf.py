"""The header reader against gguf's own, field by field, and against files with every kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from tests.gguf_files import write_gguf
from tests.real_models import real_model

from sash.spec.errors import ModelError
from sash.spec.ggml import BLOCKS, GgmlType
from sash.spec.gguf import GgufHeader, open_gguf

QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]


def everything(path: Path) -> Path:
    """One key of each value type and one tensor of each type gguf can write."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for kind, value in {
        GGUFValueType.UINT8: 255, GGUFValueType.INT8: -128, GGUFValueType.UINT16: 65535, GGUFValueType.INT16: -32768,
        GGUFValueType.UINT32: 2**32 - 1, GGUFValueType.INT32: -(2**31), GGUFValueType.FLOAT32: 0.1,
        GGUFValueType.UINT64: 2**64 - 1, GGUFValueType.INT64: -(2**63), GGUFValueType.FLOAT64: 0.1,
        GGUFValueType.BOOL: True, GGUFValueType.STRING: "naïve 滑动 \0",
    }.items():  # fmt: skip
        writer.add_key_value(f"one.{kind.name}", value, kind)
        if kind is not GGUFValueType.STRING:
            writer.add_key_value(f"many.{kind.name}", [value, 0, 1], GGUFValueType.ARRAY, sub_type=kind)
    writer.add_array("many.STRING", ["a", "", "滑动", "a"])
    rng = np.random.default_rng(0)
    for i, name in enumerate(QUANTS):
        kind, values = GGMLQuantizationType[name], rng.standard_normal((3, 64 + 32 * i)).astype(np.float32)
        writer.add_tensor(f"t.{name}", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("t.F32", rng.standard_normal((2, 3, 5)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equals_gguf(header: GgufHeader, reader: gguf.GGUFReader) -> None:
    theirs: dict[str, Any] = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert list(header) == list(theirs)
    for key, field in theirs.items():
        ours, want = header[key], field.contents()
        assert ours == want or np.array_equal(np.float32(ours), np.float32(want)), key
    assert len(header.tensors) == len(reader.tensors)
    for want in reader.tensors:
        ours = header.tensors[want.name]
        assert ours.shape == tuple(int(n) for n in want.shape[::-1]), want.name
        assert (ours.type.name, ours.offset) == (want.tensor_type.name, want.data_offset)
        assert ours.nbytes == want.n_bytes
        assert bytes(header.tensor_bytes(want.name)) == want.data.tobytes()


def test_every_value_and_tensor_type_equals_gguf(tmp_path: Path) -> None:
    path = everything(tmp_path / "all.gguf")
    header = open_gguf(path)
    assert header.truncated == ()
    assert_equals_gguf(header, gguf.GGUFReader(path))


def test_block_sizes_equal_gguf() -> None:
    for kind in GgmlType:
        assert BLOCKS[kind] == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]]
        assert kind.value == GGMLQuantizationType[kind.name].value


@pytest.mark.real
def test_smollm2_equals_gguf() -> None:
    path = real_model("smollm2-135m")
    assert_equals_gguf(open_gguf(path), gguf.GGUFReader(path))


@pytest.mark.real
@pytest.mark.slow  # its vocabulary takes gguf's reader ten seconds
def test_gemma_equals_gguf() -> None:
    path = real_model("gemma3-270m")
    header, reader = open_gguf(path), gguf.GGUFReader(path)
    tokens = reader.fields.pop("tokenizer.ggml.tokens")
    assert [t.encode() for t in header["tokenizer.ggml.tokens"]] == [bytes(tokens.parts[i]) for i in tokens.data]
    header._values.pop("tokenizer.ggml.tokens")
    assert_equals_gguf(header, reader)


@pytest.mark.real
def test_gemma_token_is_found_without_decoding_the_vocabulary() -> None:
    header = open_gguf(real_model("gemma3-270m"))
    assert header.find("tokenizer.ggml.tokens", "<end_of_turn>") == 106
    assert header.raw("tokenizer.ggml.tokens") is not None  # not decoded yet


def test_arrays_are_decoded_only_when_asked_for(tmp_path: Path) -> None:
    header = open_gguf(everything(tmp_path / "all.gguf"))
    raw = header.raw("many.STRING")
    assert raw is not None and bytes(raw).startswith(struct.pack("<Q", 1) + b"a")
    assert header["many.STRING"] == ["a", "", "滑动", "a"]
    assert header.raw("many.STRING") is None
    assert header.raw("one.UINT8") is None


@pytest.mark.parametrize("decoded", [False, True])
def test_find_gives_the_index_of_a_whole_entry(tmp_path: Path, decoded: bool) -> None:
    # The bytes of "b" with its length before it also lie inside another entry.
    words = ["x", "z" + struct.pack("<Q", 1).decode() + "b", "", "b", "b"]
    header = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", {"general.words": words}))
    if decoded:
        assert header["general.words"] == words
    assert header.find("general.words", "b") == 3
    assert header.find("general.words", "") == 2
    assert header.find("general.words", "c") is None
    assert header.find("general.nothing", "b") is None


def test_every_truncated_tensor_is_named_in_one_error(tmp_path: Path) -> None:
    path = everything(tmp_path / "all.gguf")
    whole = open_gguf(path)
    cut = whole.tensors["t.Q5_1"].offset + 5
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    later = [n for n, t in whole.tensors.items() if t.offset + t.nbytes > cut]
    assert later[:2] == ["t.Q5_1", "t.Q8_0"]
    assert f"{len(later)} of 8 tensors need more: {', '.join(later)}" in str(caught.value)
    partial = open_gguf(path, partial=True)
    assert partial.truncated == tuple(later)
    assert bytes(partial.tensor_bytes("t.Q4_0")) == bytes(whole.tensor_bytes("t.Q4_0"))
    with pytest.raises(ModelError, match=r"t\.Q5_1 lies beyond the end"):
        partial.tensor_bytes("t.Q5_1")


def test_a_header_cut_anywhere_is_a_model_error(tmp_path: Path) -> None:
    path = everything(tmp_path / "all.gguf")
    data = path.read_bytes()
    end = min(t.offset for t in open_gguf(path).tensors.values())
    for size in range(0, end - 32, 7):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"all\.gguf"):
            open_gguf(path, partial=True)


def test_random_damage_never_raises_anything_but_a_model_error(tmp_path: Path) -> None:
    path = everything(tmp_path / "all.gguf")
    data = path.read_bytes()
    end = min(t.offset for t in open_gguf(path).tensors.values())
    rng = np.random.default_rng(7)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for at in rng.integers(0, end, 3):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            header = open_gguf(path)
            for key in header:
                header[key]
        except ModelError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "can't be read as a GGUF file"),
        (b"PK\x03\x04zip", "starts with b'PK"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "it ends at byte 32"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "unknown array type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 10, 2**62), "it ends at byte"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1), "it ends at"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<II", 4, 1), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 5), "it has 5 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 8, 77, 0), "tensor type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 33, 8, 0), "rows of 33"),
    ],
)  # fmt: skip
def test_garbage_is_refused_with_the_reason(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert why in str(caught.value)
    assert str(path) in str(caught.value)


def test_duplicate_keys_and_a_bad_alignment_are_refused(tmp_path: Path) -> None:
    pair = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 1)
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair)
    with pytest.raises(ModelError, match="the key occurs twice"):
        open_gguf(path)
    key = b"general.alignment"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<II", 4, 24))
    with pytest.raises(ModelError, match=r"general\.alignment is 24, must be a power of two"):
        open_gguf(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf can't be read as a GGUF file"):
        open_gguf(tmp_path / "nothing.gguf")
