# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/grouped_gemm.py: y = x W^T per expert, packed rows and masked slabs, by one persistent kernel.

On Hopper and later the tiles come through the tensor memory accelerator (descriptors); elsewhere, and where a row is
not a multiple of 16 bytes, through plain loads. Accumulation is float32 along k in steps of block_k.

The kernel also serves FP8 with block scales (grouped_gemm_fp8.py beside it). One step of its loop is then one block of
scales: the matrix unit adds 128 products, and the scaled blocks are added in float32 by the ordinary units. This also
avoids the short accumulators of Hopper's e4m3 instructions. Scales of output channels multiply the sums at the end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_serve.kernels.fp8_block import GROUP
from moe_serve.kernels.gemm_tiles import GemmTile, bf16_tile
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.triton.grouped_tiles import count_tiles, locate_tile
from moe_serve.kernels.triton.mode import as_dtype, dot, num_multiprocessors


def grouped_gemm_triton(
    x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics = FAST, tile: GemmTile | None = None,
    described: bool | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each group's rows with its matrix, [rows, n] like x.

    x: [rows, k], weight: [groups, n, k], rows_per_group: [groups] int64 summing to rows, on the host (copied without
    waiting) or on the device (never read by the host)
    tile, described: for tests and tuning; None = from the table, and what the device and the operands allow
    """
    num_groups, n, _ = weight.shape
    y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    if y.numel():
        tile = tile or bf16_tile(x.shape[0] // num_groups, numerics.invariant)
        launch(x, weight, on_device(rows_per_group, x.device), y, 0, tile, described)
    return y


def slab_gemm_triton(
    x: Tensor, weight: Tensor, rows_per_slot: Tensor, numerics: Numerics = FAST, expected_rows: int = 16,
    tile: GemmTile | None = None, described: bool | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each slab with its matrix, [slots, capacity, n].

    x: [slots, capacity, k], weight: [slots, n, k], rows_per_slot: [slots] int64; rows beyond it are neither read nor
    written. expected_rows: a guess, for the choice of the tile only
    """
    slots, capacity, k = x.shape
    y = torch.empty(slots, capacity, weight.shape[1], dtype=x.dtype, device=x.device)
    if y.numel():
        tile = tile or bf16_tile(expected_rows, numerics.invariant)
        rows, out = x.view(slots * capacity, k), y.view(slots * capacity, -1)
        launch(rows, weight, on_device(rows_per_slot, x.device), out, capacity, tile, described)
    return y


def on_device(counts: Tensor, device: torch.device) -> Tensor:
    """Returns counts on the device; counts on the host are copied without waiting."""
    if counts.device == device:
        return counts
    return counts.pin_memory().to(device, non_blocking=True)


def has_tensor_memory_accelerator(x: Tensor, weight: Tensor) -> bool:
    """Returns whether both operands can go through it: sm_90 or later, 16-byte aligned contiguous rows."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    row_bytes = x.shape[-1] * x.element_size()
    return row_bytes % 16 == 0 and x.is_contiguous() and weight.is_contiguous() and x.data_ptr() % 16 == 0


@dataclass(frozen=True)
class Scales:
    """Scales of FP8 operands: rows [rows, ceil(k / 128)], weight as in BlockScaled, with `parts` stacks, contiguous."""

    rows: Tensor
    weight: Tensor
    parts: int


def launch(
    x: Tensor, weight: Tensor, rows_per_group: Tensor, y: Tensor, capacity: int, tile: GemmTile,
    described: bool | None, scales: Scales | None = None,
) -> None:  # fmt: skip
    """Fills y [rows, n] from x [rows, k] and weight [groups, n, k].

    capacity: rows of a slab, when group g begins at row g * capacity; 0 when groups follow each other without gaps
    """
    num_groups, n, k = weight.shape
    parts = scales.parts if scales else 1
    assert scales is None or (tile.block_k, GROUP % tile.block_n) == (GROUP, 0), "a step must lie in one block"
    if described is None:
        described = has_tensor_memory_accelerator(x, weight)
    rows_in = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]) if described else x
    weight_in = TensorDescriptor.from_tensor(weight.view(-1, k), [tile.block_n, tile.block_k]) if described else weight
    grid = (num_multiprocessors(x.device) * tile.programs_per_sm,)
    grouped_gemm_kernel[grid](
        rows_in, weight_in, scales.rows if scales else None, scales.weight if scales else None, rows_per_group, y,
        num_groups, n, k, x.stride(0), capacity, GROUPS=triton.next_power_of_2(num_groups), PARTS=parts,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, DESCRIBED=described,
        SCALED=scales is not None, BY_CHANNEL=scales is not None and scales.weight.dim() == 2,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def grouped_gemm_kernel(
    x, weight, x_scale, weight_scale, rows_per_group, y, num_groups, n, k, x_stride, capacity,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, DESCRIBED: tl.constexpr, SCALED: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    part_n = n // PARTS
    part_tiles = tl.cdiv(part_n, BLOCK_N)
    num_n = PARTS * part_tiles
    num_steps = tl.cdiv(k, BLOCK_K)
    num_tiles = count_tiles(rows_per_group, num_groups, num_n, BLOCK_M, GROUPS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group, first_row, num_rows, tile_m, tile_n = locate_tile(
            tile, rows_per_group, num_groups, capacity, num_n, BLOCK_M, GROUPS, GROUP_M
        )
        # Column tiles restart in every part, so that no tile spans two blocks of scales.
        part, first_column, end_column = 0, tile_n * BLOCK_N, n
        if PARTS > 1:
            part = tile_n // part_tiles
            tile_n = tile_n % part_tiles
            first_column = part * part_n + tile_n * BLOCK_N
            end_column = (part + 1) * part_n
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if SCALED:
            row_scale_at = x_scale + (first_row + row) * num_steps
        if SCALED and not BY_CHANNEL:
            block = (group * PARTS + part) * tl.cdiv(part_n, 128) + tile_n * BLOCK_N // 128
            block_scale_at = weight_scale + block.to(tl.int64) * num_steps
        for step in range(num_steps):
            if DESCRIBED:
                # A tile may reach into the next expert's rows or weights; those results are not stored.
                a = x.load([(first_row + tile_m * BLOCK_M).to(tl.int32), step * BLOCK_K])
                b = weight.load([group * n + first_column, step * BLOCK_K])
            else:
                depth = step * BLOCK_K + tl.arange(0, BLOCK_K)
                a_at = x + (first_row + row)[:, None] * x_stride + depth[None, :]
                b_at = weight + (group.to(tl.int64) * n + column)[:, None] * k + depth[None, :]
                a = tl.load(a_at, mask=(row < num_rows)[:, None] & (depth < k)[None, :], other=0.0)
                b = tl.load(b_at, mask=(column < end_column)[:, None] & (depth < k)[None, :], other=0.0)
            if SCALED:
                row_scale = tl.load(row_scale_at + step, mask=row < num_rows, other=0.0)
                if not BY_CHANNEL:
                    row_scale *= tl.load(block_scale_at + step)
                total += dot(a, tl.trans(b)) * row_scale[:, None]
            else:
                total += dot(a, tl.trans(b))
        if BY_CHANNEL:
            channel_at = weight_scale + group.to(tl.int64) * n + column
            total *= tl.load(channel_at, mask=column < end_column, other=0.0)[None, :]
        inside = (row < num_rows)[:, None] & (column < end_column)[None, :]
        at = y + (first_row + row)[:, None] * n + column[None, :]
        tl.store(at, as_dtype(total, y.dtype.element_ty), mask=inside)
