# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The differences between a GPU and Triton's interpreter that kernels must know.

Under TRITON_INTERPRET=1 (set before triton is imported) kernels run on CPU tensors, one program after the other. This
is for tests only, far too slow to serve with. Three things differ there, and kernels branch on INTERPRET only for them:
`tl.dot` multiplies the raw bits of bf16 operands, a float32 -> e4m3 cast rounds wrongly at binade edges, and a
float32 -> bf16 cast truncates.
"""

import torch
import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of programs that a persistent grid starts; off the GPU (interpreter, compile checks) a few."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2


@triton.jit
def as_e4m3(x):
    """Returns float32 x, |x| <= 448, rounded to the nearest e4m3 (ties to even)."""
    if INTERPRET:
        # Rounded by hand to a value that e4m3 holds, so that the interpreter's cast has nothing left to round.
        bits = x.to(tl.int32, bitcast=True)
        kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        normal = kept.to(tl.float32, bitcast=True)
        subnormal = (tl.abs(x) + 16384.0) - 16384.0  # 2^14: its last bit is worth 2^-9, the step below 2^-6
        sign = bits & -2147483648  # -0 keeps its sign
        subnormal = (subnormal.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def quantised(x, dtype: tl.constexpr):
    """Returns float32 rows x [rows, elements] in int8 or e4m3, and their scales [rows] (kernels/quantised.py)."""
    most: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    scales = amax / most + tl.sum(x * 0.0, 1)
    x = x * (most / amax)[:, None]
    x = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -most), most)
    if dtype == tl.int8:
        return ((x + 12582912.0) - 12582912.0).to(tl.int8), scales  # rounds to an integer, ties to even
    else:
        return as_e4m3(x), scales


@triton.jit
def as_dtype(x, dtype: tl.constexpr):
    """Returns float32 x rounded to the nearest `dtype` (ties to even)."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Returns numbers of a cache, which are of this dtype or of 8 bits, in `dtype`: exact."""
    if INTERPRET and x.dtype != dtype:
        return as_dtype(x.to(tl.float32), dtype)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b):
    """Returns the float32 product of two tiles."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")  # of float32 operands, which would else lose 13 bits


@triton.jit
def multiply_add(weight, values, total):
    """Returns weight * values + total, rounded once to float32: the step that defines the ordered combine."""
    weights = tl.zeros_like(values) + weight
    if INTERPRET:
        # float64 holds the product exactly, so that rounding the sum is the rounding of a fused multiply-add.
        return (weights.to(tl.float64) * values.to(tl.float64) + total.to(tl.float64)).to(tl.float32)
    return tl.fma(weights, values, total)
