"""The parts of a decoder layer that are not MoE: rotation table, gated MLP, grouped-query attention.

Shape words: T = rows of the batch (padded), H = hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape, PagedAttention, StepAttention
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.kernels.linear import HeadLinear, Linear
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.rope import pair_order, rope_write
from moe_serve.kernels.silu_mul import silu_mul
from moe_serve.models.rope_spec import RopeSpec, yarn_ramp
from moe_serve.models.spec import GqaSpec


class LinearFactory:
    """Builds the Linears of one model; weights of equal shape share their proof of row counts."""

    def __init__(self, numerics: Numerics):
        self._numerics = numerics
        self._proven: dict[object, tuple[int, ...]] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(weight, bias, self._numerics, self._proven)

    def per_head(self, weight: Tensor) -> HeadLinear:
        return HeadLinear(weight, self._numerics, self._proven)


class RopeTable:
    """cos + i sin of every position and frequency, computed once, so that all batches and ranks use the same bits."""

    def __init__(self, rope: RopeSpec, max_position: int, device: torch.device | str):
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = positions[:, None] * rope_frequencies(rope)
        self._table = torch.complex(angles.cos() * rope.table_factor, angles.sin() * rope.table_factor).to(device)

    def __call__(self, positions: Tensor) -> Tensor:
        """positions: [T] int64 -> [T, dim / 2] complex64"""
        return self._table.index_select(0, positions)


def rope_frequencies(rope: RopeSpec) -> Tensor:
    """Returns [dim / 2] float32, radians per position of each pair."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    kept = 1.0 / (rope.theta**exponents)
    if rope.yarn is None:
        return kept / rope.linear_factor
    low, high = yarn_ramp(rope)
    divided_share = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    divided = 1.0 / (rope.yarn.factor * rope.theta**exponents)
    return divided * divided_share + kept * (1 - divided_share)


class GatedMlp:
    """down(silu(gate(x)) * up(x)), of dense layers and shared experts."""

    def __init__(self, gate_up: Linear, down: Linear):
        """gate_up: [2 I, H], gate rows first; down: [H, I]"""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]"""
        return self._down(silu_mul(self._gate_up(x)))


@dataclass(frozen=True)
class AttentionStep:
    """What the attention of every layer shares in one forward.

    slots: [T] int64, where each row is cached;  turns: [T, rotated width / 2] complex64, per row
    """

    attend: StepAttention
    cache: KvCache
    slots: Tensor
    turns: Tensor


class GqaAttention:
    """Grouped-query attention of one model; makes its layers."""

    def __init__(
        self, spec: GqaSpec, norm_eps: float, numerics: Numerics, dtype: torch.dtype, device: torch.device | str
    ):
        self.layout = KvLayout.gqa(spec.num_kv_heads, spec.head_dim)
        self.spec = spec
        self.norm_eps = norm_eps
        shape = AttentionShape(self.layout, spec.num_heads // spec.num_kv_heads, spec.softmax_scale)
        self.paged = PagedAttention(shape, numerics, dtype, device)

    def layer(self, index: int, weights: dict[str, Tensor], rope: RopeSpec, linear: LinearFactory) -> "GqaLayer":
        """Takes the weights of layer `index` (named as in weight_plan.py) out of `weights`."""
        spec = self.spec
        qkv, bias = weights.pop("qkv"), weights.pop("qkv_bias", None)
        norm = None
        if spec.qk_norm:
            q_norm, k_norm = weights.pop("q_norm"), weights.pop("k_norm")
            norm = torch.cat((q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)))
        if not rope.interleaved:
            order = pair_order(spec.head_dim, qkv.device)
            qkv = self._reorder(qkv, order)
            bias = None if bias is None else self._reorder(bias, order)
            norm = None if norm is None else norm[:, order].contiguous()
        return GqaLayer(self, index, linear(qkv, bias), norm, linear(weights.pop("o"), weights.pop("o_bias", None)))

    def _reorder(self, qkv: Tensor, order: Tensor) -> Tensor:
        """Returns the fused projection with the rows of every query and key head reordered."""
        spec = self.spec
        heads = qkv.view(-1, spec.head_dim, *qkv.shape[1:])
        num_rotated = spec.num_heads + spec.num_kv_heads
        return torch.cat((heads[:num_rotated, order], heads[num_rotated:])).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class GqaLayer:
    """Grouped-query attention of one layer.

    qkv:  x -> queries, keys and values of all heads
    norm: [query and key heads, head_dim] or None
    """

    form: GqaAttention
    index: int
    qkv: Linear
    norm: Tensor | None
    out: Linear

    def __call__(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x: [T, H], normed -> [T, H]. Writes the rows' keys and values into the cache."""
        spec, eps = self.form.spec, self.form.norm_eps
        qkv, cached = self.qkv(x), step.cache.layer(self.index)
        rope_write(qkv, self.norm, eps, step.turns, step.slots, cached, spec.num_heads, spec.num_kv_heads)
        q = qkv.view(x.shape[0], -1, spec.head_dim)[:, : spec.num_heads]
        q = q.view(x.shape[0], spec.num_kv_heads, -1, spec.head_dim)
        return self.out(step.attend(q, self.index).flatten(1))
