"""Weights in the order in which the compiled kernels read them (gemm.h).

A weight [n, k] lies in panels of 64 rows of the weight, k outermost inside a panel: [panel][k][64]. n is padded with
zeros to a multiple of 32, and the last panel is 32 wide where that is enough; k is padded to an even number. In
bfloat16 two neighbours in k lie side by side, [panel][k / 2][64][2], as products of pairs want them. The layout is the
same for every processor, so machines can exchange packed weights byte for byte.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 64
HALF = 32  # rows of gate, then rows of up, in a panel of both
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # moved as whole numbers: float8 lacks most of torch's moves


def padded(n: int) -> int:
    """Returns n, padded to a multiple of 32."""
    return -(-n // HALF) * HALF


def packed_size(n: int, k: int) -> int:
    """Returns the elements of a packed weight [n, k]."""
    return padded(n) * (k + k % 2)


def gate_up_size(width: int, k: int) -> int:
    """Returns the elements of a packed weight of gate and up, [2 x width, k]."""
    return packed_size(2 * padded(width), k)


def pack(weight: Tensor, out: Tensor) -> None:
    """Writes a weight [n, k] of 1, 2 or 4 bytes per element to `out` [packed_size], of the same dtype."""
    assert weight.dtype == out.dtype, f"{weight.dtype} packed as {out.dtype}"
    n, k = weight.shape
    rows, panels = weight.view(_BITS[weight.itemsize]), out.view(_BITS[out.itemsize])
    if padded(n) != n or k % 2:
        rows = pad(rows, (0, k % 2, 0, padded(n) - n))
    if weight.itemsize == 2:  # pairs, as words
        rows, panels = rows.reshape(-1).view(torch.int32).view(padded(n), -1), panels.view(torch.int32)
    n, k = rows.shape
    full = n // PANEL * PANEL
    for first, last, width in ((0, full, PANEL), (full, n, HALF)):
        num = (last - first) // width
        panels[first * k : last * k].view(num, k, width).transpose(1, 2).copy_(rows[first:last].view(num, width, k))


def pack_gate_up(weight: Tensor, out: Tensor) -> None:
    """Writes the weight of gate above up [2 x width, k] to `out` [gate_up_size]: each panel is 32 rows of both."""
    width, k = weight.shape[0] // 2, weight.shape[1]
    bits = weight.view(_BITS[weight.itemsize])
    both = bits.view(2, width, k)
    if padded(width) != width:
        both = pad(both, (0, 0, 0, padded(width) - width))
    panels = both.view(2, padded(width) // HALF, HALF, k).transpose(0, 1).reshape(2 * padded(width), k)
    pack(panels.view(weight.dtype), out)
