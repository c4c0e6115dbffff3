"""MXFP4, in which gpt-oss stores its experts, read and written: the microscaling format of OCP (arXiv:2310.10537).

A row is cut into blocks of 32 values of four bits, e2m1: sign, two bits of exponent, one of mantissa. A block shares
one scale, a power of two (e8m0). Two values lie in a byte, the first in its lower half. Every product of value and
scale is a bfloat16, so nothing is rounded.
"""

import torch
from torch import Tensor

from moe_serve.kernels.forms import MXFP4_BLOCK

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16)
_CODES = torch.arange(256)
_PAIRS = torch.stack((_VALUES[_CODES & 15], _VALUES[_CODES >> 4]), dim=1).view(torch.int32).flatten()  # of each byte
_ROWS = 64  # that are dequantised together
_BIAS = 127  # of the scales' exponents
_LARGEST = 2  # exponent of the largest number, 6
_ROUND_UP_AT = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # halfway between positive numbers
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


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight [n, k] float32 rounded to MXFP4: blocks [n, k / 32, 16] uint8, scales [n, k / 32] uint8.

    A block's scale is the power of two that brings its largest value to the exponent of the largest number, as in the
    specification; what is still larger becomes that number, and halfway goes towards zero. k is a multiple of 32.
    """
    rows = weight.reshape(*weight.shape[:-1], -1, MXFP4_BLOCK)
    exponents = rows.abs().amax(-1).frexp().exponent.long() - 1 - _LARGEST + _BIAS
    scales = exponents.clamp(0, 254)
    scaled = torch.ldexp(rows, (_BIAS - scales)[..., None])
    codes = torch.bucketize(scaled.abs(), _ROUND_UP_AT).to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales.to(torch.uint8)
