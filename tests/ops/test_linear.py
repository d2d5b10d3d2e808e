"""Packed linear layers: the layout against the weight, and the kernels against the reference on every processor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sash.ops import base, native, native_linear, packed, torch_ops
from sash.ops.packed import KINDS, PANEL, PackedLinear
from sash.ops.packed4 import GROUP

MODULE, BEST = native.load()
ISAS = native.ISAS[native.ISAS.index(BEST) :] if MODULE is not None else ()
# Rows, inputs, outputs: none, one and many rows; odd numbers; below, at and above a panel; blocks of 1 to 4096.
SIZES = [
    (0, 64, 64),
    (1, 1, 1),
    (1, 640, 1536),
    (2, 7, 3),
    (3, 4096, 70),
    (5, 48, 65),
    (6, 576, 64),
    (7, 24, 128),
    (8, 640, 100),
    (13, 2048, 640),
    (40, 36, 130),
    (70, 33, 200),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on one instruction set of this processor."""
    assert MODULE is not None
    MODULE.set_isa(request.param)
    yield request.param
    MODULE.set_isa(BEST)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tolerance(x: torch.Tensor, weight: PackedLinear, wanted: torch.Tensor) -> torch.Tensor:
    """Per row [N, 1]: rounding of float sums, and one rounded activation on the edge of two numbers."""
    sums = 3e-6 * math.sqrt(weight.inputs) * wanted.abs().amax(-1, keepdim=True)
    if not weight.rounded:
        return sums
    step = packed.rotate(x, weight.block).abs().amax(-1, keepdim=True) / 127
    return sums + step * packed.rotate(weight.dequantised(), weight.block).abs().max()


