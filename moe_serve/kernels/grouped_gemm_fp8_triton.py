# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of grouped_gemm_fp8.py, packed rows and masked slabs.

One step of the loop is one block of scales: 128 values of k. The matrix unit adds those 128 products in its own
precision; the scaled blocks are added in float32 by the ordinary units, which also cures the short accumulators that
Hopper's e4m3 instructions have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_serve.kernels.gemm_tiles import GemmTile, fp8_tile
from moe_serve.kernels.grouped_gemm_triton import has_tensor_memory_accelerator, on_device
from moe_serve.kernels.grouped_tiles_triton import count_tiles, locate_tile
from moe_serve.kernels.mode_triton import as_dtype, dot, num_multiprocessors
from moe_serve.kernels.quantize import GROUP


def grouped_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, rows_per_group: Tensor,
    tile: GemmTile | None = None, described: bool | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as grouped_gemm_fp8_reference; rows_per_group on the host or on the device."""
    y = torch.empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16, device=x.device)
    if y.numel():
        tile = tile or fp8_tile(x.shape[0] // weight.shape[0])
        _launch(x, x_scale, weight, weight_scale, on_device(rows_per_group, x.device), y, 0, tile, described)
    return y


def slab_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, rows_per_slot: Tensor, expected_rows: int = 16,
    tile: GemmTile | None = None, described: bool | None = None,
) -> Tensor:  # fmt: skip
    """x: [slots, capacity, k] float8_e4m3fn, x_scale: [slots, capacity, ceil(k / 128)] float32, weight as packed,
    rows_per_slot: [slots] int64 -> [slots, capacity, n] bfloat16. Rows beyond the count are neither read nor written.
    """
    slots, capacity, k = x.shape
    y = torch.empty(slots, capacity, weight.shape[1], dtype=torch.bfloat16, device=x.device)
    if y.numel():
        tile = tile or fp8_tile(expected_rows)
        counts = on_device(rows_per_slot, x.device)
        rows, scales, out = x.view(-1, k), x_scale.view(slots * capacity, -1), y.view(slots * capacity, -1)
        _launch(rows, scales, weight, weight_scale, counts, out, capacity, tile, described)
    return y


def _launch(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, rows_per_group: Tensor, y: Tensor,
    capacity: int, tile: GemmTile, described: bool | None,
) -> None:  # fmt: skip
    num_groups, n, k = weight.shape
    assert (tile.block_k, GROUP % tile.block_n) == (GROUP, 0), "a tile's step must lie in one block of scales"
    if described is None:
        described = has_tensor_memory_accelerator(x, weight)
    rows_in = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]) if described else x
    weight_in = TensorDescriptor.from_tensor(weight.view(-1, k), [tile.block_n, tile.block_k]) if described else weight
    grid = (num_multiprocessors(x.device) * tile.programs_per_sm,)
    grouped_gemm_fp8_kernel[grid](
        rows_in, x_scale, weight_in, weight_scale, rows_per_group, y, num_groups, n, k, capacity,
        GROUPS=triton.next_power_of_2(num_groups), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m, DESCRIBED=described, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def grouped_gemm_fp8_kernel(
    x, x_scale, weight, weight_scale, rows_per_group, y, num_groups, n, k, capacity,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(n, BLOCK_N)
    num_blocks_k = tl.cdiv(k, BLOCK_K)
    num_blocks_n = tl.cdiv(n, 128)
    num_tiles = count_tiles(rows_per_group, num_groups, num_n, BLOCK_M, GROUPS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group, first_row, num_rows, tile_m, tile_n = locate_tile(
            tile, rows_per_group, num_groups, capacity, num_n, BLOCK_M, GROUPS, GROUP_M
        )
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        row_scale_at = x_scale + (first_row + row) * num_blocks_k
        block_scale_at = weight_scale + (group * num_blocks_n + tile_n * BLOCK_N // 128).to(tl.int64) * num_blocks_k
        for step in range(num_blocks_k):
            if DESCRIBED:
                a = x.load([(first_row + tile_m * BLOCK_M).to(tl.int32), step * BLOCK_K])
                b = weight.load([group * n + tile_n * BLOCK_N, step * BLOCK_K])
            else:
                depth = step * BLOCK_K + tl.arange(0, BLOCK_K)
                a_at = x + (first_row + row)[:, None] * k + depth[None, :]
                b_at = weight + (group.to(tl.int64) * n + column)[:, None] * k + depth[None, :]
                a = tl.load(a_at, mask=(row < num_rows)[:, None] & (depth < k)[None, :], other=0.0)
                b = tl.load(b_at, mask=(column < n)[:, None] & (depth < k)[None, :], other=0.0)
            row_scale = tl.load(row_scale_at + step, mask=row < num_rows, other=0.0)
            block_scale = tl.load(block_scale_at + step)
            total += dot(a, tl.trans(b)) * (row_scale * block_scale)[:, None]
        inside = (row < num_rows)[:, None] & (column < n)[None, :]
        at = y + (first_row + row)[:, None] * n + column[None, :]
        tl.store(at, as_dtype(total, y.dtype.element_ty), mask=inside)
