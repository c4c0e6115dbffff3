"""Layer normalisation (arXiv:1607.06450). Every row is reduced by itself, in any batch."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


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
