# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twins of kernels/activation.py, for packed rows and for slabs with few filled rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_serve.kernels.forms import FP8_GROUP, SILU, Activation, num_groups
from moe_serve.kernels.triton.mode import as_dtype
from moe_serve.kernels.triton.quantize import quantize_groups

PROPAGATE = tl.constexpr(tl.PropagateNan.ALL)
GROUPS_PER_PROGRAM = 8  # 1024 outputs: 8 for each of 128 threads, one 16-byte load of gate and one of up


def silu_mul_triton(
    gate_up: Tensor, rows_per_slot: Tensor | None = None, activation: Activation = SILU, logits: Tensor | None = None
) -> Tensor:
    """gate_up: [rows, 2 n] -> [rows, n]; or [slots, capacity, 2 n] with rows_per_slot [slots] int64 on the device,
    where rows beyond a slot's count are neither read nor written.

    logits: [rows, 1], each row of the result is multiplied by the sigmoid of its own; None: by nothing
    """
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, rows_per_slot, out, None, activation, logits)
    return out


def silu_mul_quantize_triton(gate_up: Tensor, rows_per_slot: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns silu_mul_triton's result quantised: (q [.., n] float8_e4m3fn, scale [.., ceil(n / 128)] float32)"""
    *rows, width = gate_up.shape
    q = torch.empty(*rows, width // 2, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(*rows, num_groups(width // 2), dtype=torch.float32, device=gate_up.device)
    _launch(gate_up, rows_per_slot, q, scale)
    return q, scale


def _launch(
    gate_up: Tensor, rows_per_slot: Tensor | None, out: Tensor, scale: Tensor | None, activation: Activation = SILU,
    logits: Tensor | None = None,
) -> None:  # fmt: skip
    width = out.shape[-1]
    num_rows = gate_up.numel() // gate_up.shape[-1] if gate_up.shape[-1] else 0
    if num_rows == 0:
        return
    capacity = 0 if rows_per_slot is None else gate_up.shape[1]
    grid = (num_rows, triton.cdiv(num_groups(width), GROUPS_PER_PROGRAM))
    silu_mul_kernel[grid](
        gate_up, rows_per_slot, logits, out, scale, width, num_groups(width), capacity, activation.alpha,
        activation.limit, CLAMPED=activation.kind == "clamped_swiglu", GATED=logits is not None,
        SLABS=rows_per_slot is not None, QUANTIZE=scale is not None, GROUPS=GROUPS_PER_PROGRAM, GROUP=FP8_GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["alpha", "limit"])
def silu_mul_kernel(
    gate_up, rows_per_slot, logits, out, scale, width, num_groups, capacity, alpha, limit,
    CLAMPED: tl.constexpr, GATED: tl.constexpr, SLABS: tl.constexpr, QUANTIZE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    filled = True
    if SLABS:
        # The grid must cover every row that may be filled, so most programs of a decode step end here.
        filled = row % capacity < tl.load(rows_per_slot + row // capacity)
    if filled:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:  # NaN stays
            gate = tl.minimum(gate, limit, PROPAGATE)
            up = tl.maximum(tl.minimum(up, limit, PROPAGATE), -limit, PROPAGATE)
            product = (up + 1) * gate / (1 + tl.exp(-alpha * gate))
        else:
            product = gate / (1 + tl.exp(-gate)) * up
        if GATED:
            product /= 1 + tl.exp(-tl.load(logits + row).to(tl.float32))
        if QUANTIZE:
            quantized, scales = quantize_groups(product)
            tl.store(out + row * width + column, quantized, mask=inside)
            tl.store(scale + row * num_groups + group, scales, mask=group < num_groups)
        else:
            tl.store(out + row * width + column, as_dtype(product, out.dtype.element_ty), mask=inside)
