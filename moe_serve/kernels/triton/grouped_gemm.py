# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/grouped_gemm.py: y = x W^T per expert, packed rows and masked slabs, by one persistent kernel.

On Hopper and later the tiles come through the tensor memory accelerator (descriptors); elsewhere, and where a row is
not a multiple of 16 bytes, through plain loads. Accumulation is float32 along k in steps of block_k.

The kernel also serves FP8 with block scales (kernels/quantised.py). One step of its loop is then one block of
scales: the matrix unit adds 128 products, and the scaled blocks are added in float32 by the ordinary units. This also
avoids the short accumulators of Hopper's e4m3 instructions. Scales of output channels multiply the sums at the end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_serve.kernels.forms import FP8_GROUP, BlockScaled
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.triton.mode import as_dtype, dot, num_multiprocessors


@dataclass(frozen=True)
class GemmTile:
    """One program's piece of the output and how it is computed.

    block_m, block_n:  rows and columns of the piece; block_k: depth of one step
    group_m:           row tiles that run through all columns together, so that these are read from L2
    programs_per_sm:   persistent programs on one multiprocessor
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    programs_per_sm: int = 1


# The tile comes from a table keyed by shape class, never from a search while serving: a search costs seconds, differs
# between ranks, and breaks graph capture. The classes follow the bottleneck: memory bandwidth with few rows per expert,
# matrix units with many. Shared memory is (block_m + block_n) x block_k x bytes x num_stages; sm_80 has 163 KB, sm_90
# and sm_100 have 227 KB. No row has been measured on a GPU yet; benchmarks/gpu_gemm.py prints the rows to put here.
_BF16 = (
    (16, GemmTile(16, 64, 128, num_warps=4, num_stages=4, programs_per_sm=2)),
    (64, GemmTile(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2)),
    (None, GemmTile(128, 256, 64, num_warps=8, num_stages=3)),
)
# The last one where tiles come through plain loads: steps of 64 spill registers on sm_80.
_BF16_LOADED = GemmTile(128, 256, 32, num_warps=8, num_stages=4)
# Values of float32 take twice the room, so the largest tile is left out.
_FLOAT32 = (_BF16[0], (None, _BF16[1][1]))
# block_k is the 128 of the scales, so one step has one pair of scales. block_n is at most 128, so that a tile lies in
# one block of the weight.
_FP8 = (
    (16, GemmTile(16, 64, 128, num_warps=4, num_stages=5, programs_per_sm=2)),
    (64, GemmTile(64, 128, 128, num_warps=4, num_stages=4, programs_per_sm=1)),
    (None, GemmTile(128, 128, 128, num_warps=8, num_stages=4)),
)


def bf16_tile(rows_per_group: int, invariant: bool = False, dtype: torch.dtype = torch.bfloat16) -> GemmTile:
    """Returns the tile for this many rows per expert on average.

    invariant: one tile for all, so that bits do not depend on the number of rows;  dtype: of the operands
    """
    return _BF16[1][1] if invariant else _pick(_BF16 if dtype.itemsize == 2 else _FLOAT32, rows_per_group)


def fp8_tile(rows_per_group: int, invariant: bool = False) -> GemmTile:
    """Returns the tile as bf16_tile does, for e4m3 operands with block scales."""
    return _FP8[1][1] if invariant else _pick(_FP8, rows_per_group)


def _pick(table: tuple[tuple[int | None, GemmTile], ...], rows: int) -> GemmTile:
    return next(tile for most, tile in table if most is None or rows <= most)


def grouped_gemm_triton(
    x: Tensor, weight: Tensor, rows_per_group: Tensor, numerics: Numerics = FAST, tile: GemmTile | None = None,
    described: bool | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each group's rows with its matrix, [rows, n] like x.

    x: [rows, k], weight: [groups, n, k], rows_per_group: [groups] int64 summing to rows, on the host (copied without
    waiting) or on the device (never read by the host)
    tile, described: for tests and tuning; None = from the table, and what the device and the operands allow
    bias: [groups, n] float32, added to the product; None: nothing is
    """
    num_groups, n, _ = weight.shape
    y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    if y.numel():
        tile = tile or bf16_tile(x.shape[0] // num_groups, numerics.invariant, x.dtype)
        launch(x, weight, on_device(rows_per_group, x.device), y, 0, tile, described, bias=bias)
    return y


def slab_gemm_triton(
    x: Tensor, weight: Tensor, rows_per_slot: Tensor, numerics: Numerics = FAST, expected_rows: int = 16,
    tile: GemmTile | None = None, described: bool | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each slab with its matrix, [slots, capacity, n].

    x: [slots, capacity, k], weight: [slots, n, k], rows_per_slot: [slots] int64; rows beyond it are neither read nor
    written. expected_rows: a guess, for the choice of the tile only;  bias: [slots, n] as in grouped_gemm_triton
    """
    slots, capacity, k = x.shape
    y = torch.empty(slots, capacity, weight.shape[1], dtype=x.dtype, device=x.device)
    if y.numel():
        tile = tile or bf16_tile(expected_rows, numerics.invariant, x.dtype)
        rows, out = x.view(slots * capacity, k), y.view(slots * capacity, -1)
        launch(rows, weight, on_device(rows_per_slot, x.device), out, capacity, tile, described, bias=bias)
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
    return row_bytes % 16 == 0 and x.is_contiguous() and weight.is_contiguous() and x.storage_offset() % 16 == 0


@dataclass(frozen=True)
class Scales:
    """Scales of FP8 operands: rows [rows, ceil(k / 128)], weight as in BlockScaled, with `parts` stacks, contiguous."""

    rows: Tensor
    weight: Tensor
    parts: int


def launch(
    x: Tensor, weight: Tensor, rows_per_group: Tensor, y: Tensor, capacity: int, tile: GemmTile,
    described: bool | None, scales: Scales | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills y [rows, n] from x [rows, k] and weight [groups, n, k].

    capacity: rows of a slab, when group g begins at row g * capacity; 0 when groups follow each other without gaps
    """
    num_groups, n, k = weight.shape
    parts = scales.parts if scales else 1
    assert scales is None or (tile.block_k, FP8_GROUP % tile.block_n) == (FP8_GROUP, 0), "a step must lie in one block"
    if described is None:
        described = has_tensor_memory_accelerator(x, weight)
    if not described and tile == _BF16[-1][1]:
        tile = _BF16_LOADED
    rows_in = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]) if described else x
    weight_in = TensorDescriptor.from_tensor(weight.view(-1, k), [tile.block_n, tile.block_k]) if described else weight
    grid = (num_multiprocessors(x.device) * tile.programs_per_sm,)
    grouped_gemm_kernel[grid](
        rows_in, weight_in, scales.rows if scales else None, scales.weight if scales else None, bias, rows_per_group, y,
        num_groups, n, k, x.stride(0), capacity, GROUPS=triton.next_power_of_2(num_groups), PARTS=parts,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, DESCRIBED=described,
        SCALED=scales is not None, BY_CHANNEL=scales is not None and scales.weight.dim() == 2, BIAS=bias is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def grouped_gemm_kernel(
    x, weight, x_scale, weight_scale, bias, rows_per_group, y, num_groups, n, k, x_stride, capacity,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, DESCRIBED: tl.constexpr, SCALED: tl.constexpr, BY_CHANNEL: tl.constexpr,
    BIAS: tl.constexpr,
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
        if BIAS:
            total += tl.load(bias + group.to(tl.int64) * n + column, mask=column < end_column, other=0.0)[None, :]
        inside = (row < num_rows)[:, None] & (column < end_column)[None, :]
        at = y + (first_row + row)[:, None] * n + column[None, :]
        tl.store(at, as_dtype(total, y.dtype.element_ty), mask=inside)


def grouped_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_group: Tensor, dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics = FAST, tile: GemmTile | None = None, described: bool | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as grouped_gemm_fp8_reference; rows_per_group on the host or on the device.

    tile, described: as in grouped_gemm_triton
    """
    groups, n, _ = weight.q.shape
    y = torch.empty(x.shape[0], n, dtype=dtype, device=x.device)
    if y.numel():
        tile = tile or fp8_tile(x.shape[0] // groups, numerics.invariant)
        scales = Scales(x_scale, weight.scale, weight.parts)
        launch(x, weight.q, on_device(rows_per_group, x.device), y, 0, tile, described, scales)
    return y


def slab_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_slot: Tensor, dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics = FAST, expected_rows: int = 16, tile: GemmTile | None = None, described: bool | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each slab with its matrix, [slots, capacity, n] dtype.

    x: [slots, capacity, k] float8_e4m3fn, x_scale: [slots, capacity, ceil(k / 128)] float32, rows_per_slot: [slots]
    int64; rows beyond it are neither read nor written
    expected_rows: a guess, for the choice of the tile only
    """
    slots, capacity, k = x.shape
    y = torch.empty(slots, capacity, weight.q.shape[1], dtype=dtype, device=x.device)
    if y.numel():
        tile = tile or fp8_tile(expected_rows, numerics.invariant)
        rows, out = x.view(slots * capacity, k), y.view(slots * capacity, -1)
        scales = Scales(x_scale.view(slots * capacity, -1), weight.scale, weight.parts)
        launch(rows, weight.q, on_device(rows_per_slot, x.device), out, capacity, tile, described, scales)
    return y


# The host does not know the counts of a decode step. A fixed number of programs runs; each takes every num_programs-th
# tile until there are no more, and locates its tile from the counts.


@triton.jit
def count_tiles(rows_per_group, num_groups, num_n, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """Returns the number of output tiles. rows_per_group: [num_groups] int64, GROUPS: power of two >= num_groups"""
    group = tl.arange(0, GROUPS)
    rows = tl.load(rows_per_group + group, mask=group < num_groups, other=0).to(tl.int32)
    return tl.sum(tl.cdiv(rows, BLOCK_M)) * num_n


@triton.jit
def locate_tile(
    tile, rows_per_group, num_groups, capacity, num_n,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Returns (group, first row of the group, rows of the group, row tile within it, column tile).

    capacity: rows of a slab, when group g begins at row g * capacity; 0 when groups follow each other without gaps
    """
    group = tl.arange(0, GROUPS)
    rows = tl.load(rows_per_group + group, mask=group < num_groups, other=0).to(tl.int32)
    num_m = tl.cdiv(rows, BLOCK_M)
    tile_ends = tl.cumsum(num_m * num_n, axis=0)
    mine = tl.sum((tile_ends <= tile).to(tl.int32))
    at_mine = (group == mine).to(tl.int32)
    before_mine = (group < mine).to(tl.int32)
    my_rows = tl.sum(rows * at_mine)
    my_num_m = tl.sum(num_m * at_mine)
    first_tile = tl.sum(num_m * num_n * before_mine)
    if capacity > 0:
        first_row = mine.to(tl.int64) * capacity
    else:
        first_row = tl.sum(rows * before_mine).to(tl.int64)
    # GROUP_M row tiles run through all columns together, so that their weight tiles are read from L2, not from memory.
    local = tile - first_tile
    band = local // (GROUP_M * num_n)
    band_m = tl.minimum(my_num_m - band * GROUP_M, GROUP_M)
    inside = local % (GROUP_M * num_n)
    return mine, first_row, my_rows, band * GROUP_M + inside % band_m, inside // band_m
