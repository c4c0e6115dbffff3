"""The tile that a grouped GEMM runs with: a table keyed by shape class, never a search while serving.

A search at run time costs seconds during serving, differs between ranks, and breaks graph capture. The classes follow
the bottleneck: memory bandwidth with few rows per expert, matrix units with many.
Shared memory is (block_m + block_n) x block_k x bytes x num_stages; sm_80 has 163 KB, sm_90 and sm_100 have 227 KB.
No row has been measured on a GPU yet; `benchmarks/gpu.py` prints the rows to put here.
"""

from dataclasses import dataclass


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


_BF16 = (
    (16, GemmTile(16, 64, 128, num_warps=4, num_stages=4, programs_per_sm=2)),
    (64, GemmTile(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2)),
    (None, GemmTile(128, 256, 64, num_warps=8, num_stages=3)),
)
# block_k is the 128 of the scales, so one step has one pair of scales. block_n is at most 128, so that a tile lies in
# one block of the weight.
_FP8 = (
    (16, GemmTile(16, 64, 128, num_warps=4, num_stages=5, programs_per_sm=2)),
    (64, GemmTile(64, 128, 128, num_warps=4, num_stages=4, programs_per_sm=1)),
    (None, GemmTile(128, 128, 128, num_warps=8, num_stages=4)),
)


def bf16_tile(rows_per_group: int, invariant: bool = False) -> GemmTile:
    """Returns the tile for this many rows per expert on average.

    invariant: one tile for all, so that bits do not depend on the number of rows
    """
    return _BF16[1][1] if invariant else _pick(_BF16, rows_per_group)


def fp8_tile(rows_per_group: int, invariant: bool = False) -> GemmTile:
    """Returns the tile as bf16_tile does, for e4m3 operands with block scales."""
    return _FP8[1][1] if invariant else _pick(_FP8, rows_per_group)


def _pick(table: tuple[tuple[int | None, GemmTile], ...], rows: int) -> GemmTile:
    return next(tile for most, tile in table if most is None or rows <= most)
