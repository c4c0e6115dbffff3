"""For CUDA tensors the plain functions call their Triton twins, which give the results of the reference."""

import pytest
import torch

from moe_serve.kernels.activation import silu_mul, silu_mul_reference
from moe_serve.kernels.rows import weighted_sum, weighted_sum_reference
from tests.kernels.data import assert_equal_bits, randn, relative_error
from tests.tolerance import BFLOAT16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("shape", [(0, 128), (5, 400), (2, 3, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_silu_mul_branches_to_its_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = randn("cuda", *shape, dtype=dtype) * 3
    out = silu_mul(gate_up)
    assert (out.is_cuda, out.dtype, out.shape) == (True, dtype, (*shape[:-1], shape[-1] // 2))
    assert relative_error(out, silu_mul_reference(gate_up.cpu())) < BFLOAT16
    assert_equal_bits(silu_mul(gate_up[..., 1:].narrow(-1, 0, 2)), silu_mul(gate_up[..., 1:3].contiguous()))


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("num_tokens, topk, num_rows", [(0, 4, 3), (6, 8, 40), (3, 2, 0)])
def test_weighted_sum_branches_to_its_twin_bit_for_bit(
    num_tokens: int, topk: int, num_rows: int, complete: bool
) -> None:
    rows = randn("cpu", num_rows, 200)
    draw = torch.Generator().manual_seed(4)
    lowest = 0 if complete and num_rows else -1
    index = torch.randint(lowest, max(num_rows, lowest + 1), (num_tokens, topk), generator=draw)
    weights = torch.rand(num_tokens, topk, generator=draw).masked_fill(index < 0, float("nan"))
    out = weighted_sum(rows.cuda(), index.cuda(), weights.cuda(), complete and num_rows > 0)
    assert_equal_bits(out, weighted_sum_reference(rows, index, weights))
