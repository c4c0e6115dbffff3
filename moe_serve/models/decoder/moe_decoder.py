"""The decoder of every family: embedding, layers of attention and MoE (or a dense MLP), logits of the sampled rows.

There is no early return: a rank without tokens goes through every MoE layer, because all ranks must take part in its
collectives.

Shape words: T = rows of the batch (padded), H = hidden, E = num_logical.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_serve.attention_dp.attention import Attention, AttentionShape, PagedAttention
from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout, StateShapes, id_dtype
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.moe_layer import ExpertParallel, MoeLayer, MoeWeights
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import DeltaShape, LightningShape, MambaShape, SelectiveShape
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.rows import LayerNorm
from moe_serve.kernels.streams import StreamWeights
from moe_serve.models.decoder.compressed import (
    CompressedLayer,
    attention_shape,
    compressed_layer,
    compressed_layouts,
)
from moe_serve.models.decoder.conv import conv_layer
from moe_serve.models.decoder.delta import delta_layer
from moe_serve.models.decoder.gqa import GqaAttention, RopeTable
from moe_serve.models.decoder.graphs import GraphRunner
from moe_serve.models.decoder.lightning import lightning_layer
from moe_serve.models.decoder.mamba import mamba_layer
from moe_serve.models.decoder.mla import MlaAttention
from moe_serve.models.decoder.runners import RecordedRunner, TorchRunner
from moe_serve.models.decoder.selective import selective_layer
from moe_serve.models.decoder.stack import (
    AnyAttention,
    AnyNorm,
    AnyStack,
    AnyStatefulLayer,
    DecoderLayer,
    DecoderStack,
    GatedNorm,
    PredictionStack,
    ResidualNorm,
    StackFactors,
    StackRunner,
    StepInputs,
    StreamLayer,
    Streams,
    StreamStack,
)
from moe_serve.models.decoder.step import SharedExpert
from moe_serve.models.decoder.weight_forms import Fp8Mlp, GatedMlp, PackedMlp, WeightForms
from moe_serve.models.spec import CompressedSpec, GqaSpec, ModelSpec
from moe_serve.models.weights import LoadedWeights


@dataclass(frozen=True, eq=False)
class MoeDecoder:
    """A model on one rank. Made by build_decoder.

    prediction, run_prediction: of the layer that predicts tokens; None: the spec has none
    """

    spec: ModelSpec
    stack: DecoderStack | StreamStack
    run: StackRunner
    prediction: PredictionStack | None = None
    run_prediction: StackRunner | None = None

    @property
    def experts(self) -> list[ExpertStore]:
        """The expert weights of every MoE layer, by row of the placement."""
        layers = [layer.moe for layer in self.stack.layers]
        if self.prediction is not None:
            layers.append(self.prediction.moe)
        return [moe.experts for moe in layers if moe is not None]

    def forward(self, batch: ForwardBatch, cache: KvCache, num_chunks: int, overlap: bool = False) -> Tensor:
        """Returns logits [len(batch.logit_rows), vocab_size] float32; the batch's keys and values go into the cache.

        num_chunks: dispatch rounds of every MoE layer, the same number on all ranks
        overlap:    whether experts of one round compute while rows of others travel; the same on all ranks
        """
        return self.run(StepInputs(batch, cache, num_chunks, overlap))

    def predict(self, batch: ForwardBatch, cache: KvCache, num_chunks: int, hidden: Tensor | None = None) -> Tensor:
        """Runs the layer that predicts, and returns what it gives at the batch's logit rows: logits [n, vocab_size]
        float32 of the token behind the next one.

        batch:  its input_ids are the tokens behind those of its positions
        hidden: of the batch's rows, [num_tokens, H]; None: those of the last forward, which had the same rows
        """
        assert self.run_prediction is not None, "the model has no layer that predicts"
        hidden = self.run.rows[: batch.num_tokens] if hidden is None else hidden
        return self.run_prediction(StepInputs(batch, cache, num_chunks, overlap=False, hidden=hidden))

    def predicted_rows(self, rows: Tensor) -> Tensor:
        """Returns rows of the last prediction before the head, [n, H], for a prediction from these."""
        assert self.run_prediction is not None, "the model has no layer that predicts"
        return self.run_prediction.rows.index_select(0, rows)

    def logits_of(self, rows: range) -> Tensor:
        """Returns the logits of other rows of the last step, whose batch had prompt rows: [len(rows), vocab_size]."""
        return self.run.logits_of(rows)


def build_decoder(
    spec: ModelSpec,
    weights: LoadedWeights,
    parallel: ExpertParallel,
    device: torch.device | str,
    attention_backend: str = "auto",
) -> MoeDecoder:
    """Returns the decoder. attention_backend: of GPUs, as engine.attention_backend names it

    Takes the dense tensors out of `weights`, so that none is held twice once it is packed."""
    numerics = parallel.numerics
    dense: dict[str, Any] = weights.dense
    forms = WeightForms(numerics, weights.memory, spec.activation, weights.activations)
    embed, norm = dense.pop("embed"), _norm(spec, dense, "norm", forms)
    attentions: dict[int, GqaAttention] | MlaAttention | CompressedSpec
    table = RopeTable(spec.ropes, spec.max_position, device, spec.attention.temperature)
    if isinstance(spec.attention, CompressedSpec):
        attentions = spec.attention
        shapes = [attention_shape(attentions)]
    elif isinstance(spec.attention, GqaSpec):
        heads = spec.attention
        attentions = {layer: GqaAttention(heads.in_layer(layer), spec.norm_eps) for layer in spec.attention_layer_ids}
        shapes = list(dict.fromkeys(each.shape for each in attentions.values()))
    else:
        attentions = MlaAttention(spec.attention, numerics, len(spec.attention_layer_ids))
        shapes = [attentions.shape]
    layer_rows = {layer_id: row for row, layer_id in enumerate(spec.moe_layer_ids)}
    layers: list[DecoderLayer] = []
    stream_layers: list[StreamLayer] = []
    joined: dict[str, Any] = {}  # of the layer that predicts
    for layer_id in range(spec.num_layers):
        prefix = f"layers.{layer_id}."
        mine = {name.removeprefix(prefix): dense.pop(name) for name in list(dense) if name.startswith(prefix)}
        if layer_id in spec.stateful_layer_ids:
            attention_layer: AnyAttention | CompressedLayer | None = _stateful_layer(spec, layer_id, mine, forms)
        elif layer_id in spec.unattended_layer_ids:
            attention_layer = None
        elif isinstance(attentions, CompressedSpec):
            turns = table.tables[0 if attentions.every[layer_id] else -1]
            attention_layer = compressed_layer(attentions, layer_id, mine, turns, spec.norm_eps, forms)
        elif isinstance(attentions, dict):
            cached_as = spec.attention_layer_ids.index(layer_id)
            attention_layer = attentions[layer_id].layer(layer_id, mine, spec.ropes, forms, cached_as)
        else:
            attention_layer = attentions.layer(spec.attention_layer_ids.index(layer_id), mine, spec.rope, forms)
        moe, mlp, shared = None, None, None
        if layer_id in layer_rows:
            shared = _shared_expert(mine, forms) if spec.shared_intermediate else None
            own = None if numerics.compiled else shared  # which the layer computes while rows travel
            router, bias = mine.pop("router"), mine.pop("router_bias", None)
            bias = None if bias is None else bias.flatten()
            logit_bias, experts = mine.pop("router_logit_bias", None), weights.store(layer_id)
            latent = None
            if spec.latent is not None:
                latent = forms.take_linear(mine, "latent_in"), forms.take_linear(mine, "latent_out")
            chosen = _choices(spec, layer_id, mine.pop("chosen")) if layer_id in spec.choosing_layer_ids else None
            mine_moe = MoeWeights(router, bias, experts, own, logit_bias, weights.memory, latent, chosen)
            moe = MoeLayer(parallel, layer_rows[layer_id], mine_moe)
            shared = shared if numerics.compiled else None
        if (layer_id not in layer_rows and layer_id not in spec.unfed_layer_ids) or spec.is_paired:
            mlp = _mlp(mine, "", forms)
        if layer_id == spec.predictor_id:
            joined = {name: mine.pop(name) for name in ("embed_norm", "hidden_norm", "join", "head_norm", "head")}
        norms = [_norm(spec, mine, name, forms) if name in mine else None for name in ("input_norm", "post_norm")]
        out_norms = [mine.pop(name, None) for name in ("attention_out_norm", "mlp_out_norm")]
        if isinstance(attention_layer, CompressedLayer):
            joins = [_streams(spec, mine, name, forms, mixes=True) for name in ("attention_streams", "fed_streams")]
            assert isinstance(norms[0], Tensor) and isinstance(norms[1], Tensor) and moe is not None  # noqa: PT018
            stream_layers.append(StreamLayer(joins[0], norms[0], attention_layer, joins[1], norms[1], moe, shared))
        else:
            sublayers = norms[0], attention_layer, out_norms[0], norms[1], moe, mlp, shared, out_norms[1]
            layers.append(DecoderLayer(*sublayers, *_factors(spec, layer_id)))
        assert not mine, f"weights of layer {layer_id} that nobody took: {sorted(mine)}"
    head_weight = None if spec.tie_embeddings else dense.pop("lm_head")
    embedding, head = forms.embedding(embed, head_weight, dense.pop("lm_head_bias", None))
    factors = StackFactors(spec.embedding_factor, spec.residual_factor, spec.logits_factor)
    assert not spec.is_parallel or spec.residual_factor == 1, "a factor goes with the norm that adds"
    prediction = None
    if spec.predictor_id is not None:
        prediction = _prediction(layers.pop(), joined, spec.norm_eps, embedding, forms)
    stack: DecoderStack | StreamStack
    if stream_layers:
        assert isinstance(norm, Tensor), "the last norm is one of root mean squares"
        streams = _streams(spec, dense, "head_streams", forms, mixes=False)
        stack = StreamStack(embedding, stream_layers, streams, norm, spec.norm_eps, head)
    else:
        stack = DecoderStack(embedding, layers, norm, spec.norm_eps, head, factors, spec.is_parallel)
    stacks: list[AnyStack] = [stack] if prediction is None else [stack, prediction]
    if numerics.compiled:
        runs: list[StackRunner] = [
            RecordedRunner(each, table, shapes, spec.vocab_size, parallel.clock) for each in stacks
        ]
    else:
        of_device = numerics, embed.dtype, torch.device(device), attention_backend
        attend = {shape: make_attention(shape, *of_device) for shape in shapes}
        eager = [TorchRunner(each, table, attend, numerics, parallel.clock) for each in stacks]
        captures = captures_decodes(spec, numerics, device, attention_backend)
        runs = [GraphRunner(eager[0], parallel)] if captures else list(eager)
    return MoeDecoder(spec, stack, runs[0], prediction, runs[1] if prediction is not None else None)


def _prediction(
    layer: DecoderLayer, weights: dict[str, Any], eps: float, embedding: Any, forms: WeightForms
) -> PredictionStack:
    """Returns a layer that predicts. weights: what it has beside a layer's"""
    join, hidden = weights["join"], weights["hidden_norm"].shape[0]
    return PredictionStack(
        embed=embedding,
        embed_norm=weights["embed_norm"],
        hidden_norm=weights["hidden_norm"],
        join_embed=forms.linear(join[:, :hidden].contiguous()),
        join_hidden=forms.linear(join[:, hidden:].contiguous()),
        layer=layer,
        norm=weights["head_norm"],
        eps=eps,
        head=forms.linear(weights["head"]),
    )


