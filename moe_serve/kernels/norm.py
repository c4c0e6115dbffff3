"""Root mean square normalisation (arXiv:1910.07467) and layer normalisation (arXiv:1607.06450), each row by itself."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., width], weight: [width] -> like x; computed in float32, scaled in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same contract as the reference, in one call."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """The same in place. x: [rows, width], may be a slice of wider rows"""
    x.copy_(rms_norm(x, weight, eps))


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """Adds factor * delta to x in place, and returns the normed sum, like x. delta: like x, not x itself"""
    # The product is rounded by itself: fused with the sum in some of a loop's instructions only, a row's bits would
    # depend on its place in the batch.
    x.add_(delta if factor == 1 else delta * factor)
    return rms_norm(x, weight, eps)


def rms_norm_heads_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalises every head of x in place. x: [tokens, heads, head_dim], may be a view; weight: [heads, head_dim]"""
    torch.mul(functional.rms_norm(x, (x.shape[-1],), None, eps), weight, out=x)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """The parameters of a norm that takes the mean out of a row. weight, bias: [width]"""

    weight: Tensor
    bias: Tensor


def layer_norm_reference(x: Tensor, norm: LayerNorm, eps: float) -> Tensor:
    """x: [..., width] -> like x; computed in float32."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * norm.weight + norm.bias).to(x.dtype)


def layer_norm(x: Tensor, delta: Tensor | None, norm: LayerNorm, eps: float) -> Tensor:
    """Adds delta, if given, to x in place, and returns the normed sum, like x. delta: like x, not x itself"""
    if delta is not None:
        x.add_(delta)
    return functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, eps)
