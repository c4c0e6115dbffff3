# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Maps a tile number to an expert and its rows, on the device, for every grouped GEMM.

The host does not know the counts of a decode step. A fixed number of programs runs; each takes every num_programs-th
tile until there are no more, and locates its tile from the counts.
"""

import triton
import triton.language as tl


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