def captures_decodes(spec: ModelSpec, numerics: Numerics, device: torch.device | str, attention_backend: str) -> bool:
    """Returns whether decode steps may be captured in graphs, so that their batches are padded and stay in place.

    A layer that predicts reads the rows of the last step, which a graph does not keep.
    """
    by_triton = attention_backend in ("auto", "triton")
    can = torch.device(device).type == "cuda" and by_triton and not numerics.invariant
    return can and spec.predictor_id is None


def kv_layouts(spec: ModelSpec, keeps_experts: bool = False, keeps_changed: bool = False) -> tuple[KvLayout, ...]:
    """Returns the layout of every layer of the cache, to size the cache before there is a decoder.

    keeps_experts: the experts of each token are kept beside its keys and values
    keeps_changed: so is how many of them the capacity of experts has changed
    """
    beside: tuple[KvLayout, ...] = ()
    if keeps_experts:
        beside += (KvLayout.ids(spec.num_moe_layers, spec.topk, spec.router.num_choices),)
    if keeps_changed:
        beside += (KvLayout.changed(),)
    attention = spec.attention
    if isinstance(attention, GqaSpec):
        in_layers = map(attention.in_layer, spec.attention_layer_ids)
        return tuple(KvLayout.gqa(each.num_kv_heads, each.head_dim, each.value_dim) for each in in_layers) + beside
    if isinstance(attention, CompressedSpec):
        return compressed_layouts(attention, spec.num_layers) + beside
    layouts = (KvLayout.mla(attention.kv_lora_rank, attention.rope_dim),) * len(spec.attention_layer_ids)
    if attention.indexer is not None:  # its keys lie behind the latents of all layers
        layouts += (KvLayout.mla(attention.indexer.width, 0),) * len(layouts)
    return layouts + beside


