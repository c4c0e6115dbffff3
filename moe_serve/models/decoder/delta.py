"""Layers of linear attention: they keep a state for each request instead of keys and values of its tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_serve.kernels.cpu.operations import AnyLinear
from moe_serve.kernels.delta_rule import DeltaWeights
from moe_serve.kernels.forms import DeltaShape
from moe_serve.models.decoder.step import Step
from moe_serve.models.decoder.weight_forms import WeightForms


@dataclass(frozen=True, eq=False)
class DeltaLayer:
    """Linear attention by the gated delta rule (kernels/delta_rule.py), of one layer.

    index:   of the cache's states
    project: x -> rows as the shape says;  out: of what the heads give
    apart:   where the shape has a rank: of a row's last columns to steps, and to gates
    """

    index: int
    project: AnyLinear
    weights: DeltaWeights
    out: AnyLinear
    apart: tuple[AnyLinear, AnyLinear] | None

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. The states of the step's requests go on by its rows."""
        rows, shape, apart = do.linear("delta_in", self.project, x), self.weights.shape, None
        rank = shape.rank
        if rank == 0:
            values = shape.value_heads * shape.value_width
            apart = rows[:, -shape.num_steps - values : -values], rows[:, -values:]
        elif self.apart is not None and rank is not None:
            steps = do.linear("delta_steps", self.apart[0], rows[:, -2 * rank : -rank])
            apart = steps, do.linear("delta_gates", self.apart[1], rows[:, -rank:])
        return do.linear("attention_out", self.out, do.delta_rule_of(rows, apart, self.weights, self.index))


def delta_layer(shape: DeltaShape, eps: float, index: int, weights: dict[str, Any], forms: WeightForms) -> DeltaLayer:
    """Takes the weights of a layer (named as in weight_plan.py) out of `weights`. index: of the cache's states"""
    project, out = (forms.take_linear(weights, name) for name in ("delta_in", "delta_out"))
    apart = None
    if shape.rank:
        apart = forms.take_linear(weights, "delta_steps"), forms.take_linear(weights, "delta_gates")
    conv = weights.pop("delta_conv")[:, 0].T.contiguous()
    decay, bias, norm = (weights.pop(f"delta_{name}").float().flatten() for name in ("decay", "step_bias", "norm"))
    return DeltaLayer(index, project, DeltaWeights(shape, conv, -decay.exp(), bias, norm, eps), out, apart)
