"""Layers of lightning attention (MiniMax-01): they keep a state for each request instead of keys and values.

    S = exp(-slope) * S + k v;  out = q S

It is the recurrence of state-space heads (kernels/state_space.py) with steps of 1, each with keys and queries of its
own; q, k and v go through silu.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import AnyLinear
from moe_serve.kernels.forms import LightningShape
from moe_serve.kernels.state_space import StateSpaceWeights
from moe_serve.models.decoder.step import Step
from moe_serve.models.decoder.weight_forms import WeightForms, take_rows

NORM_EPS = 1e-6  # whatever rms_norm_eps says of the other norms
_STEP_OF_ONE = math.log(math.e - 1)  # what softplus makes 1 of


@dataclass(frozen=True, eq=False)
class LightningLayer:
    """Lightning attention, of one layer.

    index:   of the cache's states
    project: x -> rows as the shape says
    steps:   [1, heads], zeros beside the weights' bias
    norm:    [inner], over the rows of all heads, before their gates
    out:     of what is gated
    """

    index: int
    project: AnyLinear
    weights: StateSpaceWeights
    steps: Tensor
    norm: Tensor
    out: AnyLinear

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. The states of the step's requests go on by its rows."""
        rows, inner = do.linear("lightning_in", self.project, x), self.weights.shape.inner
        mixed = rows[:, :-inner]
        do.gate_(mixed, mixed)  # silu
        given = do.state_space_of(mixed, self.steps.expand(x.shape[0], -1), self.weights, self.index)
        do.rms_norm_(given, self.norm, NORM_EPS)
        do.gate_(given, rows[:, -inner:])
        return do.linear("attention_out", self.out, given)


def lightning_layer(
    shape: LightningShape, index: int, layer_id: int, weights: dict[str, Any], forms: WeightForms
) -> LightningLayer:
    """Takes the weights of a layer (named as in weight_plan.py) out of `weights`. index: of the cache's states"""
    project, scale = weights.pop("lightning_in"), weights.pop("lightning_in_scale", None)
    norm = weights.pop("lightning_norm")
    heads = torch.arange(4 * shape.inner, device=norm.device).view(-1, shape.width)
    q, k, v = (heads[at : 3 * shape.heads : 3] for at in range(3))
    order = torch.cat((v, k, q, heads[3 * shape.heads :])).flatten()
    scale = None if scale is None else take_rows(scale, order)
    slopes = torch.tensor(shape.slopes(layer_id), device=norm.device)
    steps = torch.zeros_like(slopes)[None]
    states = StateSpaceWeights(shape.space, -slopes, torch.full_like(slopes, _STEP_OF_ONE), torch.zeros_like(slopes))
    out = forms.take_linear(weights, "lightning_out")
    return LightningLayer(index, forms.linear(take_rows(project, order), None, scale), states, steps, norm, out)