def expert_id_bytes(spec: ModelSpec) -> int:
    """Returns the size of the experts of one token, as they are kept."""
    return spec.num_moe_layers * spec.topk * id_dtype(spec.router.num_choices).itemsize


def state_shapes(spec: ModelSpec) -> tuple[StateShapes, ...]:
    """Returns the shapes of what each layer with a state keeps of a request, in float32."""
    return () if spec.stateful is None else (spec.stateful.state_shapes,) * len(spec.stateful_layer_ids)


def make_attention(
    shape: AttentionShape, numerics: Numerics, dtype: torch.dtype, device: torch.device, backend: str
) -> Attention:
    """Returns the attention for a device: Triton's kernels on GPUs, or those of a package; torch elsewhere."""
    if device.type == "cuda":
        if backend in ("flashinfer", "flashmla"):
            from moe_serve.attention_dp.attention_packages import FlashInferAttention, FlashMlaAttention

            make = FlashInferAttention if backend == "flashinfer" else FlashMlaAttention
            return make(shape, numerics, dtype, device)
        from moe_serve.attention_dp.triton_attention import TritonAttention

        return TritonAttention(shape, numerics)
    return PagedAttention(shape, numerics, dtype, device)


def _stateful_layer(spec: ModelSpec, layer_id: int, weights: dict[str, Any], forms: WeightForms) -> AnyStatefulLayer:
    shape, index, eps = spec.stateful, spec.stateful_layer_ids.index(layer_id), spec.norm_eps
    assert shape is not None
    if isinstance(shape, DeltaShape):
        return delta_layer(shape, eps, index, weights, forms)
    if isinstance(shape, MambaShape):
        return mamba_layer(shape, eps, index, weights, forms)
    if isinstance(shape, SelectiveShape):
        return selective_layer(shape, eps, index, weights, forms)
    if isinstance(shape, LightningShape):
        return lightning_layer(shape, index, layer_id, weights, forms)
    return conv_layer(shape, index, weights, forms)


