# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/grouped_gemm.py: y = x W^T per expert, packed rows and masked slabs, by one persistent kernel.

On Hopper and later the tiles come through the tensor memory accelerator (descriptors); elsewhere, and where a row is
not a multiple of 16 bytes, through plain loads. Accumulation is float32 along k in steps of block_k.

The kernel also serves FP8 with block scales (kernels/quantised.py). One step of its loop is then one block of
scales: the matrix unit adds 128 products, and the scaled blocks are added in float32 by the ordinary units. This also
avoids the short accumulators of Hopper's e4m3 instructions. Scales of output channels multiply the sums at the end.
MXFP4 is read as it is stored, four bits and a power of two for each 32; Triton widens it to the rows' dtype on the way
to the matrix unit, where the GPU has no instruction for both.

The first product of an expert ends with its activation (`activation`): a program computes the same columns of gate and
up, and writes what lies between, in the rows' dtype or, for FP8 experts, quantised. So neither is ever in memory.

A dense projection in FP8 is the same with one matrix for all rows: no counts, whose number the host knows.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_serve.kernels.forms import FP8_GROUP, SILU, Activation, BlockScaled, Mxfp4
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.triton.mode import as_dtype, dot, num_multiprocessors
from moe_serve.kernels.triton.quantize import quantize_groups
from moe_serve.kernels.triton.silu_mul import activated


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
# Depth and stages of the last one where tiles come through plain loads: steps of 64 spill registers on sm_80.
_BF16_LOADED = {"block_k": 32, "num_stages": 4}
_GATED_LOADED = _BF16_LOADED | {"block_n": 64}  # 128 columns of gate and of up spill, too
ROWS_OF_SLAB = 16  # a guess, for the choice of the tile only
# Values of float32 take twice the room, so the largest tile is left out.
_FLOAT32 = (_BF16[0], (None, _BF16[1][1]))
# block_k is the 128 of the scales, so one step has one pair of scales. block_n is at most 128, so that a tile lies in
# one block of the weight.
_FP8 = (
    (16, GemmTile(16, 64, 128, num_warps=4, num_stages=5, programs_per_sm=2)),
    (64, GemmTile(64, 128, 128, num_warps=4, num_stages=4, programs_per_sm=1)),
    (None, GemmTile(128, 128, 128, num_warps=8, num_stages=4)),
)
# The same with gate and up: block_n columns of each, 128 of which share a scale of the result. 128 rows spill.
_FP8_GATED = (
    (16, GemmTile(16, 128, 128, num_warps=4, num_stages=3, programs_per_sm=2)),
    (None, GemmTile(64, 128, 128, num_warps=8, num_stages=4)),
)
# Values of four bits are widened in registers: fewer columns at a time, so that nothing spills.
_MXFP4 = (
    (16, GemmTile(16, 64, 128, num_warps=4, num_stages=4, programs_per_sm=2)),
    (None, GemmTile(128, 64, 128, num_warps=8, num_stages=3)),
)


def bf16_tile(rows_per_group: int, invariant: bool = False, dtype: torch.dtype = torch.bfloat16) -> GemmTile:
    """Returns the tile for this many rows per expert on average.

    invariant: one tile for all, so that bits do not depend on the number of rows;  dtype: of the operands
    """
    return _BF16[1][1] if invariant else _pick(_BF16 if dtype.itemsize == 2 else _FLOAT32, rows_per_group)


def fp8_tile(rows_per_group: int, invariant: bool = False, gated: bool = False) -> GemmTile:
    """Returns the tile as bf16_tile does, for e4m3 operands with block scales. gated: of gate and up"""
    table = _FP8_GATED if gated else _FP8
    return table[1][1] if invariant else _pick(table, rows_per_group)


def mxfp4_tile(rows_per_group: int, invariant: bool = False) -> GemmTile:
    """Returns the tile as bf16_tile does, for weights in MXFP4."""
    return _MXFP4[1][1] if invariant else _pick(_MXFP4, rows_per_group)


def _pick(table: tuple[tuple[int | None, GemmTile], ...], rows: int) -> GemmTile:
    return next(tile for most, tile in table if most is None or rows <= most)


