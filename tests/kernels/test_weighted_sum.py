"""The ordered combine in Triton."""

import pytest
import torch

from moe_serve.kernels.rows import weighted_sum_reference
from tests.kernels.conftest import RunCheck
from tests.kernels.data import assert_equal_bits, randn


def check_weighted_sum(device: str, num_tokens: int, topk: int, width: int) -> None:
    from moe_serve.kernels.triton.weighted_sum import weighted_sum_triton

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
