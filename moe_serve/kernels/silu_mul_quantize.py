"""silu(gate) x up, quantised at once: the middle of an FP8 expert, without a round trip through memory.

The product is quantised from float32; rounding it to bf16 first would cost accuracy and save nothing.
"""

import torch
from torch import Tensor

from moe_serve.kernels.quantize import quantize_reference
from moe_serve.kernels.silu_mul import silu_mul


def silu_mul_quantize_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up: [rows, 2 n], gate first -> (q [rows, n] float8_e4m3fn, scale [rows, ceil(n / 128)] float32)"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantize_reference(gate / (1 + torch.exp(-gate)) * up)


def silu_mul_quantize(gate_up: Tensor, rows_per_slot: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; Triton on CUDA. A row's bits depend on that row only, for any n.

    On CUDA gate_up may also be slabs [slots, capacity, 2 n] with rows_per_slot [slots]: the first rows are filled.
    """
    if gate_up.is_cuda:
        from moe_serve.kernels.triton.silu_mul import silu_mul_quantize_triton

        return silu_mul_quantize_triton(gate_up, rows_per_slot)
    return quantize_reference(silu_mul(gate_up.float()))
