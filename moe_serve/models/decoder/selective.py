"""State-space layers of Mamba's first version: they keep a state for each request instead of keys and values."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_serve.kernels.causal_conv import ConvWeights
from moe_serve.kernels.cpu.operations import AnyLinear
from moe_serve.kernels.forms import SelectiveShape
from moe_serve.kernels.selective_space import SelectiveRows, SelectiveWeights, in_tiles
from moe_serve.models.decoder.conv import take_conv
from moe_serve.models.decoder.step import Step
from moe_serve.models.decoder.weight_forms import WeightForms


@dataclass(frozen=True, eq=False)
class SelectiveLayer:
    """A state-space layer (kernels/selective_space.py), with norms over what its channels share (Jamba).

    index:   of the cache's states
    project: x -> rows as the shape says;  conv: of their first columns
    shared:  of convolved rows, to what steps are made of, keys and queries;  norms: of these, in this order
    steps:   of the first of these;  out: of what the channels give
    """

    index: int
    project: AnyLinear
    conv: ConvWeights
    shared: AnyLinear
    norms: tuple[Tensor, Tensor, Tensor]
    eps: float
    steps: AnyLinear
    weights: SelectiveWeights
    out: AnyLinear

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. The states of the step's requests go on by its rows."""
        shape = self.weights.shape
        rows = do.linear("selective_in", self.project, x)
        v = do.convolve(rows, self.conv, self.index)
        shared, column = do.linear("selective_shared", self.shared, v), 0
        for norm in self.norms:
            do.rms_norm_(shared[:, column : column + norm.shape[0]], norm, self.eps)
            column += norm.shape[0]
        steps = do.linear("selective_steps", self.steps, shared[:, : shape.rank])
        given = SelectiveRows(v, steps, shared[:, shape.rank :], rows[:, shape.inner :])
        return do.linear("attention_out", self.out, do.selective_space_of(given, self.weights, self.index))


def selective_layer(
    shape: SelectiveShape, eps: float, index: int, weights: dict[str, Any], forms: WeightForms
) -> SelectiveLayer:
    """Takes the weights of a layer (named as in weight_plan.py) out of `weights`. index: of the cache's states"""
    project, shared, steps, out = (
        forms.take_linear(weights, f"selective_{name}") for name in ("in", "shared", "steps", "out")
    )
    step, keys, queries = (weights.pop(f"selective_{name}_norm") for name in ("step", "key", "query"))
    decay, step_bias, skip = (weights.pop(f"selective_{name}") for name in ("decay", "step_bias", "skip"))
    states = SelectiveWeights(shape, in_tiles(-decay.exp()), step_bias, skip)
    conv = take_conv(weights, "selective_conv", shape.conv)
    return SelectiveLayer(index, project, conv, shared, (step, keys, queries), eps, steps, states, out)
