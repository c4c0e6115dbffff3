"""Rows out to experts and home again, in Triton."""

import pytest
import torch

from moe_serve.kernels.permute import permute_reference
from moe_serve.kernels.weighted_sum import weighted_sum_reference
from tests.kernels.conftest import RunCheck
from tests.kernels.data import assert_equal_bits, randn


def check_permute(device: str, num_tokens: int, topk: int, width: int, order: list[int]) -> None:
    from moe_serve.kernels.permute_triton import permute_triton

    x, entries = randn(device, num_tokens, width), torch.tensor(order, dtype=torch.int64)
    assert_equal_bits(permute_triton(x, entries.to(device), topk), permute_reference(x.cpu(), entries, topk))


@pytest.mark.parametrize("order", [[], [5], [3, -1, 0, 5, 5]], ids=str)
def test_permute_copies_the_row_of_each_entry(on_device: RunCheck, order: list[int]) -> None:
    on_device(check_permute, 3, 2, 1030, order)


def check_weighted_sum(device: str, num_tokens: int, topk: int, width: int) -> None:
    from moe_serve.kernels.permute_triton import weighted_sum_triton

    rows = randn(device, 7, width)
    index = torch.randint(-1, 7, (num_tokens, topk), generator=torch.Generator().manual_seed(0))
    weights = randn("cpu", num_tokens, topk, dtype=torch.float32)
    weights[index < 0] = torch.nan
    got = weighted_sum_triton(rows, index.to(device), weights.to(device))
    assert_equal_bits(got, weighted_sum_reference(rows.cpu(), index, weights))


@pytest.mark.parametrize("num_tokens, topk, width", [(0, 2, 64), (1, 1, 16), (5, 3, 1100), (2, 16, 40)])
def test_weighted_sum_gives_the_bits_of_the_reference(
    on_device: RunCheck, num_tokens: int, topk: int, width: int
) -> None:
    on_device(check_weighted_sum, num_tokens, topk, width)
