"""The largest result of a head from 6 of its weights' 8 bits: the same as from all results, on each instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sash.ops import native, native_linear, packed

NATIVE, NOTE = native.load()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=NOTE)


def both(module: Any, weight: torch.Tensor, x: torch.Tensor) -> tuple[Any, Any]:
    """Index and value of each row's largest: by search, and of all results."""
    head = native_linear.describe(packed.pack(weight, "int8"))
    found = module.Search(head.native, 2).best(x.data_ptr(), x.stride(0), len(x), 2)
    return found, native_linear.argmax(native_linear.product(x, head))


@pytest.mark.parametrize(("vocabulary", "inputs"), [(1, 16), (70, 7), (100, 36), (129, 48), (1000, 576), (3000, 640)])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 30])
def test_the_largest_is_that_of_all_results(kernels: Any, vocabulary: int, inputs: int, rows: int) -> None:
    noise = torch.Generator().manual_seed(vocabulary + rows)
    # Lengths differ, so that bounds do; some rows are near one output, as a hidden state is.
    weight = torch.randn(vocabulary, inputs, generator=noise) * torch.rand(vocabulary, 1, generator=noise)
    x = torch.randn(rows, inputs, generator=noise)
    x[0] += 3 * weight[vocabulary // 2]
    found, wanted = both(kernels, weight, x)
    assert found == wanted


def test_of_equals_the_first_wins_and_all_below_zero_is_no_reason_to_take_padding(kernels: Any) -> None:
    weight = -torch.ones(70, 32)
    weight[[11, 60]] = -0.5
    found, wanted = both(kernels, weight, torch.ones(1, 32))
    assert found == wanted and found[0] == [11] and found[1][0] < 0


def test_rows_of_nothing_and_rows_that_are_not_finite(kernels: Any) -> None:
    x = torch.zeros(3, 32)
    x[1, 5], x[2, 0] = float("nan"), float("inf")
    (indices, values), _ = both(kernels, torch.randn(70, 32), x)
    assert indices[0] == 0 and values[0] == 0.0
    assert values[1] != values[1] and values[2] != values[2]


def test_the_weights_that_were_rounded_to_their_end(kernels: Any) -> None:
    # -127 has no multiple of 4 below it that a byte and its opposite both hold.
    weight = torch.full((64, 16), -1.0)
    weight[3, 0] = -0.98
    x = torch.tensor([[-1.0] + [0.01] * 15, [1.0] + [-0.01] * 15])
    found, wanted = both(kernels, weight, x)
    assert found == wanted


@pytest.mark.parametrize("inputs", [2304, 4096])
def test_sums_beyond_what_float32_counts_are_still_told_apart(kernels: Any, inputs: int) -> None:
    # The rotation of a unit vector is flat: all whole numbers are ±127 and sums pass 2^24.
    noise = torch.Generator().manual_seed(inputs)
    near = packed.rotate(torch.sign(torch.randn(1, inputs, generator=noise)), packed.empty(1, inputs, "int8").block)
    weight = near + 2e-3 * torch.randn(200, inputs, generator=noise)
    found, wanted = both(kernels, weight, near.clone())
    assert found == wanted


def test_a_weight_that_is_no_number_spoils_its_row_and_the_search(kernels: Any) -> None:
    weight = torch.randn(70, 32)
    weight[40, 3] = float("nan")
    head = packed.pack(weight, "int8")
    mine = native_linear.pack(weight, "int8")
    assert isinstance(mine, packed.PackedLinear) and mine.scale is not None and head.scale is not None
    for packed_head in (head, mine):
        assert packed_head.scale is not None
        assert packed_head.scale.isnan().nonzero().flatten().tolist() == [40]
    found, wanted = both(kernels, weight, torch.ones(1, 32))
    assert found[1][0] != found[1][0] and wanted[1][0] != wanted[1][0]
