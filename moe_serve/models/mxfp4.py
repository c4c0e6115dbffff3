"""Reads MXFP4, in which gpt-oss stores its experts: the microscaling format of OCP (arXiv:2310.10537).

A row is cut into blocks of 32 values of four bits, e2m1: sign, two bits of exponent, one of mantissa. A block shares
one scale, a power of two (e8m0). Two values lie in a byte, the first in its lower half. Every product of value and
scale is a bfloat16, so nothing is rounded.
"""

import torch
from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16)
_CODES = torch.arange(256)
_PAIRS = torch.stack((_VALUES[_CODES & 15], _VALUES[_CODES >> 4]), dim=1).view(torch.int32).flatten()  # of each byte
_ROWS = 64  # that are dequantised together
_BIAS = 127  # of the scales' exponents
_SCALES = torch.ldexp(torch.ones(256), (_CODES - _BIAS).int()).bfloat16()
_SCALES[255] = torch.nan


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the weight that blocks stand for, [n, k] bfloat16.

    blocks: [n, k / 32, 16] uint8;  scales: [n, k / 32] uint8, 255 = not a number
    """
    n, blocks_per_row, bytes_per_block = blocks.shape
    weight = torch.empty(n, blocks_per_row, 2 * bytes_per_block, dtype=torch.bfloat16)
    # Few rows at a time: torch looks up by whole numbers of four bytes, twice the memory of the weight for all rows.
    for first in range(0, n, _ROWS):
        rows = slice(first, first + _ROWS)
        pairs = _PAIRS[blocks[rows].int()].view(torch.bfloat16)
        torch.mul(pairs, _SCALES[scales[rows].int()][..., None], out=weight[rows])
    return weight.flatten(-2)
