"""The parts of a decoder layer that are not MoE: rotation table and grouped-query attention.

Shape words: T = rows of the batch (padded), H = hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape
from moe_serve.attention_dp.kv_cache import KvLayout
from moe_serve.kernels.cpu.operations import AnyLinear
from moe_serve.kernels.forms import Seen
from moe_serve.kernels.rope import pair_order
from moe_serve.models.decoder.step import Step
from moe_serve.models.decoder.weight_forms import WeightForms, take_rows
from moe_serve.models.spec import GqaSpec, QueryTemperature, RopeSpec


class RopeTable:
    """cos + i sin of every position and frequency, computed once, so that all batches and ranks use the same bits."""

    def __init__(
        self,
        ropes: Sequence[RopeSpec],
        max_position: int,
        device: torch.device | str,
        temperature: QueryTemperature | None = None,
    ):
        """ropes: the rotations of a model; `tables` has one of each, [max_position, dim / 2] complex64, or the one row
        of all positions where nothing rotates

        temperature: of the queries; then query_scales [max_position, 1] float32 holds what they are multiplied by
        """
        positions = torch.arange(max_position, dtype=torch.float32)
        self.tables = tuple(_turns(rope, positions).to(device) for rope in ropes)
        self.query_scales = None
        if temperature is not None:
            growth = torch.log1p(torch.floor((positions + temperature.shift) / temperature.floor_scale))
            self.query_scales = (growth * temperature.scale + 1.0)[:, None].to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, ...]:
        """positions: [T] int64 -> [T, dim / 2] complex64 of each table"""
        return tuple(
            table.index_select(0, positions) if len(table) > 1 else table.repeat(len(positions), 1)
            for table in self.tables
        )


def _turns(rope: RopeSpec, positions: Tensor) -> Tensor:
    if not rope.rotates:
        positions = positions[:1]  # all turn as little as the first
    angles = positions[:, None] * rope_frequencies(rope)
    return torch.complex(angles.cos() * rope.table_factor, angles.sin() * rope.table_factor)


def rope_table_bytes(ropes: Sequence[RopeSpec], max_position: int, has_temperature: bool) -> int:
    """Returns the size of a RopeTable. has_temperature: of the queries"""
    scale_bytes = torch.float32.itemsize if has_temperature else 0
    rows = [max_position if rope.rotates else 1 for rope in ropes]
    turns = sum(count * (rope.dim // 2) for count, rope in zip(rows, ropes, strict=True))
    return turns * torch.complex64.itemsize + max_position * scale_bytes


def rope_frequencies(rope: RopeSpec) -> Tensor:
    """Returns [dim / 2] float32, radians per position of each pair."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    kept = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        return 1.0 / (torch.tensor(rope.divisors) * rope.theta**exponents)
    if rope.yarn is None:
        return kept / rope.linear_factor
    low, high = _yarn_ramp(rope)
    divided_share = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    divided = 1.0 / (rope.yarn.factor * rope.theta**exponents)
    return divided * divided_share + kept * (1 - divided_share)


