"""Arithmetic with the same bits in numpy and in C, on every processor: no library's exp, no sum in an order of its own.

Plans compare gains, and gains that differ in the last bit decide ties differently. So both forms of a search use these.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEAST_EXPONENT, MOST_EXPONENT = -700.0, 700.0  # results stay normal numbers
LOG2_E, LN_2_HIGH, LN_2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
TO_INTEGER = 1.5 * 2.0**52  # adding and subtracting it rounds to an integer, half to even
TERMS = tuple(1.0 / float(math.factorial(power)) for power in range(13, -1, -1))


def repeatable_exp(x: Floats) -> Floats:
    """Returns e^x to two units in the last place, x clipped to +-700. edits.c has its twin."""
    x = np.minimum(np.maximum(x, LEAST_EXPONENT), MOST_EXPONENT)
    power = (x * LOG2_E + TO_INTEGER) - TO_INTEGER
    rest = (x - power * LN_2_HIGH) - power * LN_2_LOW
    value = np.full_like(rest, TERMS[0])
    for term in TERMS[1:]:
        value = value * rest + term
    scale: Floats = ((power.astype(np.int64) + 1023) << 52).view(np.float64)
    return value * scale


def sum_in_order(values: Floats, axis: int) -> Floats:
    """Returns the sum along an axis, added from its first entry to its last; numpy's own sum adds in blocks."""
    total = np.zeros(np.delete(values.shape, axis))
    for part in np.moveaxis(values, axis, 0):
        total = total + part
    return total
