"""Layers of a gated short convolution (LFM2): they keep a few rows of each request instead of keys and values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_serve.kernels.causal_conv import ConvWeights
from moe_serve.kernels.cpu.operations import AnyLinear
from moe_serve.kernels.forms import ConvShape, GatedConvShape
from moe_serve.models.decoder.step import Step
from moe_serve.models.decoder.weight_forms import WeightForms


@dataclass(frozen=True, eq=False)
class ConvLayer:
    """A gated short convolution (kernels/causal_conv.py), of one layer.

    index:   of the cache's states
    project: x -> rows as the shape says;  out: of what the convolution gives
    """

    index: int
    project: AnyLinear
    weights: ConvWeights
    out: AnyLinear

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. The states of the step's requests go on by its rows."""
        rows = do.linear("conv_in", self.project, x)
        return do.linear("attention_out", self.out, do.convolve(rows, self.weights, self.index))


def conv_layer(shape: GatedConvShape, index: int, weights: dict[str, Any], forms: WeightForms) -> ConvLayer:
    """Takes the weights of a layer (named as in weight_plan.py) out of `weights`. index: of the cache's states"""
    project, out = (forms.take_linear(weights, name) for name in ("conv_in", "conv_out"))
    return ConvLayer(index, project, take_conv(weights, "conv", shape.conv), out)


def take_conv(weights: dict[str, Any], name: str, shape: ConvShape) -> ConvWeights:
    """Takes a convolution out of the weights of a layer, with its bias where the model has one."""
    weight = weights.pop(name)[:, 0].T.contiguous()
    bias = weights.pop(f"{name}_bias", None)
    return ConvWeights(shape, weight, torch.zeros_like(weight[0]) if bias is None else bias)