def _yarn_ramp(rope: RopeSpec) -> tuple[float, float]:
    """Returns the pair indices between which YaRN's ramp runs from kept to divided frequencies."""
    yarn = rope.yarn
    assert yarn is not None

    def pair_with_rotations(rotations: float) -> float:
        return rope.dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_rotations(yarn.beta_fast), pair_with_rotations(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high + 0.001 if low == high else high


class GqaAttention:
    """Grouped-query attention of one shape; makes the layers that have it."""

    def __init__(self, spec: GqaSpec, norm_eps: float):
        self.spec = spec
        self.norm_eps = norm_eps
        layout = KvLayout.gqa(spec.num_kv_heads, spec.head_dim, spec.value_dim)
        group = spec.num_heads // spec.num_kv_heads
        self.shape = AttentionShape(layout, group, spec.softmax_scale, has_sinks=spec.has_sinks)

    def layer(
        self, index: int, weights: dict[str, Any], ropes: Sequence[RopeSpec], forms: WeightForms, cached_as: int
    ) -> "GqaLayer":
        """Takes the weights of layer `index` (named as in weight_plan.py) out of `weights`.

        ropes: of the model;  cached_as: the cache's layer, since not all layers of a model may have one
        """
        spec = self.spec
        qkv, bias, scale = weights.pop("qkv"), weights.pop("qkv_bias", None), weights.pop("qkv_scale", None)
        if spec.value_dim is not None:
            qkv, bias = self._padded(qkv), None if bias is None else self._padded(bias)
        norm = None
        turned_by = len(ropes) - 1 if index in spec.windowed_layer_ids else 0
        rope, rotates = ropes[turned_by], index not in spec.unrotated_layer_ids
        if spec.qk_norm == "unit" and rotates:  # transformers norms behind the rotation, which changes no length
            norm = forms.ones(spec.num_heads + spec.num_kv_heads, spec.head_dim, like=qkv)
        elif any(spec.norm_widths):
            norms = ((weights.pop("q_norm"), spec.num_heads), (weights.pop("k_norm"), spec.num_kv_heads))
            norm = torch.cat([each.view(-1, spec.head_dim).expand(heads, -1) for each, heads in norms])
        if not rope.interleaved or (spec.has_gate and spec.gate_name is None):
            order = torch.arange(rope.dim) if rope.interleaved else pair_order(rope.dim, qkv.device)
            order = torch.cat((order, torch.arange(rope.dim, spec.head_dim, device=order.device)))
            rows = self._rows_in(order)
            qkv = take_rows(qkv, rows)
            bias = None if bias is None else take_rows(bias, rows)
            if scale is not None and scale.dim() == 1:  # rows stay in their blocks
                scale = take_rows(scale, rows)
            norm = None if norm is None else norm[:, order].contiguous()
        out = forms.take_linear(weights, "o")
        sinks = weights.pop("sinks") if spec.has_sinks else None
        seen = Seen(spec.window_of(index), spec.chunk_of(index), sinks)
        turns = turned_by if rotates else None
        gates = None if spec.head_gate_name is None else forms.take_linear(weights, "head_gates")
        return GqaLayer(self, cached_as, forms.linear(qkv, bias, scale), norm, out, seen, turns, gates)

    def _padded(self, rows: Tensor) -> Tensor:
        """Returns the rows of the fused projection, or its biases, with zeros behind those of each value."""
        spec = self.spec
        values = spec.num_kv_heads * (spec.value_dim or spec.head_dim)
        of_heads = rows[-values:].view(spec.num_kv_heads, -1, *rows.shape[1:])
        padded = of_heads.new_zeros(spec.num_kv_heads, spec.head_dim, *rows.shape[1:])
        padded[:, : of_heads.shape[1]] = of_heads
        return torch.cat((rows[:-values], padded.flatten(0, 1)))

    def _rows_in(self, order: Tensor) -> Tensor:
        """Returns the order of the fused projection's rows with those of every query and key head reordered.

        Gates of the attention come behind all values.
        """
        spec = self.spec
        num_rotated = spec.num_heads + spec.num_kv_heads
        num_rows = (num_rotated + spec.num_kv_heads + spec.num_heads * spec.has_gate) * spec.head_dim
        heads = torch.arange(num_rows, device=order.device).view(-1, spec.head_dim)
        if spec.has_gate and spec.gate_name is None:
            of_queries = heads[: 2 * spec.num_heads]
            heads = torch.cat((of_queries[0::2], heads[2 * spec.num_heads :], of_queries[1::2]))
        return torch.cat((heads[:num_rotated, order], heads[num_rotated:])).flatten()


@dataclass(frozen=True, eq=False)
class GqaLayer:
    """Grouped-query attention of one layer.

    index: of the cache's layer
    qkv:  x -> queries, keys and values of all heads, and their gates
    norm: [query and key heads, head_dim], over each head or over all, as the spec says; or None
    turned_by: which of the model's rotations; None: none
    head_gates: x -> a number of each head
    """

    form: GqaAttention
    index: int
    qkv: AnyLinear
    norm: Tensor | None
    out: AnyLinear
    seen: Seen
    turned_by: int | None
    head_gates: AnyLinear | None

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. Writes the rows' keys and values into the cache."""
        spec, eps = self.form.spec, self.form.norm_eps
        qkv = do.linear("qkv", self.qkv, x)
        head_gates = None if self.head_gates is None else do.linear("head_gates", self.head_gates, x)
        norm = self.norm
        if norm is not None and spec.qk_norm == "projection":
            width, end = spec.num_heads * spec.head_dim, norm.numel()
            do.rms_norm_(qkv[:, :width], norm.flatten()[:width], eps)
            do.rms_norm_(qkv[:, width:end], norm.flatten()[width:], eps)
            norm = None
        if spec.clip is not None:
            do.clip_(qkv, spec.clip)
        if spec.temperature is not None and self.turned_by is None:
            assert do.query_scales is not None
            do.multiply_rows_(qkv[:, : spec.num_heads * spec.head_dim], do.query_scales)
        heads, norm_last = (spec.num_heads, spec.num_kv_heads), spec.qk_norm == "rotated_head"
        turns = do.turns[0][:, :0] if self.turned_by is None else do.turns[self.turned_by]
        cache, scales = do.cache.layer(self.index), do.cache.scales(self.index)
        rotated, gates = qkv, None
        if spec.has_gate:
            width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
            rotated, gates = qkv[:, :width], qkv[:, width:]
        do.rope_write(rotated, norm, eps, turns, do.slots, cache, *heads, norm_last, scales)
        q = qkv.view(x.shape[0], -1, spec.head_dim)[:, : spec.num_heads]
        q = q.view(x.shape[0], spec.num_kv_heads, -1, spec.head_dim)
        attended = do.attend(q, self.form.shape, self.index, self.seen)
        if head_gates is not None:
            do.gate_heads_(attended.view(x.shape[0], spec.num_heads, -1), head_gates, softplus=True)
        attended = attended.flatten(1)
        if spec.value_scale != 1:
            do.scale_(attended, spec.value_scale)
        if gates is not None:
            do.gate_(attended, gates)
        return do.linear("attention_out", self.out, attended)
