"""Grouped GEMM in Triton: packed rows and masked slabs, bf16 and FP8 with block scales."""

import pytest
import torch

from tests.kernels.conftest import RunCheck
from tests.kernels.data import randn, relative_error

ROWS = [[0, 0, 0], [1, 0, 7], [4, 4, 4], [16, 0, 0], [5, 33, 17]]
BF16_LIMIT = 4e-3  # one rounding of the result to bf16


def expected_rows(x: torch.Tensor, weight: torch.Tensor, rows: list[int]) -> torch.Tensor:
    pieces = zip(x.float().cpu().split(rows), weight.float().cpu(), strict=True)
    return torch.cat([piece @ w.T for piece, w in pieces])


def check_packed(device: str, rows: list[int], n: int, k: int, small: bool) -> None:
    from moe_serve.kernels.gemm_tiles import GemmTile
    from moe_serve.kernels.grouped_gemm_triton import grouped_gemm_triton

    x, weight = randn(device, sum(rows), k), randn(device, len(rows), n, k, seed=1)
    tile = GemmTile(16, 16, 16, num_warps=4, num_stages=2, group_m=2) if small else None
    y = grouped_gemm_triton(x, weight, torch.tensor(rows), tile=tile)
    assert y.dtype == x.dtype
    assert relative_error(y, expected_rows(x, weight, rows)) < BF16_LIMIT


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_packed_rows_meet_their_own_expert(on_device: RunCheck, rows: list[int]) -> None:
    on_device(check_packed, rows, 40, 24, True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[0, 1, 300, 4096], [20] * 32, [3, 0, 3]], ids=str)
def test_packed_rows_of_production_width(rows: list[int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_packed("cuda", rows, 4096, 7168, False)
    check_packed("cuda", rows, 100, 130, False)  # no multiple of any tile, rows not 16-byte aligned


def check_slab(device: str, counts: list[int], capacity: int, n: int, k: int) -> None:
    from moe_serve.kernels.gemm_tiles import GemmTile
    from moe_serve.kernels.grouped_gemm_triton import slab_gemm_triton

    slots = len(counts)
    x, weight = randn(device, slots, capacity, k), randn(device, slots, n, k, seed=1)
    for slot, count in enumerate(counts):
        x[slot, count:] = torch.nan  # never read
    y = slab_gemm_triton(x, weight, torch.tensor(counts, device=device), tile=GemmTile(16, 16, 16, 4, 2))
    for slot, count in enumerate(counts):
        expected = x[slot, :count].float().cpu() @ weight[slot].float().cpu().T
        assert relative_error(y[slot, :count], expected) < BF16_LIMIT


@pytest.mark.parametrize("counts", [[0, 0], [1, 8], [8, 0], [5, 3]], ids=str)
def test_slabs_use_their_first_rows_only(on_device: RunCheck, counts: list[int]) -> None:
    on_device(check_slab, counts, 8, 24, 40)
