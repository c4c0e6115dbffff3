"""The decoder of every family: embedding, layers of attention and MoE (or a dense MLP), logits of the sampled rows.

There is no early return: a rank without tokens goes through every MoE layer, because all ranks must take part in its
collectives.

Shape words: T = rows of the batch (padded), H = hidden, E = num_logical.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.moe_layer import ExpertParallel, MoeLayer, MoeWeights
from moe_serve.kernels.linear import Linear
from moe_serve.kernels.norm import add_rms_norm, rms_norm
from moe_serve.kernels.numerics import Numerics
from moe_serve.models.layers import AttentionStep, GatedMlp, GqaAttention, GqaLayer, LinearFactory, RopeTable
from moe_serve.models.mla import MlaAttention, MlaLayer
from moe_serve.models.spec import GqaSpec, ModelSpec
from moe_serve.models.weights import LoadedWeights


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights; it has either `moe` or `mlp`."""

    input_norm: Tensor
    attention: GqaLayer | MlaLayer
    post_norm: Tensor
    moe: MoeLayer | None
    mlp: GatedMlp | None


@dataclass(frozen=True, eq=False)
class MoeDecoder:
    """A model on one rank. Made by build_decoder."""

    spec: ModelSpec
    numerics: Numerics
    embed: Tensor
    attention: GqaAttention | MlaAttention
    rope: RopeTable
    layers: list[DecoderLayer]
    norm: Tensor
    head: Linear

    @property
    def experts(self) -> list[ExpertStore]:
        """The expert weights of every MoE layer, by row of the placement."""
        return [layer.moe.experts for layer in self.layers if layer.moe is not None]

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, cache: KvCache, num_chunks: int, overlap: bool = False) -> Tensor:
        """Returns logits [len(batch.logit_rows), vocab_size] float32; the batch's keys and values go into the cache.

        num_chunks: dispatch rounds of every MoE layer, the same number on all ranks
        overlap:    whether experts of one round compute while rows of others travel; the same on all ranks
        """
        eps = self.spec.norm_eps
        x = functional.embedding(batch.input_ids, self.embed)
        step = None
        if batch.num_tokens:
            attend = self.attention.paged.begin(batch, cache)
            step = AttentionStep(attend, cache, batch.slot_mapping, self.rope(batch.positions))
        delta = torch.zeros_like(x)  # what the last sublayer adds to the residual x
        for layer in self.layers:
            if step is not None:
                delta = layer.attention(add_rms_norm(x, delta, layer.input_norm, eps), step)
            normed = add_rms_norm(x, delta, layer.post_norm, eps)
            if layer.moe is not None:
                delta = layer.moe(normed, batch.num_tokens, num_chunks, overlap)
            elif layer.mlp is not None:
                delta = layer.mlp(normed)
        return self._logits(x.add_(delta), batch.logit_rows)

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        num_rows = rows.shape[0]
        padding = self.numerics.padded(num_rows) - num_rows
        if padding:
            rows = functional.pad(rows, (0, padding))
        x = rms_norm(x.index_select(0, rows), self.norm, self.spec.norm_eps)
        return self.head(x)[:num_rows].float()


def build_decoder(
    spec: ModelSpec,
    weights: LoadedWeights,
    parallel: ExpertParallel,
    device: torch.device | str,
) -> MoeDecoder:
    """Returns the decoder. Takes the dense tensors out of `weights`, so that none is held twice once it is packed."""
    dense, numerics = weights.dense, parallel.numerics
    linear = LinearFactory(numerics)
    embed, norm = dense.pop("embed"), dense.pop("norm")
    if isinstance(spec.attention, GqaSpec):
        attention: GqaAttention | MlaAttention = GqaAttention(
            spec.attention, spec.norm_eps, numerics, embed.dtype, device
        )
    else:
        attention = MlaAttention(spec.attention, spec.norm_eps, numerics, embed.dtype, device)
    layer_rows = {layer_id: row for row, layer_id in enumerate(spec.moe_layer_ids)}
    layers = []
    for layer_id in range(spec.num_layers):
        prefix = f"layers.{layer_id}."
        mine = {name.removeprefix(prefix): dense.pop(name) for name in list(dense) if name.startswith(prefix)}
        attention_layer = attention.layer(layer_id, mine, spec.rope, linear)
        moe, mlp = None, None
        if layer_id in layer_rows:
            shared = _mlp(mine, "shared_", linear) if spec.shared_intermediate else None
            experts = weights.store(layer_id)
            mine_moe = MoeWeights(mine.pop("router"), mine.pop("router_bias", None), experts, shared)
            moe = MoeLayer(parallel, layer_rows[layer_id], mine_moe)
        else:
            mlp = _mlp(mine, "", linear)
        layers.append(DecoderLayer(mine.pop("input_norm"), attention_layer, mine.pop("post_norm"), moe, mlp))
        assert not mine, f"weights of layer {layer_id} that nobody took: {sorted(mine)}"
    head = linear(embed if spec.tie_embeddings else dense.pop("lm_head"))
    table = RopeTable(spec.rope, spec.max_position, device)
    return MoeDecoder(spec, numerics, embed, attention, table, layers, norm, head)


def kv_layouts(spec: ModelSpec) -> tuple[KvLayout, ...]:
    """Returns the cache layout of every layer, to size the cache before there is a decoder."""
    attention = spec.attention
    if isinstance(attention, GqaSpec):
        layout = KvLayout.gqa(attention.num_kv_heads, attention.head_dim)
    else:
        layout = KvLayout.mla(attention.kv_lora_rank, attention.rope_dim)
    return (layout,) * spec.num_layers


def _mlp(weights: dict[str, Tensor], prefix: str, linear: LinearFactory) -> GatedMlp:
    return GatedMlp(linear(weights.pop(prefix + "gate_up")), linear(weights.pop(prefix + "down")))
