"""Grouped GEMM, GEMM by row, SwiGLU middle, ordered sum: fast against reference, and bits that depend on the row."""

from itertools import product

import pytest
import torch

from moe_serve.kernels.activation import silu_mul, silu_mul_reference
from moe_serve.kernels.grouped_gemm import (
    MAX_ROWS,
    ROW_GEMM_UP_TO,
    grouped_gemm,
    grouped_gemm_reference,
    is_k_major,
    row_gemm,
    row_gemm_reference,
)
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.rows import weighted_sum, weighted_sum_reference
from tests.tolerance import relative_error

ROWS = [[0, 0, 0], [1, 0, 7], [4, 4, 4], [16, 0, 0], [0, 3, 40], [1, 1, 1]]
WIDTHS = [(48, 40), (7, 3), (64, 128), (130, 17), (512, 96)]
INVARIANT = [Numerics(row_tile=tile) for tile in (1, 2, 4, 8, 16)]


def weights(groups: int, n: int, k: int, k_major: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(groups, k, n) / k**0.5
    return (drawn if k_major else drawn.transpose(1, 2).contiguous().transpose(1, 2)).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("numerics", [FAST, INVARIANT[2]], ids=["fast", "invariant"])
@pytest.mark.parametrize("k_major", [True, False])
def test_grouped_gemm_matches_reference(rows: list[int], numerics: Numerics, k_major: bool) -> None:
    torch.manual_seed(0)
    for k, n in WIDTHS:
        weight, x, counts = weights(3, n, k, k_major), torch.randn(sum(rows), k), torch.tensor(rows)
        out = grouped_gemm(x, weight, counts, numerics)
        assert out.shape == (sum(rows), n)
        assert relative_error(out, grouped_gemm_reference(x, weight, counts)) < 2e-6


def test_grouped_gemm_in_bfloat16_matches_reference() -> None:
    torch.manual_seed(0)
    for rows, k_major in product(ROWS, (True, False)):
        weight, x = weights(3, 40, 48, k_major, torch.bfloat16), torch.randn(sum(rows), 48).bfloat16()
        out = grouped_gemm(x, weight, torch.tensor(rows))
        assert out.dtype == torch.bfloat16
        assert relative_error(out, grouped_gemm_reference(x, weight, torch.tensor(rows))) < 8e-3


@pytest.mark.parametrize("k, n", WIDTHS)
def test_row_gemm_matches_reference_and_knows_its_weights(k: int, n: int) -> None:
    torch.manual_seed(0)
    weight, groups = weights(3, n, k, k_major=True), torch.tensor([0, 0, 2, 1, 2])
    x = torch.randn(5, k)
    assert is_k_major(weight)
    assert not is_k_major(weights(3, n, k, k_major=False))
    assert relative_error(row_gemm(x, weight, groups), row_gemm_reference(x, weight, groups)) < 2e-6


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("numerics", INVARIANT, ids=lambda numerics: f"tile{numerics.row_tile}")
def test_a_rows_bits_do_not_depend_on_its_neighbours(numerics: Numerics, k_major: bool) -> None:
    torch.manual_seed(0)
    for k, n in WIDTHS:
        weight = weights(2, n, k, k_major)
        x = torch.randn(70, k)
        whole = grouped_gemm(x, weight, torch.tensor([33, 37]), numerics)
        for start, length in ((0, 1), (5, 1), (32, 1), (3, 4), (0, 7), (13, 20)):
            alone = grouped_gemm(x[start : start + length], weight, torch.tensor([length, 0]), numerics)
            assert torch.equal(alone, whole[start : start + length]), (k, n, start, length)
        assert torch.equal(grouped_gemm(x[33:], weight, torch.tensor([0, 37]), numerics), whole[33:])


def test_many_rows_are_cut_without_changing_bits() -> None:
    torch.manual_seed(0)
    weight, x = weights(2, 24, 16, k_major=True), torch.randn(MAX_ROWS + 9, 16)
    groups = torch.tensor([0, 1]).repeat_interleave(torch.tensor([300, MAX_ROWS + 9 - 300]))
    out = row_gemm(x, weight, groups)
    assert torch.equal(out[-9:], row_gemm(x[-9:], weight, groups[-9:]))


def test_the_mutation_blas_without_tiles_changes_bits() -> None:
    """The invariance test can fail: on some shape, uncut BLAS gives a row other bits in another batch."""
    torch.manual_seed(0)
    changed = 0
    for k, n in ((512, 512), (512, 96), (300, 70)):
        weight, x = torch.randn(1, n, k), torch.randn(64, k)
        whole = grouped_gemm(x, weight, torch.tensor([64]), FAST)
        assert ROW_GEMM_UP_TO < 64
        changed += sum(
            not torch.equal(grouped_gemm(x[i : i + 1], weight, torch.tensor([1]), FAST)[0], whole[i]) for i in range(8)
        )
    assert changed > 0


@pytest.mark.parametrize("n", [1, 7, 24, 48, 64, 130])
def test_silu_mul_matches_reference_and_a_rows_bits_stay(n: int) -> None:
    torch.manual_seed(0)
    gate_up = 4 * torch.randn(37, 2 * n)
    out = silu_mul(gate_up)
    assert relative_error(out, silu_mul_reference(gate_up)) < 1e-6
    for start, length in ((0, 1), (36, 1), (5, 3), (7, 16)):
        assert torch.equal(silu_mul(gate_up[start : start + length]), out[start : start + length])
    assert silu_mul(gate_up[:0]).shape == (0, n)


@pytest.mark.parametrize("num_tokens, topk, hidden", [(0, 2, 8), (1, 1, 1), (5, 4, 48), (9, 16, 33), (3, 8, 512)])
@pytest.mark.parametrize("masked", [0.0, 0.4, 1.0])
def test_weighted_sum_is_the_ordered_fused_sum_bit_for_bit(
    num_tokens: int, topk: int, hidden: int, masked: float
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(20, hidden)
    index = torch.randint(0, 20, (num_tokens, topk)).masked_fill(torch.rand(num_tokens, topk) < masked, -1)
    scale = torch.randn(num_tokens, topk).masked_fill(index < 0, float("nan"))
    out = weighted_sum(rows, index, scale)
    assert torch.equal(out, weighted_sum_reference(rows, index, scale))
    if not (index < 0).any():
        assert torch.equal(weighted_sum(rows, index, scale, complete=True), out)
    half = rows.bfloat16()
    assert torch.equal(weighted_sum(half, index, scale), weighted_sum_reference(half, index, scale))
