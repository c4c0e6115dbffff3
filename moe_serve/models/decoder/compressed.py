"""Attention to a window of tokens and to entries of groups of tokens (DeepSeek-V4).

Shape words: T = rows of the batch (padded), H = hidden.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape
from moe_serve.attention_dp.kv_cache import KvLayout
from moe_serve.kernels.compressed_attention import CompressedRows, CompressedWeights, EntryWeights
from moe_serve.kernels.cpu.operations import AnyHeads, AnyLinear
from moe_serve.models.decoder.step import Step
from moe_serve.models.decoder.weight_forms import WeightForms
from moe_serve.models.spec import CompressedSpec


@dataclass(frozen=True, eq=False)
class CompressedLayer:
    """The attention of one layer.

    index:    of the cache's layer
    into:     x -> query latent, cached row, weights of the indexer's heads
    q, index_q: the normed latent -> queries, and those of the indexer
    groups:   what heads attend -> [groups, rank], each group of heads by itself;  out: all of these -> [T, H]
    """

    index: int
    weights: CompressedWeights
    into: AnyLinear
    q_norm: Tensor
    q: AnyLinear
    index_q: AnyLinear | None
    num_groups: int
    groups: AnyHeads
    out: AnyLinear

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. Writes the rows, and entries of groups that they end, into the cache."""
        shape, rank, num_rows = self.weights.shape, self.q_norm.shape[0], x.shape[0]
        projected = do.linear("attend_in", self.into, x)
        rows = projected[:, rank : rank + shape.row_width]
        latent = do.rms_norm(projected[:, :rank], self.q_norm, shape.eps)
        q = do.linear("q", self.q, latent).view(num_rows, shape.heads, shape.width)
        index_q, index_weights = None, None
        if self.index_q is not None:
            index_q = do.linear("index_q", self.index_q, latent).view(num_rows, shape.index_heads, shape.index_width)
            index_weights = projected[:, rank + shape.row_width :]
        given = CompressedRows(q, rows, index_q, index_weights)
        attended = do.compressed_attention(given, self.weights, self.index)
        grouped = do.expand(self.groups, attended.view(num_rows, self.num_groups, -1))
        return do.linear("attention_out", self.out, grouped.flatten(1))


def compressed_layer(
    spec: CompressedSpec, layer_id: int, weights: dict[str, Any], turns: Tensor, eps: float, forms: WeightForms
) -> CompressedLayer:
    """Takes the weights of a layer (named as in weight_plan.py) out of `weights`. turns: of every position"""
    shape = spec.in_layer(layer_id, eps)

    def entries(name: str) -> EntryWeights | None:
        if name + "_norm" not in weights:
            return None
        return EntryWeights(weights.pop(name + "_norm").float(), weights.pop(name + "_bias"))

    groups = weights.pop("o_groups").view(spec.num_groups, spec.group_rank, -1).transpose(1, 2).contiguous()
    return CompressedLayer(
        layer_id,
        CompressedWeights(
            shape, weights.pop("kv_norm").float(), weights.pop("sinks"), entries("entry"), entries("index"), turns
        ),
        into=forms.linear(weights.pop("attend_in")),
        q_norm=weights.pop("q_a_norm"),
        q=forms.linear(weights.pop("q_b")),
        index_q=forms.linear(weights.pop("index_q_b")) if shape.index_heads else None,
        num_groups=spec.num_groups,
        groups=forms.per_head(groups),
        out=forms.linear(weights.pop("o")),
    )


def compressed_layouts(spec: CompressedSpec, num_layers: int) -> tuple[KvLayout, ...]:
    """Returns the layout of every layer of the cache."""
    return tuple(KvLayout.mla(spec.in_layer(layer, 1.0).row_width, 0) for layer in range(num_layers))


def attention_shape(spec: CompressedSpec) -> AttentionShape:
    """Returns the shape by which the rows of a step are found."""
    return AttentionShape(KvLayout.mla(spec.head_dim, 0), spec.num_heads, spec.softmax_scale)
