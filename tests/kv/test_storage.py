"""KVPool: rows stand where they were written, and nowhere else. K holds its position, V position + 1000."""

from __future__ import annotations

import math

import pytest
import torch

from sash.kv.storage import KVPool
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
    pool.write(0, k, v, torch.tensor([0, 1, 3]), torch.tensor([13, 2, 7]))
    assert stored(pool, 0) == {13: 5, 2: 6, 7: 8}
    assert stored(pool, 1) == {} and stored(pool, 2) == {}
    k, v = positioned([20, 21, 22], layer=2)
    pool.write(2, k, v, slice(1, 3), torch.tensor([0, 1]))
    assert stored(pool, 2) == {0: 21, 1: 22}
    assert stored(pool, 0) == {13: 5, 2: 6, 7: 8}


def test_a_later_row_replaces_the_one_in_its_slot(pool: KVPool) -> None:
    for position in (3, 11):
        pool.write(1, *positioned([position], layer=1), slice(0, 1), torch.tensor([9]))
    assert stored(pool, 1) == {9: 11}


def test_pages_are_copied_whole_in_every_layer(pool: KVPool) -> None:
    for layer in range(3):
        pool.write(layer, *positioned([0, 1, 2, 3, 4], layer), slice(0, 5), torch.tensor([4, 5, 6, 7, 16]))
    pool.copy_pages(((1, 3), (4, 0)))
    for layer in range(3):
        assert stored(pool, layer) == {4: 0, 5: 1, 6: 2, 7: 3, 16: 4, 12: 0, 13: 1, 14: 2, 15: 3, 0: 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_of_the_formula(dtype: torch.dtype) -> None:
    pool = KVPool(GROUP, PAGES, PAGE, dtype, "cpu")
    assert pool.num_bytes == PAGES * page_bytes(GROUP, PAGE, dtype.itemsize)
    assert pool.k.dtype == pool.v.dtype == dtype
