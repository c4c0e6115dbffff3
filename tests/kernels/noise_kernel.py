"""The noise of the sampling kernel alone."""

import triton
import triton.language as tl

from moe_serve.kernels.triton.sampling import gumbel, rough_gumbel


@triton.jit
def noise_kernel(bits, rough, exact, SIZE: tl.constexpr):
    """bits, rough, exact: [SIZE]"""
    at = tl.arange(0, SIZE)
    tl.store(rough + at, rough_gumbel(tl.load(bits + at)))
    tl.store(exact + at, gumbel(tl.load(bits + at)))
