"""State-space layers of Mamba-2: they keep a state for each request instead of keys and values of its tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_serve.kernels.causal_conv import ConvWeights
from moe_serve.kernels.cpu.operations import AnyLinear
from moe_serve.kernels.forms import MambaShape
from moe_serve.kernels.state_space import StateSpaceWeights
from moe_serve.models.decoder.conv import take_conv
from moe_serve.models.decoder.step import Step
from moe_serve.models.decoder.weight_forms import WeightForms


@dataclass(frozen=True, eq=False)
class MambaLayer:
    """A state-space layer (kernels/state_space.py).

    index:   of the cache's states
    project: x -> rows as the shape says;  conv: of their middle columns
    norm:    [inner], over the rows of each group, behind their gates
    out:     of what is normed
    """

    index: int
    project: AnyLinear
    conv: ConvWeights
    weights: StateSpaceWeights
    norm: Tensor
    eps: float
    out: AnyLinear

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. The states of the step's requests go on by its rows."""
        shape = self.weights.shape
        rows = do.linear("mamba_in", self.project, x)
        mixed = do.convolve(rows, self.conv, self.index)
        given = do.state_space_of(mixed, rows[:, -shape.heads :], self.weights, self.index)
        do.gated_rms_norm_(given, rows[:, : shape.inner], self.norm, self.eps, shape.groups)
        return do.linear("attention_out", self.out, given)


def mamba_layer(shape: MambaShape, eps: float, index: int, weights: dict[str, Any], forms: WeightForms) -> MambaLayer:
    """Takes the weights of a layer (named as in weight_plan.py) out of `weights`. index: of the cache's states"""
    project, out = (forms.take_linear(weights, name) for name in ("mamba_in", "mamba_out"))
    conv = take_conv(weights, "mamba_conv", shape.conv)
    decay, step_bias, skip = (weights.pop(f"mamba_{name}") for name in ("decay", "step_bias", "skip"))
    states = StateSpaceWeights(shape, -decay.exp(), step_bias, skip)
    return MambaLayer(index, project, conv, states, weights.pop("mamba_norm"), eps, out)
