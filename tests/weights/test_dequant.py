"""Every decoder against gguf's, bit for bit, on random bytes (all bit patterns, infinities and NaN included)."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from sash.spec.errors import ModelError
from sash.spec.ggml import BLOCKS, GgmlType
from sash.weights import dequant

TYPES = [GgmlType[name] for name in dequant.supported_types()]


def random_bytes(kind: GgmlType, blocks: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (blocks, BLOCKS[kind][1]), dtype=np.uint8)
    return raw.tobytes()


def oracle(data: bytes, kind: GgmlType) -> np.ndarray:
    with np.errstate(all="ignore"):
        raw = np.frombuffer(data, np.uint8)
        if kind is GgmlType.F32:
            return raw.view(np.float32)
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.value)).astype(np.float32).ravel()


@pytest.mark.parametrize("kind", TYPES, ids=lambda k: k.name)
@pytest.mark.parametrize("blocks", [1, 7, 300])
def test_equals_gguf_bit_for_bit(kind: GgmlType, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequant, "CHUNK_ELEMENTS", 64 * BLOCKS[kind][0])
    data = random_bytes(kind, blocks, seed=blocks)
    out = torch.full((blocks * BLOCKS[kind][0],), torch.nan)
    dequant.dequantize(memoryview(data), kind, out)
    np.testing.assert_array_equal(out.numpy(), oracle(data, kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda k: k.name)
def test_bfloat16_is_the_float32_answer_rounded_once(kind: GgmlType) -> None:
    data = random_bytes(kind, 40, seed=3)
    exact, rounded = (torch.empty(40, BLOCKS[kind][0], dtype=t) for t in (torch.float32, torch.bfloat16))
    dequant.dequantize(memoryview(data), kind, exact)
    dequant.dequantize(memoryview(data), kind, rounded)
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_type_without_decoder_is_named() -> None:
    with pytest.raises(ModelError, match=r"IQ2_XXS can't be decoded; use a file with F32, .*Q6_K"):
        dequant.dequantize(memoryview(bytes(66)), GgmlType.IQ2_XXS, torch.empty(256))


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(ModelError, match="34 bytes of Q8_0 don't hold 64 elements"):
        dequant.dequantize(memoryview(bytes(34)), GgmlType.Q8_0, torch.empty(64))
