"""The elementwise middle of an MLP: silu(gate) * up, alone, limited or quantised at once, gpt-oss' form, relu(up)^2."""

import torch
from torch import Tensor

from moe_serve.kernels.forms import RELU2, SILU, Activation
from moe_serve.kernels.quantised import quantize_reference


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up: [..., 2 n], gate first -> [..., n] same dtype"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Same contract as the reference; Triton on CUDA. A row's bits depend on that row only, for any n.

    On CPU the halves are strided views, so the loop runs row by row: its ragged tail, which uses other instructions,
    hits the same elements of every row.
    """
    if gate_up.is_cuda:
        from moe_serve.kernels.triton.silu_mul import silu_mul_triton

        return silu_mul_triton(gate_up.contiguous())
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def silu_mul_quantize_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises the product from float32: rounding it to bf16 first would cost accuracy and save nothing.

    gate_up: [rows, 2 n], gate first -> (q [rows, n] float8_e4m3fn, scale [rows, ceil(n / 128)] float32)
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantize_reference(gate / (1 + torch.exp(-gate)) * up)


def activate_quantize(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Quantises what `activate` returns, on CPUs. A row's bits depend on that row only, for any n.

    With SiLU the contract of silu_mul_quantize_reference.
    """
    return quantize_reference(activate(gate_up.float(), activation))


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns the middle of an MLP; gate_up, [..., activation.stacks x n], may be used up. Triton on CUDA."""
    if activation == SILU:
        return silu_mul(gate_up)
    if activation == RELU2:
        return gate_up.relu_().square_()
    if gate_up.is_cuda:
        from moe_serve.kernels.triton.silu_mul import silu_mul_triton

        return silu_mul_triton(gate_up.contiguous(), activation)
    if activation.kind == "clamped_silu":
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=activation.limit)
        up.clamp_(-activation.limit, activation.limit)
        return silu_mul(gate_up)
    return clamped_swiglu_(gate_up, activation)


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