def assert_close(x: torch.Tensor, weight: PackedLinear, got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if not len(x):
        return
    off = (got - wanted).abs()
    assert bool((off <= tolerance(x, weight, wanted)).all()), off.max()
    # An activation on the edge is rare. int4 sums are of activations plus 128, which is taken off at the end.
    assert off.median() <= (1e-4 if weight.kind == "int4" else 1e-5) * wanted.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernels_agree_with_the_reference(size: tuple[int, int, int], kind: str, bias: bool, isa: str) -> None:
    rows, inputs, outputs = size
    x, weight = 3 * random(rows, inputs, seed=1), random(outputs, inputs, seed=2)
    added = random(outputs, seed=3) if bias else None
    linear = packed.pack(weight, kind)
    assert_close(x, linear, native_linear.linear(x, linear, added), packed.linear(x, linear, added))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_the_rows_beside_them(kind: str, isa: str) -> None:
    x, linear = random(11, 96, seed=4), packed.pack(random(130, 96, seed=5), kind)
    whole = native_linear.linear(x, linear, None)
    for row in range(len(x)):
        assert torch.equal(native_linear.linear(x[row : row + 1], linear, None)[0], whole[row])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_panels(threads: int) -> None:
    if MODULE is None:
        pytest.skip("the C++ kernels are not built")
    x, linear = random(9, 64, seed=6), packed.pack(random(1000, 64, seed=7), "int8")
    wanted = native_linear.linear(x, linear, None)
    torch.set_num_threads(threads)
    assert torch.equal(native_linear.linear(x, linear, None), wanted)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_spoils_its_row_and_no_other(kind: str, bad: float, isa: str) -> None:
    """Anywhere in the row: in a whole vector, and in the rest behind the last one."""
    for inputs, column in ((40, 3), (40, 39), (7, 0), (7, 6), (64, 20)):
        x, linear = random(5, inputs, seed=8), packed.pack(random(70, inputs, seed=9), kind)
        wanted = native_linear.linear(x, linear, None)
        x[2, column] = bad
        for ops in (native_linear, packed):
            got = ops.linear(x, linear, None)
            assert not got[2].isfinite().any()
            if linear.rounded or math.isnan(bad):
                assert bool(got[2].isnan().all())
            for row in (0, 1, 3, 4):
                assert bool((got[row] - wanted[row]).isfinite().all())
        assert torch.equal(native_linear.linear(x, linear, None)[3], wanted[3])


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_give_the_bias(kind: str, isa: str) -> None:
    """And zero weights zero: neither divides by its largest number."""
    weight, bias = random(70, 40, seed=10), random(70, seed=11)
    weight[5] = 0
    linear = packed.pack(weight, kind)
    assert torch.equal(native_linear.linear(torch.zeros(3, 40), linear, bias), bias.expand(3, -1))
    x = random(3, 40, seed=12)
    assert bool((native_linear.linear(x, linear, None)[:, 5] == 0).all())
    assert bool((packed.linear(x, linear, None)[:, 5] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_strides_and_other_dtypes_of_activations(kind: str) -> None:
    if MODULE is None:
        pytest.skip("the C++ kernels are not built")
    wide, linear = random(6, 100, seed=13), packed.pack(random(66, 40, seed=14), kind)
    wanted = native_linear.linear(wide[:, 10:50].contiguous(), linear, None)
    assert torch.equal(native_linear.linear(wide[:, 10:50], linear, None), wanted)
    assert torch.equal(native_linear.linear(wide.T.contiguous().T[:, 10:50], linear, None), wanted)
    half = wide[:, 10:50].bfloat16()
    got = native_linear.linear(half, linear, None)
    assert torch.equal(got, native_linear.linear(half.float(), linear, None).bfloat16())


def test_a_weight_that_is_not_packed_goes_to_torch() -> None:
    x, weight, bias = random(3, 8, seed=15), random(5, 8, seed=16), random(5, seed=17)
    assert torch.equal(native_linear.linear(x, weight, bias), torch_ops.linear(x, weight, bias))
    ids = torch.tensor([4, 0])
    assert torch.equal(native_linear.embedding(ids, weight), base.embedding(ids, weight))
    half = weight.half()
    assert native_linear.pack(half, "none") is half


# ---------------------------------------------------------------- layout


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (65, 48), (128, 5)], ids=str)
def test_floats_come_back_as_they_went_in(shape: tuple[int, int], kind: str) -> None:
    weight = random(*shape, seed=18).to(getattr(torch, kind))
    linear = packed.pack(weight, kind)
    assert torch.equal(linear.rows(), weight) and torch.equal(linear.dequantised(), weight.float())
    assert linear.weight.shape[0] * PANEL >= shape[0] and not linear.weight.isnan().any()
    assert linear.weight.float().sum() == pytest.approx(weight.float().sum().item(), abs=1e-3)


@pytest.mark.parametrize("inputs", [1, 6, 64, 576, 640, 8192])
def test_a_rotation_keeps_products_and_undoes_itself(inputs: int) -> None:
    block = packed.empty(1, inputs, "int8").block
    assert inputs % block == 0 and (block == 4096 or inputs // block % 2 == 1)
    x, y = random(4, inputs, seed=19), random(5, inputs, seed=20)
    turned = packed.rotate(x, block)
    torch.testing.assert_close(packed.rotate(turned, block), x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(turned @ packed.rotate(y, block).T, x @ y.T, rtol=1e-4, atol=1e-3)
    if block > 1:
        spike = torch.eye(inputs)[:1]
        assert packed.rotate(spike, block).abs().max() == pytest.approx(block**-0.5)


@pytest.mark.parametrize("shape", [(3, 7), (65, 48), (640, 640)], ids=str)
def test_int8_is_within_half_a_step_of_the_rotated_weight(shape: tuple[int, int]) -> None:
    weight = random(*shape, seed=21)
    linear = packed.pack(weight, "int8")
    assert linear.scale is not None and linear.offset is not None
    scale = linear.scale[: shape[0], None]
    off = linear.rows() * scale - packed.rotate(weight, linear.block)
    assert bool((off.abs() <= 0.5001 * scale).all())
    assert linear.rows().abs().max() == 127
    assert torch.equal(linear.offset[: shape[0]], 128 * linear.rows().sum(-1, dtype=torch.int32))
    assert bool((linear.scale[shape[0] :] == 0).all())
    assert (linear.dequantised() - weight).norm() < 0.02 * weight.norm()


@pytest.mark.parametrize("shape", [(3, 7), (65, 48), (200, 640)], ids=str)
def test_int4_rounds_to_the_nearest_of_16_in_each_group(shape: tuple[int, int]) -> None:
    weight = random(*shape, seed=24)
    weight[0] = 0.5
    weight[-1, : shape[1] // 2] = 0
    linear = packed.pack(weight, "int4")
    assert linear.weight.shape == (-(-shape[0] // PANEL), -(-shape[1] // GROUP), 5, PANEL, 4)
    turned, rows = packed.rotate(weight, linear.block), linear.rows()
    for a in range(0, shape[1], GROUP):
        one, two = turned[:, a : a + GROUP], rows[:, a : a + GROUP]
        for before, after in zip(one, two, strict=True):
            values = after.unique()
            assert len(values) <= 16
            # No other of the values that a group has is closer.
            closest = (before[:, None] - values).abs().amin(-1)
            torch.testing.assert_close((before - after).abs(), closest, rtol=0, atol=1e-6)
    assert (linear.dequantised() - weight).norm() < 0.1 * weight.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 3), (65, 48), (130, 36), (640, 2048)], ids=str)
def test_packing_int4_in_cpp_rounds_as_torch_does(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    """Of ranges that are nearly as good, either may win by the order of sums: nearly all groups are the same."""
    weight = random(*shape, seed=25).to(dtype)
    weight[1] = 0
    wanted, got = packed.pack(weight, "int4"), native_linear.pack(weight, "int4")
    assert isinstance(got, PackedLinear) and got.block == wanted.block and got.offset is None
    same = (got.rows() - wanted.rows()).abs() < 1e-6
    assert same.float().mean() > 0.99
    exact = packed.rotate(weight.float(), got.block)
    assert (got.rows() - exact).norm() == pytest.approx((wanted.rows() - exact).norm().item(), rel=1e-3)
    assert got.scale is not None and wanted.scale is not None and got.scale[1] == 0
    x = random(4, shape[1], seed=26)
    assert_close(x, got, native_linear.linear(x, got, None), packed.linear(x, got, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 3), (65, 48), (130, 36), (640, 2048)], ids=str)
def test_packing_in_cpp_rounds_as_torch_does(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    weight = random(*shape, seed=22).to(dtype)
    weight[1] = 0
    wanted, got = packed.pack(weight, "int8"), native_linear.pack(weight, "int8")
    assert isinstance(got, PackedLinear) and got.scale is not None and wanted.scale is not None
    assert got.offset is not None and got.block == wanted.block
    torch.testing.assert_close(got.scale, wanted.scale, rtol=1e-5, atol=0)
    # Sums of rotations round by their order: now and then a weight lies on the edge of two numbers.
    off = got.weight.int() - wanted.weight.int()
    assert off.abs().max() <= 1 and off.abs().float().mean() < 1e-3
    assert torch.equal(got.offset[: shape[0]], 128 * got.rows().sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(70, 7), (130, 48), (64, 640)], ids=str)
def test_an_embedding_is_a_row_of_what_was_packed(shape: tuple[int, int], kind: str, isa: str) -> None:
    linear: Any = packed.pack(random(*shape, seed=23), kind)
    ids = torch.tensor([0, shape[0] - 1, 63, 0])
    torch.testing.assert_close(native_linear.embedding(ids, linear), linear.dequantised()[ids], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(base.embedding(ids, linear), linear.dequantised()[ids], rtol=1e-5, atol=1e-5)
