"""Packed weights read back row by row, from the layout that kernels/cpu/packed.py describes."""

import torch
from torch import Tensor

from moe_serve.kernels.cpu.packed import padded

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # float8 cannot be indexed


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """Returns the weight [n, k] of what `pack` wrote."""
    rows = [packed_row(packed, n, k, row) for row in range(n)]
    return torch.stack(rows).view(packed.dtype)


def unpack_gate_up(packed: Tensor, width: int, k: int) -> Tensor:
    """Returns the weight [2 x width, k] of what `pack_gate_up` wrote: 32 rows of gate, then of up, in each panel."""
    places = [64 * (row // 32) + half + row % 32 for half in (0, 32) for row in range(width)]
    rows = [packed_row(packed, 2 * padded(width), k, place) for place in places]
    return torch.stack(rows).view(packed.dtype)


def packed_row(packed: Tensor, n: int, k: int, row: int) -> Tensor:
    """Returns one row [k] of a packed weight [n, k], as whole numbers."""
    panel, column = divmod(row, 64)
    panel_width = min(64, padded(n) - 64 * panel)
    first, at = 64 * panel * (k + k % 2), torch.arange(k)
    if packed.itemsize == 2:  # two of a row side by side
        places = at // 2 * 2 * panel_width + 2 * column + at % 2
    else:
        places = at * panel_width + column
    return packed.view(WORDS[packed.itemsize])[first + places]
