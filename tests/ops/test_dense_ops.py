"""Portable ops against the reference, and the reference against torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sash.ops import reference, torch_ops
from sash.spec.model import Activation

DTYPES = {"float32": (torch.float32, 2e-6), "bfloat16": (torch.bfloat16, 2e-2)}


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, float]:
    return request.param


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(rows: int, with_bias: bool, kind: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = kind
    x, weight = random(rows, 33, dtype=dtype), random(19, 33, seed=1, dtype=dtype)
    bias = random(19, seed=2, dtype=dtype) if with_bias else None
    wanted = (F.linear(x.double(), weight.double(), None if bias is None else bias.double())).to(dtype)
    close(reference.linear(x, weight, bias), wanted, tolerance)
    close(torch_ops.linear(x, weight, bias), wanted, tolerance)


def test_rms_norm(kind: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = kind
    x, weight = random(5, 3, 17, dtype=dtype) * 30, random(17, seed=1)
    wanted = F.rms_norm(x.double(), (17,), weight.double(), 1e-5).to(dtype)
    close(reference.rms_norm(x, weight, 1e-5), wanted, tolerance)
    close(torch_ops.rms_norm(x, weight, 1e-5), wanted, tolerance)


@pytest.mark.parametrize("ops", [reference, torch_ops])
def test_rms_norm_takes_one_weight_per_head_and_leaves_its_input(ops: object) -> None:
    x, weight = random(4, 3, 8), random(3, 8, seed=1)
    before = x.clone(), weight.clone()
    out = ops.rms_norm(x, weight, 1e-6)
    for head in range(3):
        close(out[:, head], ops.rms_norm(x[:, head], weight[head], 1e-6), 1e-6)
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1])


def test_statistics_are_float32_under_bfloat16() -> None:
    """A long row of equal numbers: a bfloat16 sum of squares stops growing at 256."""
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    for ops in (reference, torch_ops):
        assert torch.equal(ops.rms_norm(x, torch.ones(4096), 1e-6), torch.ones_like(x))


def test_layer_norm(kind: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = kind
    x, weight = random(5, 3, 17, dtype=dtype) + 4, random(17, seed=1)
    wanted = F.layer_norm(x.double(), (17,), weight.double(), None, 1e-5).to(dtype)
    close(reference.layer_norm(x, weight, 1e-5), wanted, 2 * tolerance)
    close(torch_ops.layer_norm(x, weight, 1e-5), wanted, 2 * tolerance)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary", [12, 6])
def test_rope_turns_each_pair_by_its_angle(interleaved: bool, rotary: int, kind: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = kind
    x = random(5, 3, 12, dtype=dtype)
    angles = random(5, rotary // 2, seed=1) * 3
    cos, sin = angles.cos(), angles.sin()
    part = x[..., :rotary].float()
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.view_as_real(turned)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    wanted = torch.cat((turned, x[..., rotary:].float()), dim=-1).to(dtype)
    close(reference.rope(x, cos, sin, interleaved), wanted, tolerance)
    close(torch_ops.rope(x, cos, sin, interleaved), wanted, tolerance)


@pytest.mark.parametrize("ops", [reference, torch_ops])
def test_rope_takes_strided_rows_and_leaves_them(ops: object) -> None:
    wide = random(5, 40)
    x = wide[:, :24].unflatten(-1, (3, 8))
    before = wide.clone()
    angles = random(5, 4, seed=1)
    got = ops.rope(x, angles.cos(), angles.sin(), False)
    close(got, ops.rope(x.contiguous(), angles.cos(), angles.sin(), False), 1e-6)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("activation", Activation)
def test_gated(activation: Activation, kind: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = kind
    x = random(5, 26, dtype=dtype) * 6
    gate, up = x.double().chunk(2, dim=-1)
    wanted = {
        Activation.SILU: F.silu(gate) * up,
        Activation.GELU: F.gelu(gate) * up,
        Activation.GELU_TANH: F.gelu(gate, approximate="tanh") * up,
        Activation.CLAMPED_SWIGLU: gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1),
    }[activation].to(dtype)
    before = x.clone()
    close(reference.gated(x, activation), wanted, tolerance)
    close(torch_ops.gated(x, activation), wanted, tolerance)
    assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [0, 1, 9, 200])
def test_a_packed_weight_gives_the_same_product(rows: int) -> None:
    x, weight = random(rows, 33, dtype=torch.bfloat16), random(19, 33, seed=1, dtype=torch.bfloat16)
    bias = random(19, seed=2, dtype=torch.bfloat16)
    packed = torch_ops.pack(weight)
    for one in (bias, None):
        wanted = torch_ops.linear(x, weight, one)
        if rows:
            close(torch_ops.linear(x, packed, one), wanted, 1e-2)
        assert torch_ops.linear(x, packed, one).shape == wanted.shape


def test_only_bfloat16_is_packed() -> None:
    weight = random(19, 33)
    assert torch_ops.pack(weight) is weight