def grouped_gemm_triton(
    x: Tensor, weight: Tensor | Mxfp4, rows_per_group: Tensor, numerics: Numerics = FAST, tile: GemmTile | None = None,
    described: bool | None = None, bias: Tensor | None = None, activation: Activation | None = None,
    expected_rows: int = ROWS_OF_SLAB, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the product of each group's rows with its matrix, in the shape of x but for n columns.

    x: [rows, k], or slabs [groups, capacity, k] of which only the first rows_per_group rows are read, and written
    weight: [groups, n, k] in the dtype of x, or in MXFP4, with rows of bfloat16 or float16
    rows_per_group: [groups] int64, of packed rows summing to their number, on the host (copied without waiting) or on
    the device (never read by the host)
    bias: [groups, n] float32, added to the product; None: nothing is
    activation: the matrices are gate above up, and the result what lies between, n / 2 columns; None: the product
    tile, described: for tests and tuning; None = from the table, and what the device and the operands allow
    expected_rows: of a slab; for tuning, too
    out: contiguous, where the result is written; None: new memory
    """
    stored = weight.blocks if isinstance(weight, Mxfp4) else weight
    num_groups, n, _ = stored.shape
    width = n if activation is None else n // 2
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device) if out is None else out
    if y.numel():
        rows = x.shape[0] // num_groups if x.dim() == 2 else expected_rows
        if isinstance(weight, Mxfp4):
            tile = tile or mxfp4_tile(rows, numerics.invariant)
        else:
            tile = tile or bf16_tile(rows, numerics.invariant, x.dtype)
        if activation is not None:
            tile = replace(tile, block_n=tile.block_n // 2)
        scales = Scales(None, weight.scales, 1) if isinstance(weight, Mxfp4) else None
        launch(x, stored, rows_per_group, y, tile, described, scales, bias, activation)
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
    """Scales of quantised operands, contiguous.

    rows:   [rows, ceil(k / 128)] float32 of FP8 rows;  weight: as in BlockScaled, with `parts` stacks, or in Mxfp4
    """

    rows: Tensor | None
    weight: Tensor
    parts: int


def launch(
    x: Tensor, weight: Tensor, rows_per_group: Tensor | None, y: Tensor, tile: GemmTile, described: bool | None,
    scales: Scales | None = None, bias: Tensor | None = None, activation: Activation | None = None,
    y_scale: Tensor | None = None, adds: bool = False,
) -> None:  # fmt: skip
    """Fills y from x, packed rows or slabs, and weight [groups, n, k], two numbers of k in a byte where it is MXFP4.

    rows_per_group: None: all rows meet the one matrix
    y_scale: [rows, ceil(n / 2 / 128)], filled, where y is e4m3; None: y is not
    adds: the product is added to what y holds
    """
    assert rows_per_group is not None or (len(weight), x.dim()) == (1, 2), "without counts there is one matrix"
    assert y.is_contiguous(), "rows of the result lie side by side"
    num_groups, n, stored_k = weight.shape
    k, in_mxfp4 = x.shape[-1], weight.dtype == torch.uint8
    capacity = 0 if x.dim() == 2 else x.shape[1]  # of slabs, of which group g begins at row g * capacity
    x, y = x.view(-1, k) if x.dim() == 3 else x, y.view(-1, y.shape[-1])
    parts = scales.parts if scales else 1
    of_fp8 = scales is not None and not in_mxfp4
    by_channel = scales is not None and of_fp8 and scales.weight.dim() == 2
    if of_fp8:
        assert (tile.block_k, FP8_GROUP % tile.block_n) == (FP8_GROUP, 0), "a step must lie in one block"
    assert y_scale is None or tile.block_n == FP8_GROUP, "a tile is what shares a scale of the result"
    if described is None:
        described = has_tensor_memory_accelerator(x, weight)
    if not described and (tile.block_m, tile.block_k) == (128, 64):
        tile = replace(tile, **(_GATED_LOADED if activation else _BF16_LOADED))
    stored_block = tile.block_k * stored_k // k
    rows_in = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]) if described else x
    weight_in = weight
    if described:
        weight_in = TensorDescriptor.from_tensor(weight.view(-1, stored_k), [tile.block_n, stored_block])
    grid = (num_multiprocessors(x.device) * tile.programs_per_sm,)
    between = activation or SILU
    grouped_gemm_kernel[grid](
        rows_in, weight_in, scales.rows if scales else None, scales.weight if scales else None, bias,
        None if rows_per_group is None else on_device(rows_per_group, x.device), y, y_scale, x.shape[0], num_groups,
        n, k, x.stride(0), capacity, between.alpha, between.limit,
        GROUPS=triton.next_power_of_2(num_groups), PARTS=2 if activation else parts,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, DESCRIBED=described,
        SCALED=of_fp8, BY_CHANNEL=by_channel, MXFP4=in_mxfp4, HALF=x.dtype == torch.float16,
        BIAS=bias is not None, ADDS=adds, GATED=activation is not None, CLAMPED=between.kind == "clamped_swiglu",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "alpha", "limit"])
def grouped_gemm_kernel(
    x, weight, x_scale, weight_scale, bias, rows_per_group, y, y_scale, rows, num_groups, n, k, x_stride, capacity,
    alpha, limit,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, DESCRIBED: tl.constexpr, SCALED: tl.constexpr, BY_CHANNEL: tl.constexpr,
    MXFP4: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    part_n = n // PARTS
    part_tiles = tl.cdiv(part_n, BLOCK_N)
    num_n = part_tiles if GATED else PARTS * part_tiles
    num_steps = tl.cdiv(k, BLOCK_K)
    if rows_per_group is None:
        num_tiles = tl.cdiv(rows, BLOCK_M) * num_n
    else:
        num_tiles = count_tiles(rows_per_group, num_groups, num_n, BLOCK_M, GROUPS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        if rows_per_group is None:
            group, num_rows = tl.full((), 0, tl.int32), rows
            first_row = tl.full((), 0, tl.int64)
            tile_m, tile_n = in_bands(tile, tl.cdiv(rows, BLOCK_M), num_n, GROUP_M)
        else:
            group, first_row, num_rows, tile_m, tile_n = locate_tile(
                tile, rows_per_group, num_groups, capacity, num_n, BLOCK_M, GROUPS, GROUP_M
            )
        # Column tiles restart in every part, so that no tile spans two blocks of scales.
        part, first_column, end_column = 0, tile_n * BLOCK_N, part_n
        if PARTS > 1 and not GATED:
            part = tile_n // part_tiles
            tile_n = tile_n % part_tiles
            first_column = part * part_n + tile_n * BLOCK_N
            end_column = (part + 1) * part_n
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if GATED:
            total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if SCALED:
            row_scale_at = x_scale + (first_row + row) * num_steps
            block = (group * PARTS + part) * tl.cdiv(part_n, 128) + tile_n * BLOCK_N // 128
        for step in range(num_steps):
            depth = step * BLOCK_K + tl.arange(0, BLOCK_K)
            if DESCRIBED:
                # A tile may reach into the next expert's rows or weights; those results are not stored.
                a = x.load([(first_row + tile_m * BLOCK_M).to(tl.int32), step * BLOCK_K])
            else:
                a_at = x + (first_row + row)[:, None] * x_stride + depth[None, :]
                a = tl.load(a_at, mask=(row < num_rows)[:, None] & (depth < k)[None, :], other=0.0)
            if SCALED:
                row_scale = tl.load(row_scale_at + step, mask=row < num_rows, other=0.0)
                total = add_scaled(
                    total, a, row_scale, weight, weight_scale, group, n, k, first_column, end_column, step, block,
                    BLOCK_N, BLOCK_K, DESCRIBED, BY_CHANNEL,
                )  # fmt: skip
                if GATED:
                    total_up = add_scaled(
                        total_up, a, row_scale, weight, weight_scale, group, n, k, part_n + first_column, n, step,
                        block + tl.cdiv(part_n, 128), BLOCK_N, BLOCK_K, DESCRIBED, BY_CHANNEL,
                    )  # fmt: skip
            elif MXFP4:
                total = add_mxfp4(
                    total, a, weight, weight_scale, group, n, k, first_column, end_column, step, BLOCK_N, BLOCK_K,
                    DESCRIBED, HALF,
                )  # fmt: skip
                if GATED:
                    total_up = add_mxfp4(
                        total_up, a, weight, weight_scale, group, n, k, part_n + first_column, n, step, BLOCK_N,
                        BLOCK_K, DESCRIBED, HALF,
                    )  # fmt: skip
            else:
                b = weight_tile(weight, group, n, k, first_column, end_column, step, BLOCK_N, BLOCK_K, DESCRIBED)
                total += dot(a, tl.trans(b))
                if GATED:
                    up_column = part_n + first_column
                    b = weight_tile(weight, group, n, k, up_column, n, step, BLOCK_N, BLOCK_K, DESCRIBED)
                    total_up += dot(a, tl.trans(b))
        in_part = column < end_column
        at_channel = group.to(tl.int64) * n + column
        if BY_CHANNEL:
            total *= tl.load(weight_scale + at_channel, mask=in_part, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + at_channel, mask=in_part, other=0.0)[None, :]
        width = n
        if GATED:
            width = part_n
            if BY_CHANNEL:
                total_up *= tl.load(weight_scale + at_channel + part_n, mask=in_part, other=0.0)[None, :]
            if BIAS:
                total_up += tl.load(bias + at_channel + part_n, mask=in_part, other=0.0)[None, :]
            total = activated(total, total_up, alpha, limit, CLAMPED)
        at = y + (first_row + row)[:, None] * width + column[None, :]
        inside = (row < num_rows)[:, None] & in_part[None, :]
        if ADDS:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if y_scale is not None:
            total, scales = quantize_groups(tl.where(in_part[None, :], total, 0.0))
            scale_at = y_scale + (first_row + row) * tl.cdiv(width, 128) + tile_n
            tl.store(scale_at, scales, mask=row < num_rows)
        else:
            total = as_dtype(total, y.dtype.element_ty)
        tl.store(at, total, mask=inside)


@triton.jit
def weight_tile(
    weight, group, n, stored_k, first_column, end_column, step, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Returns step `step` of BLOCK_N rows of a group's matrix, as stored: [BLOCK_N, BLOCK]."""
    if DESCRIBED:
        return weight.load([group * n + first_column, step * BLOCK])
    else:
        column = first_column + tl.arange(0, BLOCK_N)
        depth = step * BLOCK + tl.arange(0, BLOCK)
        at = weight + (group.to(tl.int64) * n + column)[:, None] * stored_k + depth[None, :]
        return tl.load(at, mask=(column < end_column)[:, None] & (depth < stored_k)[None, :], other=0.0)


@triton.jit
def add_scaled(
    total, a, row_scale, weight, weight_scale, group, n, k, first_column, end_column, step, block,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Adds the products of FP8 operands, which lie in one block of scales. block: row of blocks of the weight"""
    b = weight_tile(weight, group, n, k, first_column, end_column, step, BLOCK_N, BLOCK_K, DESCRIBED)
    if not BY_CHANNEL:
        row_scale *= tl.load(weight_scale + block.to(tl.int64) * tl.cdiv(k, BLOCK_K) + step)
    return total + dot(a, tl.trans(b)) * row_scale[:, None]


@triton.jit
def add_mxfp4(
    total, a, weight, weight_scale, group, n, k, first_column, end_column, step,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Adds the products of rows and a matrix in MXFP4."""
    b = weight_tile(weight, group, n, k // 2, first_column, end_column, step, BLOCK_N, BLOCK_K // 2, DESCRIBED)
    column = first_column + tl.arange(0, BLOCK_N)
    block = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    at = weight_scale + (group.to(tl.int64) * n + column)[:, None] * (k // 32) + block[None, :]
    scale = tl.load(at, mask=(column < end_column)[:, None] & (block < k // 32)[None, :], other=127)
    return tl.dot_scaled(a, None, "fp16" if HALF else "bf16", tl.trans(b), scale, "e2m1", acc=total)


def grouped_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_group: Tensor | None, dtype: torch.dtype = torch.bfloat16,
    numerics: Numerics = FAST, tile: GemmTile | None = None, described: bool | None = None,
    expected_rows: int = ROWS_OF_SLAB, bias: Tensor | None = None, out: Tensor | None = None, adds: bool = False,
) -> Tensor:  # fmt: skip
    """Returns the product of each group's rows, packed or in slabs as in grouped_gemm_triton, with its matrix.

    x: [.., k] float8_e4m3fn, x_scale: [.., ceil(k / 128)] float32 -> [.., n] dtype;  other arguments as there
    rows_per_group: None: all rows meet the one matrix
    out: contiguous, where the result is written, or with `adds` added to what is there; None: new memory
    """
    groups, n, _ = weight.q.shape
    y = torch.empty(*x.shape[:-1], n, dtype=dtype, device=x.device) if out is None else out
    if y.numel():
        rows = x.shape[0] // groups if x.dim() == 2 else expected_rows
        scales, tile = Scales(x_scale, weight.scale, weight.parts), tile or fp8_tile(rows, numerics.invariant)
        launch(x, weight.q, rows_per_group, y, tile, described, scales, bias, adds=adds)
    return y


def gated_gemm_fp8_triton(
    x: Tensor, x_scale: Tensor, weight: BlockScaled, rows_per_group: Tensor | None, numerics: Numerics = FAST,
    described: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns silu(gate) * up of the same product with gate above up, quantised from float32.

    weight: two parts -> (q [.., n / 2] float8_e4m3fn, scale [.., ceil(n / 2 / 128)] float32)
    """
    groups, n, _ = weight.q.shape
    q = torch.empty(*x.shape[:-1], n // 2, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(*x.shape[:-1], triton.cdiv(n // 2, FP8_GROUP), dtype=torch.float32, device=x.device)
    if q.numel():
        tile = fp8_tile(x.shape[0] // groups if x.dim() == 2 else ROWS_OF_SLAB, numerics.invariant, gated=True)
        scales = Scales(x_scale, weight.scale, weight.parts)
        launch(x, weight.q, rows_per_group, q, tile, described, scales, activation=SILU, y_scale=scale)
    return q, scale


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
    tile_m, tile_n = in_bands(tile - first_tile, my_num_m, num_n, GROUP_M)
    return mine, first_row, my_rows, tile_m, tile_n


@triton.jit
def in_bands(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Returns (row tile, column tile). GROUP_M row tiles run through all columns together, so that their weight tiles
    are read from L2, not from memory."""
    band = tile // (GROUP_M * num_n)
    band_m = tl.minimum(num_m - band * GROUP_M, GROUP_M)
    inside = tile % (GROUP_M * num_n)
    return band * GROUP_M + inside % band_m, inside // band_m
