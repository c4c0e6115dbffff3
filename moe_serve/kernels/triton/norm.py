# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twins of the norms of kernels/rows.py: residual, sum and norm in one launch, each row read once."""

import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.triton.mode import as_dtype

VALUES_PER_WARP = 1024  # 32 for each thread; twice as many spill with float32 rows


def norm_triton(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, factor: float, out: Tensor
) -> Tensor:
    """Adds factor * delta to x in place, if given, and writes the normed rows to out, which may be x.

    x, delta, out: [rows, width], rows may be strided;  weight, bias: [width]; with a bias the mean is taken out
    """
    width = x.shape[-1]
    x, out_rows = (t if t.dim() == 2 else t.view(-1, width) for t in (x, out))
    if out.numel():
        block = triton.next_power_of_2(width)
        norm_kernel[(x.shape[0],)](
            x, delta, weight, bias, out_rows, x.stride(0), 0 if delta is None else delta.stride(0), out_rows.stride(0),
            width, eps, factor, BLOCK=block, ADDS=delta is not None, SCALES=factor != 1, CENTRES=bias is not None,
            num_warps=max(1, min(16, block // VALUES_PER_WARP)),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["eps", "factor"])
def norm_kernel(
    x, delta, weight, bias, out, x_stride, delta_stride, out_stride, width, eps, factor,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, SCALES: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = x.dtype.element_ty
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(delta + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        if SCALES:
            added = as_dtype(added * factor, kind).to(tl.float32)  # rounded by itself, as the plain form does
        total = as_dtype(wide + added, kind)
        tl.store(x + row * x_stride + column, total, mask=inside)
        wide = total.to(tl.float32)  # what the next layer reads
    if CENTRES:
        wide = tl.where(inside, wide - tl.sum(wide) / width, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)
    normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRES:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, as_dtype(normed, out.dtype.element_ty), mask=inside)
