# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twins of kernels/activation.py, for rows of which gate and up are in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import SILU, Activation
from moe_serve.kernels.triton.mode import as_dtype

PROPAGATE = tl.constexpr(tl.PropagateNan.ALL)
BLOCK = 1024  # outputs of one program: 8 for each of 128 threads, one 16-byte load of gate and one of up


def silu_mul_triton(gate_up: Tensor, activation: Activation = SILU, logits: Tensor | None = None) -> Tensor:
    """gate_up: [.., 2 n] -> [.., n]

    logits: [rows, 1], each row of the result is multiplied by the sigmoid of its own; None: by nothing
    """
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        silu_mul_kernel[(out.numel() // width, triton.cdiv(width, BLOCK))](
            gate_up, logits, out, width, activation.alpha, activation.limit,
            CLAMPED=activation.kind == "clamped_swiglu", GATED=logits is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["alpha", "limit"])
def silu_mul_kernel(
    gate_up, logits, out, width, alpha, limit, CLAMPED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    product = activated(gate, up, alpha, limit, CLAMPED)
    if GATED:
        product /= 1 + tl.exp(-tl.load(logits + row).to(tl.float32))
    tl.store(out + row * width + column, as_dtype(product, out.dtype.element_ty), mask=inside)


@triton.jit
def activated(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """Returns what an MLP has between its products, of float32 blocks; NaN stays."""
    if CLAMPED:
        gate = tl.minimum(gate, limit, PROPAGATE)
        up = tl.maximum(tl.minimum(up, limit, PROPAGATE), -limit, PROPAGATE)
        product = (up + 1) * gate / (1 + tl.exp(-alpha * gate))
    else:
        product = gate / (1 + tl.exp(-gate)) * up
    return product
