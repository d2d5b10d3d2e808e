"""KVPool: rows stand where they were written, and nowhere else. K holds its position, V position + 1000."""

from __future__ import annotations

import math

import pytest
import torch

from sash.kv.storage import KVPool, KVRows, quantise, restored
from sash.ops import native
from sash.spec.footprint import page_bytes
from sash.spec.groups import GroupSpec
from sash.spec.span import Span

GROUP = GroupSpec("window", Span.sliding(4), (0, 2, 3), 2, 6, 10)
PAGE, PAGES = 4, 5


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(GROUP, PAGES, PAGE, torch.float32, "cpu")
    pool.k.fill_(math.nan)
    pool.v.fill_(math.nan)
    return pool


def positioned(positions: list[int], layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n, 2, 6] and V [n, 2, 10]; head 1 holds the negative, each layer adds a tenth."""
    own = torch.tensor(positions, dtype=torch.float32) + layer / 10
    both = torch.stack([own, -own], 1)[..., None]
    return both.expand(-1, -1, 6).clone(), (both + 1000).expand(-1, -1, 10).clone()


def stored(pool: KVPool, layer: int) -> dict[int, int]:
    """Slot to position of every row of a layer that is not NaN, checked in every head and dimension."""
    found = {}
    for slot in range(PAGE * PAGES):
        k, v = pool.k[layer, :, slot], pool.v[layer, :, slot]
        if not bool(k.isnan().all()):
            position = round(float(k[0, 0]) - layer / 10)
            wanted_k, wanted_v = positioned([position], layer)
            assert torch.equal(k, wanted_k[0]) and torch.equal(v, wanted_v[0])
            found[slot] = position
        else:
            assert bool(v.isnan().all())
    return found


def test_rows_stand_in_their_slots(pool: KVPool) -> None:
    k, v = positioned([5, 6, 7, 8])
    pool.write(0, KVRows(k, v), torch.tensor([0, 1, 3]), torch.tensor([13, 2, 7]))
    assert stored(pool, 0) == {13: 5, 2: 6, 7: 8}
    assert stored(pool, 1) == {} and stored(pool, 2) == {}
    k, v = positioned([20, 21, 22], layer=2)
    pool.write(2, KVRows(k, v), slice(1, 3), torch.tensor([0, 1]))
    assert stored(pool, 2) == {0: 21, 1: 22}
    assert stored(pool, 0) == {13: 5, 2: 6, 7: 8}


def test_a_later_row_replaces_the_one_in_its_slot(pool: KVPool) -> None:
    for position in (3, 11):
        pool.write(1, KVRows(*positioned([position], layer=1)), slice(0, 1), torch.tensor([9]))
    assert stored(pool, 1) == {9: 11}


def test_pages_are_copied_whole_in_every_layer(pool: KVPool) -> None:
    for layer in range(3):
        pool.write(layer, KVRows(*positioned([0, 1, 2, 3, 4], layer)), slice(0, 5), torch.tensor([4, 5, 6, 7, 16]))
    pool.copy_pages(((1, 3), (4, 0)))
    for layer in range(3):
        assert stored(pool, layer) == {4: 0, 5: 1, 6: 2, 7: 3, 16: 4, 12: 0, 13: 1, 14: 2, 15: 3, 0: 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_bytes_are_those_of_the_formula(dtype: torch.dtype) -> None:
    pool = KVPool(GROUP, PAGES, PAGE, dtype, "cpu")
    assert pool.num_bytes == PAGES * page_bytes(GROUP, PAGE, str(dtype).removeprefix("torch."))
    assert pool.k.dtype == pool.v.dtype == dtype


def random_rows(count: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[count, 2, dim] of very different sizes."""
    noise = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, count)[:, None, None]
    return (torch.randn(count, 2, dim, generator=noise) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_rows_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    """In every layer and head with their own scale, also after their page was copied."""
    pool = KVPool(GROUP, PAGES, PAGE, torch.int8, "cpu")
    for plane in pool.planes:
        plane.fill_(math.nan if plane.is_floating_point() else -1)
    slots = torch.tensor([4, 5, 6, 7, 16])
    wanted = {}
    for layer in range(3):
        k, v = random_rows(5, 6, dtype, layer), random_rows(5, 10, dtype, layer + 10)
        pool.write(layer, pool.rows(k, v), slice(0, 5), slots)
        wanted[layer] = (k.float(), v.float())
    pool.copy_pages(((1, 3),))
    for layer, (k, v) in wanted.items():
        planes = pool.layers[layer]
        for x, plane, scale in ((k, planes.k, planes.k_scale), (v, planes.v, planes.v_scale)):
            assert scale is not None
            for places in (slots, torch.tensor([12, 13, 14, 15, 16])):
                got = restored(plane[:, places], scale[:, places], torch.float32).transpose(0, 1)
                step = x.abs().amax(-1, keepdim=True) / 127
                assert bool(((got - x).abs() <= step * 0.501).all())
                assert bool((plane[:, places].abs().amax(-1) == 127).all())
            assert int(scale.isnan().sum()) == 2 * (PAGE * PAGES - 9)


def native_quantise() -> list[object]:
    """The kernel's version on every instruction set at hand."""
    module, best = native.load()
    if module is None:
        return []

    def on(isa: str) -> object:
        def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            module.set_isa(isa)
            try:
                return native.quantise(x)
            finally:
                module.set_isa(best)

        return run

    return [on(isa) for isa in native.ISAS[native.ISAS.index(best) :]]


@pytest.mark.parametrize("dim", [1, 6, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_rounds_to_the_same_bits(dtype: torch.dtype, dim: int) -> None:
    """Halves, zeros, strided views and rows that are not finite too."""
    wide = random_rows(40, 3 * dim, dtype, 1)
    x = wide[:, :, dim : 2 * dim]
    x[3] = 0
    x[4, 0, -1], x[5, 1, 0], x[6, 0, 0] = math.nan, math.inf, -math.inf
    x[7] = (torch.arange(dim) % 255 - 127).to(dtype) / 2
    whole, scale = quantise(x)
    assert scale[4:7].isnan().sum() == 3 and bool((whole[3] == 0).all())
    assert bool((whole.abs() <= 127).all())
    for kernel in native_quantise():
        got = kernel(x)  # type: ignore[operator]
        assert torch.equal(got[0], whole)
        torch.testing.assert_close(got[1], scale, rtol=0, atol=0, equal_nan=True)
