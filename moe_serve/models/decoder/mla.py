"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over a cache of latents.

Two forms of the same function. Absorbed: queries are projected into the latent space, so all heads share one cached row
per token, as in multi-query attention; this is cheap for few queries. Expanded: keys and values of every head are
computed from the latents first, which is cheaper for chunks of many queries. `batch_invariant` uses only the absorbed
form.

Shape words: T = rows of the batch (padded), H = hidden, heads = num_heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape, HeadProjections
from moe_serve.attention_dp.kv_cache import KvLayout
from moe_serve.kernels.cpu.operations import AnyHeads, AnyLinear
from moe_serve.kernels.forms import MlaWidths
from moe_serve.kernels.indexed_attention import IndexerShape
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.rope import pair_order
from moe_serve.kernels.rows import LayerNorm
from moe_serve.models.decoder.step import IndexRows, Step
from moe_serve.models.decoder.weight_forms import WeightForms, take_rows
from moe_serve.models.spec import IndexerSpec, MlaSpec, RopeSpec

# Of the norms of latents and of index keys, whatever rms_norm_eps is: so in transformers, and no configuration says it.
LATENT_EPS = 1e-6


class MlaAttention:
    """Multi-head latent attention of one model; makes its layers."""

    def __init__(self, spec: MlaSpec, numerics: Numerics, num_layers: int):
        self.spec = spec
        self.widths = MlaWidths(spec.nope_dim, spec.kv_lora_rank, spec.rope_dim)
        self.num_layers = num_layers
        self._only_absorbed = numerics.invariant or spec.indexer is not None
        border = None if self._only_absorbed else expand_from(spec)
        layout = KvLayout.mla(spec.kv_lora_rank, spec.rope_dim)
        self.shape = AttentionShape(layout, spec.num_heads, spec.softmax_scale, expand_from=border)

    def layer(self, index: int, weights: dict[str, Any], rope: RopeSpec, forms: WeightForms) -> "MlaLayer":
        """Takes the weights of a layer (named as in weight_plan.py) out of `weights`. index: of the cache's layer"""
        spec = self.spec
        q_kv_a, a_bias = weights.pop("q_kv_a"), weights.pop("q_kv_a_bias", None)
        a_scale, b_scale = weights.pop("q_kv_a_scale", None), weights.pop("q_b_scale", None)
        if "kv_a_bias" in weights:  # without q-LoRA the queries have no bias
            kv_a_bias = weights.pop("kv_a_bias")
            a_bias = torch.cat((kv_a_bias.new_zeros(len(q_kv_a) - len(kv_a_bias)), kv_a_bias))
        q_b = weights.pop("q_b") if spec.q_lora_rank is not None and not spec.gates_values else None
        q_raw = None
        if spec.gates_values:
            q_b, q_raw = self._queries_and_gates(weights.pop("q_gate"))
        if not rope.interleaved:
            # Query heads end with the rotated part, and so does the last projection to the cache.
            order = pair_order(spec.rope_dim, q_kv_a.device)
            queries = _tails_in(order, spec.num_heads, spec.query_dim)
            num_q = len(q_kv_a) - spec.latent_dim
            first = queries if q_b is None else torch.arange(num_q, device=order.device)
            rows = torch.cat((first, num_q + _tails_in(order, 1, spec.latent_dim)))
            a_bias = None if a_bias is None else take_rows(a_bias, rows)
            q_kv_a, a_scale = take_rows(q_kv_a, rows), _scales_of(a_scale, rows)
            if q_b is not None:
                q_b, b_scale = take_rows(q_b, queries), _scales_of(b_scale, queries)
        kv_a_norm = weights.pop("kv_a_norm")
        kv_b = weights.pop("kv_b").view(spec.num_heads, spec.nope_dim + spec.value_dim, spec.kv_lora_rank)
        absorb = kv_b[:, : spec.nope_dim].contiguous()
        expand = kv_b[:, spec.nope_dim :].transpose(1, 2).contiguous()
        return MlaLayer(
            self,
            index,
            q_kv_a=forms.linear(q_kv_a, a_bias, a_scale),
            q_a_norm=weights.pop("q_a_norm") if q_b is not None else None,
            q_b=forms.linear(q_b, scale=b_scale) if q_b is not None else None,
            kv_a_norm=kv_a_norm if spec.latent_factor == 1 else kv_a_norm * spec.latent_factor,
            absorb=forms.per_head(absorb),
            expand=forms.per_head(expand),
            out=forms.take_linear(weights, "o"),
            gates=None if spec.gate_name is None else forms.take_linear(weights, "head_gates"),
            q_raw=None if q_raw is None else forms.linear(q_raw),
            indexer=None if spec.indexer is None else self._indexer(spec.indexer, index, weights, rope, forms),
            projections=None if self._only_absorbed else HeadProjections(absorb, expand),
        )

    def _queries_and_gates(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the projections of a query latent as it was normed, and as it was, to all queries, then all gates.

        weight: [heads x (query_dim + value_dim), 2 x q_lora_rank], of each head's query and gates
        """
        spec = self.spec
        heads = weight.view(spec.num_heads, spec.query_dim + spec.value_dim, 2, -1)
        rows = torch.cat((heads[:, : spec.query_dim].flatten(0, 1), heads[:, spec.query_dim :].flatten(0, 1)))
        return rows[:, 0].contiguous(), rows[:, 1].contiguous()

    def _indexer(
        self, spec: IndexerSpec, index: int, weights: dict[str, Any], rope: RopeSpec, forms: WeightForms
    ) -> "Indexer":
        """Takes the weights of an indexer, which rotates the first elements of its heads."""
        order = pair_order(rope.dim, weights["index_k"].device)
        order = torch.arange(rope.dim, device=order.device) if spec.interleaved else order
        order = torch.cat((order, torch.arange(rope.dim, spec.width, device=order.device)))
        q = weights.pop("index_q").view(spec.num_heads, spec.width, -1)[:, order].flatten(0, 1)
        norm = LayerNorm(*(weights.pop(name)[order].contiguous() for name in ("index_k_norm", "index_k_norm_bias")))
        # Keys of all layers lie behind the latents of all layers.
        return Indexer(
            IndexerShape(spec.num_heads, spec.width, spec.topk),
            self.num_layers + index,
            q=forms.linear(q),
            k=forms.linear(weights.pop("index_k")[order].contiguous()),
            k_norm=norm,
            weights=forms.linear(weights.pop("index_weights")),
        )


@dataclass(frozen=True, eq=False)
class Indexer:
    """Chooses the tokens that each token attends, in one layer. Scores have no scale: none changes their order.

    layer: of the cache that holds its keys
    q: query latent -> queries of its heads;  k: x -> key, then normed;  weights: x -> weights of its heads
    """

    shape: IndexerShape
    layer: int
    q: AnyLinear
    k: AnyLinear
    k_norm: LayerNorm
    weights: AnyLinear

    def keys(self, x: Tensor, do: Step) -> tuple[Tensor, Tensor]:
        """x: [T, H], normed -> keys [T, width] and weights [T, heads]"""
        k = do.layer_norm(do.linear("index_k", self.k, x), None, self.k_norm, LATENT_EPS)
        return k, do.linear("index_weights", self.weights, x)

    def rows(self, latent: Tensor, keys: tuple[Tensor, Tensor], do: Step) -> IndexRows:
        """latent: [T, q_lora_rank], normed;  keys: what `keys` has returned"""
        q = do.linear("index_q", self.q, latent).view(latent.shape[0], self.shape.heads, self.shape.width)
        return IndexRows(q, *keys, self.layer, self.shape)


@dataclass(frozen=True, eq=False)
class MlaLayer:
    """Multi-head latent attention of one layer.

    q_kv_a: x -> (queries, or their latent with q-LoRA; then latent and unrotated key)
    q_b:    with q-LoRA, the query latent -> queries, and gates of values where q_raw is given
    q_raw:  adds to these what the latent gives as it was before its norm
    absorb: [heads, nope_dim, kv_lora_rank], projects queries into the latent space
    expand: [heads, kv_lora_rank, value_dim], projects latents to values
    gates:  x -> a logit of each head, whose values are times its sigmoid
    projections: of the expanded form; None where only the absorbed form is used
    """

    form: MlaAttention
    index: int
    q_kv_a: AnyLinear
    q_a_norm: Tensor | None
    q_b: AnyLinear | None
    q_raw: AnyLinear | None
    kv_a_norm: Tensor
    absorb: AnyHeads
    expand: AnyHeads
    out: AnyLinear
    gates: AnyLinear | None
    indexer: Indexer | None
    projections: HeadProjections | None

    def __call__(self, x: Tensor, do: Step) -> Tensor:
        """x: [T, H], normed -> [T, H]. Writes the rows' latents and rotated keys into the cache."""
        form, spec = self.form, self.form.spec
        both = do.linear("q_kv_a", self.q_kv_a, x)
        q, row = both[:, : -spec.latent_dim], both[:, -spec.latent_dim :]
        # Before the query latent is normed, whose buffer may be that of x.
        keys = None if self.indexer is None else self.indexer.keys(x, do)
        gates = None if self.gates is None else do.linear("head_gates", self.gates, x)
        index, value_gates = None, None
        if self.q_b is not None:
            assert self.q_a_norm is not None
            latent = do.rms_norm(q, self.q_a_norm, LATENT_EPS)
            raw, q = q, do.linear("q_b", self.q_b, latent)
            if self.q_raw is not None:
                do.add_gated_(q, do.linear("q_raw", self.q_raw, raw), None)
                width = spec.num_heads * spec.query_dim
                q, value_gates = q[:, :width], q[:, width:]
            index = None if self.indexer is None or keys is None else self.indexer.rows(latent, keys, do)
        if spec.temperature is not None:
            assert do.query_scales is not None
            do.multiply_rows_(q, do.query_scales)
        q = q.view(x.shape[0], spec.num_heads, -1)
        cache, scales = do.cache.layer(self.index), do.cache.scales(self.index)
        do.mla_rope_write(q, row, self.kv_a_norm, LATENT_EPS, do.turns[0], do.slots, cache, form.widths, scales)
        if index is not None:
            do.index_write(index.q, index.k, do.turns[0], do.slots, do.cache.layer(index.layer))
            latent_q = do.absorb(self.absorb, q, spec.nope_dim)
            attended = do.attend_indexed(latent_q[:, None], self.index, index)
            values = do.expand(self.expand, attended[:, 0])
        else:
            values = self._absorbed(q, do) if not do.expanded_rows else self._by_length(q, do)
        if gates is not None:
            do.gate_heads_(values, gates)
        values = values.flatten(1)
        if value_gates is not None:
            do.gate_(values, value_gates)
        return do.linear("attention_out", self.out, values)

    def _by_length(self, q: Tensor, do: Step) -> Tensor:
        """q: [T, heads, nope + rope] -> [T, heads, value_dim], long chunks in the expanded form"""
        assert self.projections is not None
        rows = do.expanded_rows
        out = q.new_empty(*q.shape[:2], self.form.spec.value_dim)
        out[rows.stop :] = 0
        if rows.start:
            out[: rows.start] = self._absorbed(q[: rows.start], do)
        do.attend_expanded(q, self.index, self.projections, out)
        return out

    def _absorbed(self, q: Tensor, do: Step) -> Tensor:
        """q: [T, heads, nope + rope] -> [T, heads, value_dim]"""
        latent_q = do.absorb(self.absorb, q, self.form.spec.nope_dim)
        return do.expand(self.expand, do.attend(latent_q[:, None], self.form.shape, self.index)[:, 0])


def expand_from(spec: MlaSpec) -> int | None:
    """Returns the rows of a chunk behind a long prefix from which the expanded form takes fewer multiplications.

    Per query and key: absorbed heads * (2 kv_lora_rank + rope_dim), expanded heads * (nope_dim + rope_dim + value_dim);
    making a key and a value costs heads * kv_lora_rank * (nope_dim + value_dim), once per key. The absorbed form does
    as much with each query and its result, so of a whole prompt the expanded form is always the cheaper one.
    None: the absorbed form always is.
    """
    per_head = spec.nope_dim + spec.value_dim
    saved = 2 * spec.kv_lora_rank - per_head
    return -(-spec.kv_lora_rank * per_head // saved) if saved > 0 else None


def _tails_in(order: Tensor, num_heads: int, width: int) -> Tensor:
    """Returns the order of rows of heads of this width, [num_heads x width], with the last of each head reordered."""
    rows = torch.arange(num_heads * width, device=order.device).view(num_heads, width)
    kept = width - len(order)
    return torch.cat((rows[:, :kept], rows[:, kept + order]), 1).flatten()


def _scales_of(scale: Tensor | None, rows: Tensor) -> Tensor | None:
    """Returns the scales of rows in another order: those of channels with them, others as they are."""
    if scale is None or scale.dim() == 2:
        return scale
    taken: Tensor = take_rows(scale, rows)
    return taken
