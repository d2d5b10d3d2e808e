"""Which table of ops runs, and what is refused."""

from __future__ import annotations

import pytest
import torch

from sash.ops import native
from sash.ops.packed import PackedLinear
from sash.ops.registry import resolve_ops
from sash.spec.errors import ConfigError


def test_names_lead_to_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SASH_KERNELS", raising=False)
    assert resolve_ops().name == resolve_ops(kernels="auto").name in ("native", "torch")
    assert resolve_ops(kernels="torch").name == "torch"
    assert resolve_ops(deterministic=True).name == "deterministic"
    monkeypatch.setenv("SASH_KERNELS", "reference")
    assert resolve_ops().name == "reference"
    monkeypatch.setenv("SASH_KERNELS", "")
    assert resolve_ops().name in ("native", "torch")


def test_what_cannot_work_is_refused_with_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"SASH_KERNELS='fast' is unknown; use auto, native or torch or reference"):
        resolve_ops(kernels="fast")
    monkeypatch.setenv("SASH_KERNELS", "reference")
    with pytest.raises(ConfigError, match=r"deterministic=True can't run .* use SASH_KERNELS=torch or auto"):
        resolve_ops(deterministic=True)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_what_weights_are_rounded_to(kernels: str) -> None:
    """The head of an int4 model is int8; auto rounds only where the C++ kernels run."""
    if kernels == "native" and native.load()[0] is None:
        pytest.skip("the C++ kernels are not built")
    weight = torch.randn(70, 64)
    kinds = {}
    for quantization in ("none", "int8", "int4", "auto"):
        ops = resolve_ops(kernels=kernels, quantization=quantization)
        packs = (ops.pack(weight), (ops.pack_head or ops.pack)(weight))
        kinds[quantization] = (ops.quantization, *(w.kind if isinstance(w, PackedLinear) else "plain" for w in packs))
    plain = ("none", "float32", "float32") if kernels == "native" else ("none", "plain", "plain")
    assert kinds == {
        "none": plain,
        "int8": ("int8", "int8", "int8"),
        "int4": ("int4", "int4", "int8"),
        "auto": ("int8", "int8", "int8") if kernels == "native" else ("none", "plain", "plain"),
    }


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_refused_where_they_cannot_run(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"{quantization} can't run deterministic: use quantization=none"):
        resolve_ops(deterministic=True, quantization=quantization)
    monkeypatch.setenv("SASH_KERNELS", "reference")
    with pytest.raises(ConfigError, match=rf"{quantization} can't run on SASH_KERNELS=reference: use"):
        resolve_ops(quantization=quantization)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kernels", "quantization"),
    [(k, q) for k in ("native", "torch") for q in ("none", "int8", "int4")]
    + [("reference", "none"), ("deterministic", "none")],
)
def test_a_table_that_says_so_looks_rows_up_in_the_head(kernels: str, quantization: str, dtype: torch.dtype) -> None:
    if kernels == "native" and native.load()[0] is None:
        pytest.skip("the C++ kernels are not built")
    fixed = kernels == "deterministic"
    ops = resolve_ops(kernels=None if fixed else kernels, deterministic=fixed, quantization=quantization)
    assert ops.looks_up is (kernels == "native" or quantization != "none")
    weight = torch.randn(70, 64).to(dtype)
    head = (ops.pack_head or ops.pack)(weight) if ops.looks_up else weight
    ids = torch.tensor([69, 0, 3])
    off = (ops.embedding(ids, head) - weight[ids].float()).abs().max()
    assert off <= (0.0 if quantization == "none" else 0.05)
