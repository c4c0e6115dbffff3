"""Layer normalisation by a compiled kernel; the contract is that of kernels/norm.py, for float32."""

import torch
from torch import Tensor

from moe_serve.kernels.cpu import checks
from moe_serve.kernels.cpu.checks import dense
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.rows import float_bits
from moe_serve.kernels.norm import LayerNorm


def layer_norm(x: Tensor, delta: Tensor | None, norm: LayerNorm, eps: float) -> Tensor:
    """Adds delta, if given, to x in place, and returns the normed sum. x, delta: [rows, width] of any row stride"""
    assert checks.rows(x), f"{x.dtype}, strides {x.stride()}"
    assert delta is None or (checks.rows(delta, x.shape[1]) and len(delta) == len(x)), "delta is not like x"
    for name, vector in (("weight", norm.weight), ("bias", norm.bias)):
        assert dense(vector, torch.float32, x.shape[1]), f"{name} {vector.dtype} {tuple(vector.shape)}"
    out = x.new_empty(x.shape)
    deltas = (0, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
    cpu_library().call.layer_norm(
        x.data_ptr(), deltas[0], *x.shape, x.stride(0), deltas[1], norm.weight.data_ptr(), norm.bias.data_ptr(),
        float_bits(eps), out.data_ptr(),
    )  # fmt: skip
    return out
