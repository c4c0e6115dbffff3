# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twins of the operations of kernels/rows.py that multiply each row by a number of its own."""

import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.triton.mode import as_dtype

BLOCK = 1024  # columns of one program: 8 for each of 128 threads, one 16-byte access of bf16


def multiply_rows_triton(x: Tensor, factors: Tensor, out: Tensor, sigmoid: bool = False) -> Tensor:
    """Writes row i of x times factors[i], or times its sigmoid, to out, which may be x. Products are float32.

    x, out: [rows, width], rows may be strided;  factors: [rows, 1], of any float dtype
    """
    if x.numel():
        grid = (x.shape[0], triton.cdiv(x.shape[1], BLOCK))
        strides = x.stride(0), factors.stride(0), out.stride(0)
        multiply_rows_kernel[grid](x, factors, out, *strides, x.shape[1], SIGMOID=sigmoid, BLOCK=BLOCK)
    return out


@triton.jit
def multiply_rows_kernel(
    x, factors, out, x_stride, factor_stride, out_stride, width, SIGMOID: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factors + row * factor_stride).to(tl.float32)
    if SIGMOID:
        factor = 1 / (1 + tl.exp(-factor))
    values = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, as_dtype(values * factor, out.dtype.element_ty), mask=column < width)
