"""Random numbers, logarithms and weights of tokens, as tensors of any device.

A token's noise is a pure function of (seed, output index, token id): philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) gives a uniform number, which becomes Gumbel noise. Everything here is integers
and float64 additions, multiplications and divisions, each rounded by itself, so that every device and the compiled
kernel (kernels/cpu/gumbel.h) compute the same bits; a library's log and exp differ in their last bits.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = TypeVar("Integers", Tensor, NDArray[np.int64])

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LN_2 = 0.69314718055994530942
_LOG_SERIES = (  # of atanh: 2 / 3, 2 / 5, ... fitted, the last one first (fdlibm's numbers)
    1.479819860510658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)
_EXP_SERIES = (1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_UNIT_BITS = 40  # a weight of 1 is 2**40: sums of a million tokens fit into int64


def natural_log(x: Tensor) -> Tensor:
    """Returns ln(x) of positive, normal float64 numbers; the last bit may be off, alike everywhere."""
    bits = x.view(torch.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52  # x = 2**exponent * m, with m from sqrt(1/2) to sqrt(2)
    m = (bits - (exponent << 52)).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    return exponent.to(torch.float64) * _LN_2 + s * (_series(_LOG_SERIES, z) * z + 2.0)


def gumbel(
    seeds: Tensor, output_indices: Tensor, token_ids: Tensor, log: Callable[[Tensor], Tensor] = natural_log
) -> Tensor:
    """Returns one Gumbel(0, 1) number for each token id, float64; the tensors, int64, are broadcast.

    log: torch.log is five times as fast, but a device's own in the last bits
    """
    if token_ids.is_cuda:
        bits = _random_bits(seeds, output_indices, token_ids)
    else:  # numpy takes two thirds of the time of torch for these operations, and less for few ids
        bits = torch.from_numpy(_random_bits(seeds.numpy(), output_indices.numpy(), token_ids.numpy()))
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-53)  # in (0, 1), never an end
    return log(log(uniform).neg_()).neg_()


def _random_bits(seeds: Integers, output_indices: Integers, token_ids: Integers) -> Integers:
    """Returns 53 random bits for each token id."""
    high, low, _, _ = philox(token_ids, output_indices, (seeds & _LOW, seeds >> 32))
    high >>= 5
    high <<= 26
    low >>= 6
    high += low
    return high


def philox(
    first: Integers, second: Integers, key: tuple[Integers, Integers]
) -> tuple[Integers, Integers, Integers, Integers]:
    """Returns the four 32-bit words of philox4x32-10, as int64; tensors and numpy arrays give the same.

    first, second: int64, of which 32 bits are the first two counter words; the other two are zero
    key:           two of int64 below 2**32; all four are broadcast
    """
    c0: Any = (first & _LOW) + key[0] * 0
    c1: Any = second + c0 * 0
    c2, c3 = c0 * 0, c0 * 0
    k0, k1 = key
    for _ in range(10):
        c0 *= _MULTIPLIERS[0]  # products of 64 bits, the highest one as the sign
        c2 *= _MULTIPLIERS[1]
        high0, high1 = c0 >> 32, c2 >> 32
        high1 ^= c1
        high1 ^= k0
        high1 &= _LOW
        high0 ^= c3
        high0 ^= k1
        high0 &= _LOW
        c0, c1, c2, c3 = high1, c2, high0, c0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def token_weights(scaled: Tensor) -> Tensor:
    """Returns exp(scaled) in units of 2**-40, int64, for float64 numbers of at most 0; accurate to 3e-10.

    Sums of these integers are exact, so they do not depend on the order of the tokens.
    """
    s = scaled.clamp(min=-40.0)
    n = (s * (1 / _LN_2)).round()
    p = _series(_EXP_SERIES, s - n * _LN_2)
    unit = ((n.to(torch.int64) + (1023 + _UNIT_BITS)) << 52).view(torch.float64)  # 2**(n + 40)
    return (p * unit).round().to(torch.int64)


def _series(factors: tuple[float, ...], x: Tensor) -> Tensor:
    """Returns the polynomial with these factors, that of the highest power first."""
    total = x * factors[0] + factors[1]
    for factor in factors[2:]:
        total = total * x + factor
    return total
