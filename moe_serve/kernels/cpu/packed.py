"""Weights in the order in which the compiled kernels read them (gemm.h).

A weight [n, k] lies in panels of 64 rows of the weight, k outermost inside a panel: [panel][k][64]. n is padded with
zeros to a multiple of 32, and the last panel is 32 wide where that is enough. In bfloat16 rows c and c + 16 of each 32
lie side by side. The layout is the same for every processor, so machines can exchange packed weights byte for byte.
"""

import torch
from torch import Tensor

PANEL = 64
HALF = 32  # rows of gate, then rows of up, in a panel of both
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # moved as whole numbers: float8 lacks most of torch's moves


def padded(n: int) -> int:
    """Returns n, padded to a multiple of 32."""
    return -(-n // HALF) * HALF


def packed_size(n: int, k: int) -> int:
    """Returns the elements of a packed weight [n, k]."""
    return padded(n) * k


def gate_up_size(width: int, k: int) -> int:
    """Returns the elements of a packed weight of gate and up, [2 x width, k]."""
    return 2 * padded(width) * k


def pack(weight: Tensor, out: Tensor) -> None:
    """Writes a weight [n, k] of 1, 2 or 4 bytes per element to `out` [packed_size], of the same dtype."""
    assert weight.dtype == out.dtype, f"{weight.dtype} packed as {out.dtype}"
    n, k = weight.shape
    bits = weight.view(_BITS[weight.itemsize])
    rest = padded(n) - n
    if rest:
        bits = torch.cat([bits, bits.new_zeros(rest, k)])
    for panels, rows in zip(_panels(out, n, k), _stacks(bits), strict=True):
        panels.copy_(rows)


def pack_gate_up(weight: Tensor, out: Tensor) -> None:
    """Writes the weight of gate above up [2 x width, k] to `out` [gate_up_size]: each panel is 32 rows of both."""
    width, k = weight.shape[0] // 2, weight.shape[1]
    bits = weight.view(_BITS[weight.itemsize])
    both = bits.new_zeros(2, padded(width), k)
    both[:, :width] = bits.view(2, width, k)
    panels = both.view(2, padded(width) // HALF, HALF, k).transpose(0, 1).reshape(2 * padded(width), k)
    pack(panels.view(weight.dtype), out)


def _panels(packed: Tensor, n: int, k: int) -> list[Tensor]:
    """Returns the panels as [panels, width or (groups, halves, lanes), k]: those of 64, then at most one of 32."""
    bits, full = packed.view(_BITS[packed.itemsize]), padded(n) // PANEL
    return [
        _rows_first(part.view(num, k, width), k)
        for part, num, width in (
            (bits[: full * PANEL * k], full, PANEL),
            (bits[full * PANEL * k :], padded(n) % PANEL // HALF, HALF),
        )
    ]


def _rows_first(panels: Tensor, k: int) -> Tensor:
    num, _, width = panels.shape
    if panels.itemsize == 2:
        return panels.view(num, k, width // HALF, HALF // 2, 2).permute(0, 2, 4, 3, 1)
    return panels.transpose(1, 2)


def _stacks(bits: Tensor) -> list[Tensor]:
    """Returns the rows of a padded weight in the shapes of `_panels`."""
    (n, k), full = bits.shape, bits.shape[0] // PANEL
    stacks = [(bits[: full * PANEL], full, PANEL), (bits[full * PANEL :], n % PANEL // HALF, HALF)]
    if bits.itemsize == 2:
        return [part.view(num, width // HALF, 2, HALF // 2, k) for part, num, width in stacks]
    return [part.view(num, width, k) for part, num, width in stacks]
