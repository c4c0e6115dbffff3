"""A residual of several streams, which each sublayer sums up, adds to and mixes: manifold-constrained hyper-connections
(arXiv:2512.24880).

A row x has n streams of H columns. Three kinds of weights follow from it, of which each has a factor, and each number a
base: they are products of x with a matrix, divided by the root of the mean square of x. A sublayer takes the sum of
pre[k] x[k], with pre = sigmoid + eps. Of what it gives, y, a row becomes post[k] y + the sum of mix[l, k] x[l], with
post = 2 sigmoid, and mix the softmax of n rows + eps, whose columns, then rows, then columns .. are divided by their
sums + eps.

Everything is computed in float32. A row's bits depend on that row alone: sums go in order, and nothing of a batch falls
in the ragged end of a loop of exp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.kernels.forms import StreamShape
from moe_serve.kernels.topk_gate import by_row


@dataclass(frozen=True, eq=False)
class StreamWeights:
    """What makes products into weights, float32. scale: [3], or [1] without mixing;  base: [shape.num_weights]"""

    shape: StreamShape
    scale: Tensor
    base: Tensor


def spread_rows(x: Tensor, streams: int) -> Tensor:
    """Returns rows x [T, H] as streams that are alike, [T, streams * H]."""
    return x.repeat(1, streams)


def sum_streams(x: Tensor, products: Tensor, weights: StreamWeights) -> Tensor:
    """Returns the sum of the streams that a sublayer takes, [T, H]; products become weights in place.

    x: [T, streams * H];  products: [T, shape.num_weights] of x and the matrix
    """
    shape, n = weights.shape, weights.shape.streams
    wide = x.float()
    products.div_((wide.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt_())
    factors = weights.scale.repeat_interleave(torch.tensor([n, n, n * n] if shape.mixes else [n]))
    products.mul_(factors).add_(weights.base)
    products[:, :n] = by_row(torch.sigmoid, products[:, :n].contiguous()) + shape.eps
    if shape.mixes:
        products[:, n : 2 * n] = 2 * by_row(torch.sigmoid, products[:, n : 2 * n].contiguous())
        products[:, 2 * n :] = _balanced(products[:, 2 * n :].reshape(-1, n, n), shape).flatten(1)
    return _in_order(wide.view(-1, n, shape.width) * products[:, :n, None]).to(x.dtype)


def mix_streams_(x: Tensor, delta: Tensor, mixing: Tensor, weights: StreamWeights) -> None:
    """Adds what a sublayer gives to the streams, which it mixes, in place.

    x: [T, streams * H];  delta: [T, H];  mixing: [T, shape.num_weights], what sum_streams left of products
    """
    n = weights.shape.streams
    streams, added, mixed = x.float().view(-1, n, delta.shape[1]), delta.float(), []
    mix = mixing[:, 2 * n :].reshape(-1, n, n)
    for k in range(n):
        total = mixing[:, n + k, None] * added
        for other in range(n):
            total = total + mix[:, other, k, None] * streams[:, other]
        mixed.append(total)
    x.copy_(torch.cat(mixed, 1))


def _balanced(mix: Tensor, shape: StreamShape) -> Tensor:
    """Returns the weights of streams for one another, [T, n, n]. mix: before the softmax"""
    shifted = (mix - mix.amax(-1, keepdim=True)).flatten(1)
    mix = by_row(torch.exp, shifted).view(mix.shape)
    mix = mix / _in_order(mix.transpose(1, 2))[..., None] + shape.eps
    for number in range(shape.rounds):
        if number:
            mix = mix / (_in_order(mix.transpose(1, 2))[..., None] + shape.eps)
        mix = mix / (_in_order(mix)[:, None] + shape.eps)
    return mix


def _in_order(parts: Tensor) -> Tensor:
    """Returns the sum over the second dimension, one after the other."""
    total = parts[:, 0]
    for part in parts.unbind(1)[1:]:
        total = total + part
    return total
