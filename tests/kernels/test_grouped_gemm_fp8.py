"""FP8 experts on the CPU: one matrix at a time in float32, against the whole computed plainly."""

from itertools import product

import pytest
import torch

from moe_serve.kernels.activation import activate_quantize, silu_mul_quantize_reference
from moe_serve.kernels.forms import SILU, BlockScaled, num_scale_rows
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.quantised import (
    dequantize_reference,
    dequantize_weight,
    grouped_gemm_fp8,
    grouped_gemm_fp8_reference,
    quantize,
    quantize_weight,
)
from tests.tolerance import FLOAT32, FP8_WIRE, relative_error

ROWS = [[0, 0, 0], [1, 0, 7], [4, 4, 4], [0, 3, 40], [600, 0, 1]]
WIDTHS = [(48, 40, 1), (130, 34, 2), (256, 272, 2), (200, 300, 1)]  # k, n, parts
INVARIANT = Numerics(row_tile=4)


def k_major(weight: BlockScaled) -> BlockScaled:
    """Returns the same matrices in the memory order in which a CPU store keeps them."""
    moved = weight.q.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
    return BlockScaled(moved.view(torch.float8_e4m3fn), weight.scale, weight.parts)


def draw(groups: int, k: int, n: int, parts: int) -> torch.Tensor:
    torch.manual_seed(0)
    # The parts differ in size, so that a block's scale in the other part would show.
    return torch.randn(groups, n, k) / k**0.5 * torch.arange(1, parts + 1).repeat_interleave(n // parts)[:, None]


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows))
@pytest.mark.parametrize("numerics", [FAST, INVARIANT], ids=["fast", "invariant"])
def test_the_product_is_the_references(rows: list[int], numerics: Numerics) -> None:
    counts = torch.tensor(rows)
    for (k, n, parts), by_channel in product(WIDTHS, (False, True)):
        weight = quantize_weight(draw(3, k, n, parts), parts, by_channel)
        x, scale = quantize(torch.randn(sum(rows), k))
        for matrices, dtype in product((weight, k_major(weight)), (torch.float32, torch.bfloat16)):
            out = grouped_gemm_fp8(x, scale, matrices, counts, dtype, numerics)
            expected = grouped_gemm_fp8_reference(x, scale, weight, counts, dtype)
            assert (out.dtype, out.shape) == (dtype, (sum(rows), n))
            assert relative_error(out, expected) < (FLOAT32 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("k, n, parts", WIDTHS)
def test_in_batch_invariant_a_rows_bits_do_not_depend_on_its_neighbours(k: int, n: int, parts: int) -> None:
    weight = k_major(quantize_weight(draw(2, k, n, parts), parts))
    x = torch.randn(70, k)

    def result(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return grouped_gemm_fp8(*quantize(rows), weight, torch.tensor(counts), torch.float32, INVARIANT)

    whole = result(x, [33, 37])
    for start, length in ((0, 1), (5, 1), (32, 1), (3, 4), (0, 7), (13, 20)):
        assert torch.equal(result(x[start : start + length], [length, 0]), whole[start : start + length])


def test_blocks_restart_in_every_part() -> None:
    """200 gate rows need two block rows, so do 200 up rows; in one stack of 400 there would be four, and one shared."""
    assert (num_scale_rows(400, 2), num_scale_rows(400, 1), num_scale_rows(144, 2)) == (4, 4, 2)
    weight = draw(2, 130, 400, 2)
    whole = quantize_weight(weight, 2)
    halves = [quantize_weight(half) for half in weight.split(200, 1)]
    assert torch.equal(whole.scale, torch.cat([half.scale for half in halves], 1))
    assert torch.equal(dequantize_weight(whole), torch.cat([dequantize_weight(half) for half in halves], 1))
    assert not torch.equal(whole.scale, quantize_weight(weight, 1).scale)


def test_channels_have_their_largest_value_at_448_and_a_row_of_zeros_stays() -> None:
    weight = draw(2, 130, 7, 1)
    weight[1, 3] = 0
    kept = quantize_weight(weight, by_channel=True)
    assert kept.scale.shape == (2, 7)
    largest = kept.q.float().abs().amax(2)
    assert largest[1, 3] == 0
    largest[1, 3] = 448
    assert (largest == 448).all()
    assert (dequantize_weight(kept) - weight).abs().max() <= 16 * kept.scale.max(), "half a step between 256 and 448"


@pytest.mark.parametrize("n", [1, 7, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_middle_is_the_references_and_a_rows_bits_stay(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(37, 2 * n)).to(dtype)
    q, scale = activate_quantize(gate_up, SILU)
    got, expected = (
        dequantize_reference(*pair, torch.float32) for pair in ((q, scale), silu_mul_quantize_reference(gate_up))
    )
    assert relative_error(got, expected) < FP8_WIRE  # a last bit before rounding may become a step of e4m3
    assert (got == expected).float().mean() > 0.97
    for start, length in ((0, 1), (36, 1), (5, 3), (7, 16)):
        part, part_scale = activate_quantize(gate_up[start : start + length], SILU)
        assert torch.equal(part.view(torch.uint8), q[start : start + length].view(torch.uint8))
        assert torch.equal(part_scale, scale[start : start + length])
    assert activate_quantize(gate_up[:0], SILU)[0].shape == (0, n)
