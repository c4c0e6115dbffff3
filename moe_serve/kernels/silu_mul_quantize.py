"""silu(gate) x up, quantised at once: the middle of an FP8 expert without a trip through memory in between.

The product is quantised as it comes, in float32; rounding it to bf16 first would cost accuracy and save nothing.
"""

import torch
from torch import Tensor

from moe_serve.kernels.quantize import quantize_reference


def silu_mul_quantize_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up: [rows, 2 n], gate first -> (q [rows, n] float8_e4m3fn, scale [rows, ceil(n / 128)] float32)"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantize_reference(gate / (1 + torch.exp(-gate)) * up)


def silu_mul_quantize(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; Triton on CUDA."""
    if gate_up.is_cuda:
        from moe_serve.kernels.silu_mul_triton import silu_mul_quantize_triton

        return silu_mul_quantize_triton(gate_up)
    return silu_mul_quantize_reference(gate_up)
