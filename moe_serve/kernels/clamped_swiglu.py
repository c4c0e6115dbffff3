"""(up + 1) * gate * sigmoid(alpha * gate) with clamped gate and up: the elementwise middle of gpt-oss' experts."""

import torch
from torch import Tensor

from moe_serve.kernels.activation import Activation


def clamped_swiglu_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up: [..., 2 n], gate first -> [..., n] same dtype"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return ((up + 1) * gate * torch.sigmoid(activation.alpha * gate)).to(gate_up.dtype)


def clamped_swiglu_(gate_up: Tensor, activation: Activation) -> Tensor:
    """Same contract as the reference, for CPUs; gate_up is used up. A row's bits depend on that row only, for any n.

    gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha. Every loop runs over a half of the rows, a strided view,
    and so row by row: its ragged tail, which uses other instructions, hits the same elements of every row.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    up.clamp_(-activation.limit, activation.limit).add_(1)
    gate.clamp_(max=activation.limit).mul_(activation.alpha)
    return torch.nn.functional.silu(gate).mul_(up).div_(activation.alpha)