def _factors(spec: ModelSpec, layer_id: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns attention_factors and fed_factors of a layer."""
    if spec.normed_residual is None:
        return (1.0, 1.0), (1.0, spec.moe_factor if layer_id in spec.moe_layer_ids else 1.0)
    normed = spec.normed_residual
    return normed.stateful if layer_id in spec.stateful_layer_ids else normed.attention, normed.fed


def _streams(spec: ModelSpec, weights: dict[str, Any], name: str, forms: WeightForms, mixes: bool) -> Streams:
    """Takes what joins a sublayer to the residual's streams."""
    scale, base = weights.pop(name + "_scale"), weights.pop(name + "_base")
    return Streams(forms.linear(weights.pop(name)), StreamWeights(spec.stream_shape(mixes), scale, base))


def _choices(spec: ModelSpec, layer_id: int, chosen: Tensor) -> Tensor:
    """Returns the experts of each token id, [vocab_size, topk] int64. Raises ModelError where they are no experts."""
    ids = chosen.long()
    if not ids.is_meta and ids.numel():
        ordered = ids.sort(1).values
        if ordered.min() < 0 or ordered.max() >= spec.num_logical or (ordered[:, 1:] == ordered[:, :-1]).any():
            raise ModelError(
                f"the table of layer {layer_id} that gives each token its experts (tid2eid) has other numbers than "
                f"{spec.topk} different ones below {spec.num_logical} for each; download the checkpoint again"
            )
    return ids


def _shared_expert(weights: dict[str, Any], forms: WeightForms) -> SharedExpert:
    gate = weights.pop("shared_gate", None)
    return SharedExpert(_mlp(weights, "shared_", forms), None if gate is None else forms.linear(gate))


def _norm(spec: ModelSpec, weights: dict[str, Any], name: str, forms: WeightForms) -> AnyNorm:
    weight: Tensor = weights.pop(name)
    if name + "_gate_in" in weights:
        return GatedNorm(weight, *(forms.take_linear(weights, name + part) for part in ("_gate_in", "_gate_out")))
    if spec.normed_residual is not None:
        return ResidualNorm(weight)
    if spec.norm == "rms":
        return weight
    return LayerNorm(weight, weights.pop(name + "_bias") if spec.norm == "layer_bias" else torch.zeros_like(weight))


def _mlp(weights: dict[str, Any], prefix: str, forms: WeightForms) -> GatedMlp | Fp8Mlp | PackedMlp:
    scales = weights.pop(prefix + "gate_up_scale", None), weights.pop(prefix + "down_scale", None)
    return forms.mlp(weights.pop(prefix + "gate_up"), weights.pop(prefix + "down"), scales)
