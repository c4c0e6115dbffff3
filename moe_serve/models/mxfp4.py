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
_BIAS = 127  # of the scales' exponents
_SCALES = torch.ldexp(torch.ones(256), (_CODES - _BIAS).int()).bfloat16()
_SCALES[255] = torch.nan


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the weight that blocks stand for, [n, k] bfloat16.

    blocks: [n, k / 32, 16] uint8;  scales: [n, k / 32] uint8, 255 = not a number
    """
    values = _PAIRS[blocks.int()].view(torch.bfloat16)
    return values.mul_(_SCALES[scales.int()][..., None]).flatten(-2)
