"""How many rows one GEMM may take in `batch_invariant` without changing a bit.

A tile of Numerics.row_tile rows defines the result. Many libraries give the same bits for larger tiles, because the
order in which they accumulate one output element does not depend on the number of rows; others do not. So each kernel
and shape is tried with random numbers: another order of accumulation would show in some of the many thousand elements.
Row counts that pass run in one call; others are cut into tiles.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

LARGEST_TILE = 128  # rows; above this a GEMM is no longer bound by streaming its weights


def proven_tiles(multiply: Callable[[Tensor], Tensor], width: int, row_tile: int, like: Tensor) -> tuple[int, ...]:
    """Returns the row counts, descending, for which `multiply` gives the bits of its `row_tile`-row calls.

    multiply: [m, width] -> [m, n], the kernel with its weight;  like: a tensor of the dtype and device of the rows
    The smallest entry is row_tile itself; all entries are multiples of it. On an accelerator only row_tile is returned:
    its libraries choose kernels by shape and load.
    """
    if like.device.type != "cpu" or row_tile >= LARGEST_TILE:
        return (row_tile,)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(LARGEST_TILE + row_tile, width, generator=generator).to(like.dtype)
    tiles = torch.cat([multiply(rows[i : i + row_tile]) for i in range(0, len(rows), row_tile)])
    proven = [row_tile]
    for size in _candidates(row_tile):
        # Twice, at different offsets: a kernel may choose its path by alignment and position.
        if all(torch.equal(multiply(rows[at : at + size]), tiles[at : at + size]) for at in (0, row_tile)):
            proven.append(size)
    return tuple(reversed(proven))


def _candidates(row_tile: int) -> list[int]:
    sizes = {row_tile * count for count in range(2, 32 // row_tile + 1)} | {32, 48, 64, 96, LARGEST_TILE}
    return sorted(size for size in sizes if size > row_tile and size % row_tile == 0)


def cut(num_rows: int, tiles: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of consecutive pieces with sizes in `tiles`; num_rows is a multiple of the smallest size."""
    start = 0
    for size in tiles:
        while num_rows - start >= size:
            yield start, start + size
            start += size
    assert start == num_rows, f"{num_rows} rows are not a multiple of the row tile {tiles[-1]}"
