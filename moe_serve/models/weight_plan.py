"""The tensors of a model and their names in its checkpoint: one table for loading, checking and dummy weights.

Our names are short and fused where the forward uses one GEMM ("layers.3.qkv"); a tensor's parts are stacked along rows.
Experts of gpt-oss are stored together, in another order than ours and often in MXFP4, and those of DBRX one below the
other; where that is so the plan says it, and the reader brings them into our form.

Shape words: H = hidden, I = width of an MLP, E = num_logical.
"""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from moe_serve.kernels.forms import (
    MXFP4_BLOCK,
    DeltaShape,
    GatedConvShape,
    LightningShape,
    MambaShape,
    SelectiveShape,
)
from moe_serve.models.spec import AnyStateful, CompressedSpec, GqaSpec, MlaSpec, ModelSpec

_BODY = "model."
_LAYERS = _BODY + "layers."
HEAD = "lm_head.weight"
JOIN = "eh_proj.weight"  # of a layer for multi-token prediction


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor: its name, shape, and other names it may have instead.

    dtype_name: the only one that it may have; None: any of numbers
    is_flat: it is stored with its first two dimensions as one
    """

    source: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    dtype_name: str | None = None
    is_flat: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.shape[0] * self.shape[1], *self.shape[2:]) if self.is_flat else self.shape


@dataclass(frozen=True)
class DenseTensor:
    """One tensor that every rank holds, of which the checkpoint has parts that lie one below the other.

    kind: how dummy weights are drawn; "bias32" stays in float32, and so do "choices", the experts of each token id
    in_heads: the parts are those of each head, [heads, k, n] of keys and [heads, n, k] of values
    plus_one: what is stored is a norm's weight less 1
    """

    name: str
    parts: tuple[Part, ...]
    kind: Literal["matrix", "norm", "bias", "bias32", "choices"] = "matrix"
    in_heads: bool = False
    plus_one: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        if self.in_heads:
            return first[0] * (first[2] + self.parts[1].shape[1]), first[1]
        return (sum(part.shape[0] for part in self.parts), *first[1:])


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor per expert of one layer: either per-expert parts, or fused checkpoint tensors of all experts.

    parts_of(e): the parts of expert e, stacked along rows; none where a family stores experts together only
    fused:       likewise of all experts, [E, rows, k], in our own form unless the next three say otherwise
    transposed:  each expert lies in the fused tensor as [k, n]
    interleaved: its rows of gate and up alternate
    mxfp4_scale: of the fused tensor, which holds blocks of MXFP4 values; None: it holds numbers
    """

    name: Literal["gate_up", "down", "gate_up_bias", "down_bias"]
    layer_id: int
    shape: tuple[int, ...]
    templates: tuple[Part, ...]  # {e} stands for the expert
    fused: tuple[Part, ...]
    transposed: bool = False
    interleaved: bool = False
    mxfp4_scale: Part | None = None

    @property
    def kind(self) -> Literal["matrix", "bias"]:
        return "matrix" if len(self.shape) == 2 else "bias"

    @property
    def is_own_form(self) -> bool:
        """Whether the fused tensor holds our rows in our order, as parts always do."""
        return self.kind == "matrix" and self.mxfp4_scale is None and not (self.transposed or self.interleaved)

    def parts_of(self, expert: int) -> tuple[Part, ...]:
        return tuple(Part(part.source.format(e=expert), part.shape) for part in self.templates)


def dense_tensors(spec: ModelSpec) -> Iterator[DenseTensor]:
    """Yields every tensor that all ranks hold, in the order of the forward pass."""
    for plan in _dense_tensors(spec):
        yield replace(plan, parts=tuple(_prefixed(spec, part) for part in plan.parts))


def dense_parameters(spec: ModelSpec) -> int:
    """Returns the number of parameters that every rank holds: all but those of the routed experts."""
    return sum(math.prod(tensor.shape) for tensor in _dense_tensors(spec))


def expert_tensors(spec: ModelSpec) -> Iterator[ExpertTensor]:
    """Yields the expert tensors of every MoE layer: two matrices, and their biases where there are any."""
    for plan in _expert_tensors(spec):
        templates, fused = (tuple(_prefixed(spec, part) for part in parts) for parts in (plan.templates, plan.fused))
        yield replace(plan, templates=templates, fused=fused)


def embedding_of(spec: ModelSpec) -> str:
    """Returns the name of the embedding in the text model alone."""
    return f"{_BODY}{spec.embedding_name}.weight"


def stored_name(spec: ModelSpec, name: str) -> str:
    """Returns the checkpoint's name of a tensor that is called "model.…" or "lm_head.…" in the text model alone."""
    if spec.is_paired and name.startswith(_LAYERS):
        layer, _, rest = name.removeprefix(_LAYERS).partition(".")
        name = f"{_LAYERS}{int(layer) // 2}.{rest.replace('{half}', str(int(layer) % 2))}"
    if name == HEAD:
        name = f"{spec.head_name}.weight"
    if name.startswith(_LAYERS):
        name = f"{_BODY}{spec.layers_name}.{name.removeprefix(_LAYERS)}"
    body = spec.body_prefix + name.removeprefix(_BODY) if name.startswith(_BODY) else name
    return spec.tensor_prefix + body


def _prefixed(spec: ModelSpec, part: Part) -> Part:
    source = stored_name(spec, part.source)
    aliases = tuple(stored_name(spec, alias) for alias in part.aliases)
    return part if source == part.source else replace(part, source=source, aliases=aliases)


def _dense_tensors(spec: ModelSpec) -> Iterator[DenseTensor]:
    vocab_shape = (spec.vocab_size, spec.hidden)
    yield DenseTensor("embed", (Part(embedding_of(spec), vocab_shape),))
    unattended, unfed = set(spec.unattended_layer_ids), set(spec.unfed_layer_ids)
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        if layer not in unattended:
            yield from _attention(spec, layer, ours, theirs)
        if layer not in unfed:
            yield from _fed(spec, layer, ours, theirs)
        if layer == spec.predictor_id:
            yield from _predictor(spec, ours, theirs)
    if spec.streams is not None:
        yield from _streams(spec, "head_streams", _BODY + "hc_head.hc", mixes=False)
    yield from _layer_norm(spec, "norm", _BODY + spec.norm_names.last)
    if not spec.tie_embeddings:
        yield DenseTensor("lm_head", (Part(HEAD, vocab_shape),))
    if spec.head_bias:
        yield DenseTensor("lm_head_bias", (Part("lm_head.bias", vocab_shape[:1]),), "bias")


def _attention(spec: ModelSpec, layer: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields what a layer attends with, or keeps a state with, and its norms."""
    if spec.streams is not None:
        yield from _streams(spec, ours + "attention_streams", theirs + "hc_attn", mixes=True)
    yield from _named_norm(spec, ours + "input_norm", theirs, spec.norm_names.input, may_be_gated=True)
    if layer in spec.stateful_layer_ids and spec.stateful is not None:
        yield from _stateful(spec.stateful, spec.hidden, ours, f"{theirs}{spec.stateful_block}.")
    elif isinstance(spec.attention, GqaSpec):
        yield from _gqa(spec.attention.in_layer(layer), spec, ours, f"{theirs}{spec.attention.block}.")
    elif isinstance(spec.attention, CompressedSpec):
        yield from _compressed(spec.attention, spec.hidden, layer, ours, theirs + "attn.")
    else:
        yield from _mla(spec.attention, spec.hidden, ours, f"{theirs}{spec.attention.block}.")
    yield from _named_norm(spec, ours + "attention_out_norm", theirs, spec.norm_names.behind_attention)


def _fed(spec: ModelSpec, layer: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields an MLP, or what all ranks have of experts, and their norms."""
    names, is_moe = spec.norm_names, layer in spec.moe_layer_ids
    if spec.streams is not None:
        yield from _streams(spec, ours + "fed_streams", theirs + "hc_ffn", mixes=True)
    yield from _named_norm(spec, ours + "post_norm", theirs, names.post, may_be_gated=is_moe)
    if is_moe:
        yield from _moe(spec, layer, ours, theirs)
    if not is_moe or spec.is_paired:
        yield from _mlp(spec, ours, f"{theirs}{spec.expert_names.dense}.", spec.dense_intermediate)
    yield from _named_norm(spec, ours + "mlp_out_norm", theirs, names.behind_moe if is_moe else names.behind_dense)


def _expert_tensors(spec: ModelSpec) -> Iterator[ExpertTensor]:
    hidden, width, stacks = spec.expert_hidden, spec.moe_intermediate, spec.activation.stacks
    for layer in spec.moe_layer_ids:
        if spec.expert_names.form == "apart":
            yield _apart(spec, layer, "gate_up", stacks * width, hidden)
            yield _apart(spec, layer, "down", hidden, width)
            if spec.expert_bias:
                yield _biases_apart(spec, layer, "gate_up_bias", stacks * width)
                yield _biases_apart(spec, layer, "down_bias", hidden)
        elif spec.expert_names.form == "flat":
            yield from _one_below_the_other(spec, layer)
        else:
            yield from _together(spec, layer, "gate_up", stacks * width, hidden)
            yield from _together(spec, layer, "down", hidden, width)


def _apart(spec: ModelSpec, layer: int, name: Literal["gate_up", "down"], n: int, k: int) -> ExpertTensor:
    """Returns a matrix of each expert, [n, k]; all experts may be stored as one tensor [E, n, k], as Granite's are."""
    fused = spec.expert_names.fused
    if fused is None:
        source, templates = f"model.layers.{layer}.mlp.experts.{name}_proj", _templates(spec, layer, name)
    else:
        stored = fused[0] if name == "gate_up" else fused[1]
        source, templates = f"model.layers.{layer}.{spec.expert_names.block}.{stored}", ()
    return ExpertTensor(name, layer, (n, k), templates, (Part(source, (spec.num_logical, n, k)),))


def _one_below_the_other(spec: ModelSpec, layer: int) -> Iterator[ExpertTensor]:
    """Yields the matrices of experts that are stored as [E * I, H], that of down transposed."""
    names, width, hidden = spec.expert_names, spec.moe_intermediate, spec.expert_hidden
    gate, up, down = (
        Part(f"model.layers.{layer}.{names.block}.{name}", (spec.num_logical, width, hidden), is_flat=True)
        for name in (names.gate, names.up, names.down)
    )
    yield ExpertTensor("gate_up", layer, (2 * width, hidden), (), (gate, up))
    yield ExpertTensor("down", layer, (hidden, width), (), (down,), transposed=True)


def _biases_apart(spec: ModelSpec, layer: int, name: Literal["gate_up_bias", "down_bias"], n: int) -> ExpertTensor:
    """Returns the biases of each expert, [n], those of gate and up apart, as in a GGUF file."""
    block, names = f"model.layers.{layer}.{spec.expert_names.block}.experts.", spec.expert_names
    linears = (names.down,) if name == "down_bias" else (names.gate, names.up)
    templates = tuple(Part(f"{block}{{e}}.{linear}.bias", (n // len(linears),)) for linear in linears)
    return ExpertTensor(name, layer, (n,), templates, (Part(f"{block}{name}", (spec.num_logical, n)),))


def _templates(spec: ModelSpec, layer: int, name: Literal["gate_up", "down"]) -> tuple[Part, ...]:
    """Returns the parts of a matrix where each expert has its own tensors."""
    names, hidden, width = spec.expert_names, spec.expert_hidden, spec.moe_intermediate
    block = f"model.layers.{layer}.{names.block}.experts."
    if name == "down":
        return (Part(block + "{e}." + names.down + ".weight", (hidden, width)),)
    stacked = (names.gate, names.up)[-spec.activation.stacks :]
    return tuple(Part(block + "{e}." + each + ".weight", (width, hidden)) for each in stacked)


def _together(spec: ModelSpec, layer: int, name: Literal["gate_up", "down"], n: int, k: int) -> Iterator[ExpertTensor]:
    """Yields a matrix that is stored as [E, k, n] or in MXFP4, and its biases."""
    source = f"model.layers.{layer}.{spec.expert_names.block}.experts.{name}_proj"
    fused, scale = Part(source, (spec.num_logical, k, n)), None
    if spec.experts_in_mxfp4:
        blocks = (spec.num_logical, n, k // MXFP4_BLOCK)
        fused = Part(source + "_blocks", (*blocks, MXFP4_BLOCK // 2), dtype_name="U8")
        scale = Part(source + "_scales", blocks, dtype_name="U8")
    alternate = name == "gate_up" and spec.expert_names.form == "interleaved"
    # Llama-4 quantised by compressed-tensors has a tensor for each expert.
    templates = _templates(spec, layer, name) if spec.expert_names.form == "transposed" else ()
    yield ExpertTensor(name, layer, (n, k), templates, (fused,), scale is None, alternate, scale)
    if spec.expert_bias:
        biases = Part(source + "_bias", (spec.num_logical, n))
        bias: Literal["gate_up_bias", "down_bias"] = "gate_up_bias" if name == "gate_up" else "down_bias"
        yield ExpertTensor(bias, layer, (n,), (), (biases,), interleaved=alternate)


_COMPUTED = ("rotary_emb.inv_freq", ".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
_SCALES_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """Returns whether a checkpoint tensor is known and not needed.

    These are the parts for images and sound of a model whose text model is served, layers for multi-token prediction
    behind the last layer, and the embedding of one that is read, computed buffers, a copy of tied embeddings, norms of
    MoE layers that dense ones have, too, halves of experts that give back what they take, as transformers writes them,
    and beside FP8 weights the scales of activations and of the KV cache, which are not quantised here.
    """
    if name.startswith(spec.other_models):
        return True
    if name == stored_name(spec, HEAD):
        return spec.tie_embeddings
    body = stored_name(spec, _BODY)
    name = _BODY + name.removeprefix(body) if name.startswith(body) else name
    if name.endswith((*_COMPUTED, ".masked_bias")) or name.startswith(("model.mtp_", "model.mtp.", "mtp.")):
        return True
    if spec.fp8_block is not None and name.endswith(_SCALES_OF_ACTIVATIONS):
        return True
    names = spec.norm_names
    expert = name.partition(f".{spec.expert_names.block}.experts.")[2].partition(".")[0]
    if spec.router.num_identity and expert.isdigit() and int(expert) >= spec.num_logical:
        return True
    if names.behind_dense is None and names.behind_moe is not None and name.endswith(f".{names.behind_moe}.weight"):
        return True
    if name == f"{_LAYERS}{spec.predictor_id}.embed_tokens.weight":
        return True
    layer = name[len(_LAYERS) :].split(".", 1)[0] if name.startswith(_LAYERS) else ""
    return layer.isdigit() and int(layer) >= spec.num_layers


def _norm(name: str, source: str, width: int, plus_one: bool = False) -> DenseTensor:
    return DenseTensor(name, (Part(source, (width,)),), "norm", plus_one=plus_one)


def _layer_norm(spec: ModelSpec, name: str, source: str) -> Iterator[DenseTensor]:
    yield _norm(name, source + ".weight", spec.hidden, spec.norms_from_zero)
    if spec.norm == "layer_bias":
        yield DenseTensor(name + "_bias", (Part(source + ".bias", (spec.hidden,)),), "bias")


def _named_norm(
    spec: ModelSpec, name: str, layer: str, source: str | None, may_be_gated: bool = False
) -> Iterator[DenseTensor]:
    """Yields a norm of a layer, and its gate where it has one; None: there is none."""
    if source is None:
        return
    rank, hidden = spec.norm_names.gate_rank, spec.hidden
    if rank is None or not may_be_gated:
        yield from _layer_norm(spec, name, layer + source)
        return
    yield from _layer_norm(spec, name, f"{layer}{source}.norm")
    yield DenseTensor(name + "_gate_in", (Part(f"{layer}{source}.W_down.weight", (rank, hidden)),))
    yield DenseTensor(name + "_gate_out", (Part(f"{layer}{source}.W_up.weight", (hidden, rank)),))


def _mlp(spec: ModelSpec, ours: str, theirs: str, width: int) -> Iterator[DenseTensor]:
    """Yields an MLP; its matrices have the names that experts have, or those of gate and up together, and of down."""
    hidden, names = spec.hidden, spec.expert_names
    *stacked, down = names.mlp or (names.gate, names.up, names.down)
    parts = tuple(Part(f"{theirs}{name}.weight", (width, hidden)) for name in stacked[-spec.activation.stacks :])
    if names.linears is not None:
        parts, down = (Part(f"{theirs}{names.linears[0]}.weight", (2 * width, hidden)),), names.linears[1]
    yield DenseTensor(ours + "gate_up", parts)
    yield DenseTensor(ours + "down", (Part(f"{theirs}{down}.weight", (hidden, width)),))


def _predictor(spec: ModelSpec, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields what a layer for multi-token prediction has beside a layer's tensors, in the names of DeepSeek-V3.

    The embedding is the model's; the projection to logits may be, and is then not stored again.
    """
    yield _norm(ours + "embed_norm", theirs + "enorm.weight", spec.hidden)
    yield _norm(ours + "hidden_norm", theirs + "hnorm.weight", spec.hidden)
    yield DenseTensor(ours + "join", (Part(theirs + JOIN, (spec.hidden, 2 * spec.hidden)),))
    yield _norm(ours + "head_norm", theirs + "shared_head.norm.weight", spec.hidden)
    usual = embedding_of(spec) if spec.tie_embeddings else HEAD
    head = Part(theirs + "shared_head.head.weight", (spec.vocab_size, spec.hidden), (usual,))
    yield DenseTensor(ours + "head", (head,))


def has_predictor(spec: ModelSpec, names: Container[str]) -> bool:
    """Returns whether a checkpoint with tensors of these names has the first layer for multi-token prediction.

    spec: without that layer. Exporters drop such layers and keep config.json.
    """
    return f"{spec.tensor_prefix}model.layers.{spec.num_layers}.{JOIN}" in names


def _moe(spec: ModelSpec, layer: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    block, router = spec.expert_names.block, f".{spec.expert_names.router}"
    # transformers 5 names every family's block "mlp" in memory, and some exporters write that name.
    num_choices = spec.router.num_choices
    shape, other_name = (num_choices, spec.hidden), f"{theirs}mlp{router}.weight"
    yield DenseTensor(ours + "router", (Part(theirs + block + router + ".weight", shape, (other_name,)),))
    if layer in spec.choosing_layer_ids:
        table = Part(f"{theirs}{block}{router}.tid2eid", (spec.vocab_size, spec.topk))
        yield DenseTensor(ours + "chosen", (table,), "choices")
    elif spec.router.has_bias:
        bias_shape = (1, num_choices) if spec.expert_names.router_bias_is_row else (num_choices,)
        bias = Part(f"{theirs}{spec.expert_names.bias_block or block}.{spec.expert_names.router_bias}", bias_shape)
        yield DenseTensor(ours + "router_bias", (bias,), "bias32")
    if spec.router.has_logit_bias:
        bias = Part(theirs + block + router + ".bias", (num_choices,))
        yield DenseTensor(ours + "router_logit_bias", (bias,), "bias32")
    if spec.latent is not None:
        latent_in, latent_out = (f"{theirs}{block}.{name}.weight" for name in ("fc1_latent_proj", "fc2_latent_proj"))
        yield DenseTensor(ours + "latent_in", (Part(latent_in, (spec.latent, spec.hidden)),))
        yield DenseTensor(ours + "latent_out", (Part(latent_out, (spec.hidden, spec.latent)),))
    if spec.shared_intermediate:
        names = spec.expert_names
        yield from _mlp(spec, ours + "shared_", f"{theirs}{names.shared}.", spec.shared_intermediate)
        if spec.has_shared_gate:
            yield DenseTensor(ours + "shared_gate", (Part(f"{theirs}{names.shared_gate}.weight", (1, spec.hidden)),))


def _gqa(spec: GqaSpec, model: ModelSpec, ours: str, theirs: str) -> Iterator[DenseTensor]:
    hidden, q, kv = model.hidden, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    value_dim = spec.value_dim or spec.head_dim
    queries = 2 * q if spec.has_gate and spec.gate_name is None else q
    widths = [("q_proj", queries), ("k_proj", kv), ("v_proj", spec.num_kv_heads * value_dim)]
    if spec.gate_name is not None:
        widths.append((spec.gate_name, q))
    if spec.qkv_name is not None:
        widths = [(spec.qkv_name, sum(width for _, width in widths))]
    yield DenseTensor(ours + "qkv", tuple(Part(f"{theirs}{n}.weight", (width, hidden)) for n, width in widths))
    attended = spec.num_heads * value_dim
    yield DenseTensor(ours + "o", (Part(f"{theirs}{spec.out_name}.weight", (hidden, attended)),))
    if spec.head_gate_name is not None:
        gates = Part(f"{theirs}{spec.head_gate_name}.weight", (spec.num_heads, hidden))
        yield DenseTensor(ours + "head_gates", (gates,))
    if spec.qkv_bias:
        parts = tuple(Part(f"{theirs}{n}.bias", (width,)) for n, width in widths)
        yield DenseTensor(ours + "qkv_bias", parts, "bias")
    if spec.out_bias:
        yield DenseTensor(ours + "o_bias", (Part(f"{theirs}{spec.out_name}.bias", (hidden,)),), "bias")
    if any(spec.norm_widths):
        for name, their_name, width in zip(("q_norm", "k_norm"), spec.norm_names, spec.norm_widths, strict=True):
            yield _norm(ours + name, f"{theirs}{their_name}.weight", width, model.norms_from_zero)
    if spec.has_sinks:
        yield DenseTensor(ours + "sinks", (Part(theirs + spec.sinks_name, (spec.num_heads,)),), "bias32")


def _stateful(shape: AnyStateful, hidden: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields the tensors of a layer that keeps a state of each request."""
    if isinstance(shape, DeltaShape):
        yield from _delta(shape, hidden, ours, theirs)
    elif isinstance(shape, MambaShape):
        yield from _mamba(shape, hidden, ours, theirs)
    elif isinstance(shape, SelectiveShape):
        yield from _selective(shape, hidden, ours, theirs)
    elif isinstance(shape, LightningShape):
        yield from _lightning(shape, hidden, ours, theirs)
    else:
        yield from _gated_conv(shape, hidden, ours, theirs)


def _gated_conv(shape: GatedConvShape, hidden: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields the tensors of a convolution between two projections (LFM2)."""
    width = shape.width
    yield DenseTensor(ours + "conv_in", (Part(theirs + "in_proj.weight", (shape.row_width, hidden)),))
    yield DenseTensor(ours + "conv", (Part(theirs + "conv.weight", (width, 1, shape.taps)),), "bias32")
    yield DenseTensor(ours + "conv_out", (Part(theirs + "out_proj.weight", (hidden, width)),))
    if shape.bias:
        yield DenseTensor(ours + "conv_in_bias", (Part(theirs + "in_proj.bias", (shape.row_width,)),), "bias")
        yield DenseTensor(ours + "conv_bias", (Part(theirs + "conv.bias", (width,)),), "bias32")
        yield DenseTensor(ours + "conv_out_bias", (Part(theirs + "out_proj.bias", (hidden,)),), "bias")


def _mamba(shape: MambaShape, hidden: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields the tensors of a state-space layer."""
    channels, heads = shape.conv.channels, shape.heads
    yield DenseTensor(ours + "mamba_in", (Part(theirs + "in_proj.weight", (shape.row_width, hidden)),))
    yield DenseTensor(ours + "mamba_conv", (Part(theirs + "conv1d.weight", (channels, 1, shape.taps)),), "bias32")
    if shape.conv_bias:
        yield DenseTensor(ours + "mamba_conv_bias", (Part(theirs + "conv1d.bias", (channels,)),), "bias32")
    for name, stored in (("decay", "A_log"), ("step_bias", "dt_bias"), ("skip", "D")):
        yield DenseTensor(f"{ours}mamba_{name}", (Part(theirs + stored, (heads,)),), "bias32")
    yield _norm(ours + "mamba_norm", theirs + "norm.weight", shape.inner)
    yield DenseTensor(ours + "mamba_out", (Part(theirs + "out_proj.weight", (hidden, shape.inner)),))
    if shape.bias:
        yield DenseTensor(ours + "mamba_in_bias", (Part(theirs + "in_proj.bias", (shape.row_width,)),), "bias")
        yield DenseTensor(ours + "mamba_out_bias", (Part(theirs + "out_proj.bias", (hidden,)),), "bias")


def _selective(shape: SelectiveShape, hidden: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields the tensors of a state-space layer of Mamba's first version, with Jamba's norms."""
    ours, inner, width = ours + "selective_", shape.inner, shape.state_width
    yield DenseTensor(ours + "in", (Part(theirs + "in_proj.weight", (shape.row_width, hidden)),))
    yield DenseTensor(ours + "conv", (Part(theirs + "conv1d.weight", (inner, 1, shape.taps)),), "bias32")
    if shape.conv_bias:
        yield DenseTensor(ours + "conv_bias", (Part(theirs + "conv1d.bias", (inner,)),), "bias32")
    yield DenseTensor(ours + "shared", (Part(theirs + "x_proj.weight", (shape.rank + 2 * width, inner)),))
    for name, stored, size in (("step", "dt", shape.rank), ("key", "b", width), ("query", "c", width)):
        yield _norm(f"{ours}{name}_norm", f"{theirs}{stored}_layernorm.weight", size)
    yield DenseTensor(ours + "steps", (Part(theirs + "dt_proj.weight", (inner, shape.rank)),))
    yield DenseTensor(ours + "step_bias", (Part(theirs + "dt_proj.bias", (inner,)),), "bias32")
    yield DenseTensor(ours + "decay", (Part(theirs + "A_log", (inner, width)),), "bias32")
    yield DenseTensor(ours + "skip", (Part(theirs + "D", (inner,)),), "bias32")
    yield DenseTensor(ours + "out", (Part(theirs + "out_proj.weight", (hidden, inner)),))
    if shape.bias:
        yield DenseTensor(ours + "in_bias", (Part(theirs + "in_proj.bias", (shape.row_width,)),), "bias")
        yield DenseTensor(ours + "out_bias", (Part(theirs + "out_proj.bias", (hidden,)),), "bias")


def _lightning(shape: LightningShape, hidden: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields the tensors of lightning attention; a head's query, key and value lie side by side."""
    inner = shape.inner
    parts = Part(theirs + "qkv_proj.weight", (3 * inner, hidden)), Part(theirs + "output_gate.weight", (inner, hidden))
    yield DenseTensor(ours + "lightning_in", parts)
    yield _norm(ours + "lightning_norm", theirs + "norm.weight", inner)
    yield DenseTensor(ours + "lightning_out", (Part(theirs + "out_proj.weight", (hidden, inner)),))


def _delta(shape: DeltaShape, hidden: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields the tensors of linear attention; its row is projected by two matrices (Qwen3-Next), by four, or by six."""
    heads, keys, values = shape.value_heads, shape.key_heads * shape.key_width, shape.value_heads * shape.value_width
    widths: tuple[tuple[str, int], ...]
    convs: tuple[tuple[str, int], ...] = (("conv1d", shape.channels),)
    decay: tuple[int, ...] = (heads,)
    norm, out = "norm", "out_proj"
    if shape.rank is not None:
        widths = (("q_proj", keys), ("k_proj", keys), ("v_proj", values), ("b_proj", heads))
        convs = ("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values)
        norm = "o_norm"
        if shape.rank == 0:
            widths, out = (*widths, ("f_proj", shape.num_steps), ("g_proj", values)), "dense"
        else:
            widths, out = (*widths, ("f_a_proj", shape.rank), ("g_a_proj", shape.rank)), "o_proj"
            decay = (1, 1, heads, 1)
            yield DenseTensor(ours + "delta_steps", (Part(theirs + "f_b_proj.weight", (shape.num_steps, shape.rank)),))
            yield DenseTensor(ours + "delta_gates", (Part(theirs + "g_b_proj.weight", (values, shape.rank)),))
    elif shape.grouped:
        widths = (("in_proj_qkvz", shape.channels + values), ("in_proj_ba", 2 * heads))
    else:
        widths = (("in_proj_qkv", shape.channels), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads))
    yield DenseTensor(ours + "delta_in", tuple(Part(f"{theirs}{n}.weight", (width, hidden)) for n, width in widths))
    parts = tuple(Part(f"{theirs}{n}.weight", (width, 1, shape.taps)) for n, width in convs)
    yield DenseTensor(ours + "delta_conv", parts, "bias32")
    yield DenseTensor(ours + "delta_decay", (Part(theirs + "A_log", decay),), "bias32")
    yield DenseTensor(ours + "delta_step_bias", (Part(theirs + "dt_bias", (shape.num_steps,)),), "bias32")
    yield _norm(ours + "delta_norm", f"{theirs}{norm}.weight", shape.value_width)
    other_name = (theirs + "o_proj.weight",)  # some exporters write what transformers has in memory
    yield DenseTensor(ours + "delta_out", (Part(f"{theirs}{out}.weight", (hidden, values), other_name),))


def _mla(spec: MlaSpec, hidden: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    q, rank = spec.num_heads * spec.query_dim, spec.q_lora_rank
    kv_a = Part(theirs + "kv_a_proj_with_mqa.weight", (spec.latent_dim, hidden))
    kv_a_bias = Part(theirs + "kv_a_proj_with_mqa.bias", (spec.latent_dim,))
    if rank is None:
        # Without q-LoRA the queries never have a bias.
        yield DenseTensor(ours + "q_kv_a", (Part(theirs + "q_proj.weight", (q, hidden)), kv_a))
        if spec.bias:
            yield DenseTensor(ours + "kv_a_bias", (kv_a_bias,), "bias")
    else:
        yield DenseTensor(ours + "q_kv_a", (Part(theirs + "q_a_proj.weight", (rank, hidden)), kv_a))
        if spec.bias:
            yield DenseTensor(ours + "q_kv_a_bias", (Part(theirs + "q_a_proj.bias", (rank,)), kv_a_bias), "bias")
        yield _norm(ours + "q_a_norm", theirs + "q_a_layernorm.weight", rank)
        if spec.gates_values:
            q_gate = Part(theirs + "q_b_proj.weight", (q + spec.num_heads * spec.value_dim, 2 * rank))
            yield DenseTensor(ours + "q_gate", (q_gate,))
        else:
            yield DenseTensor(ours + "q_b", (Part(theirs + "q_b_proj.weight", (q, rank)),))
    if spec.indexer is not None and rank is not None:
        heads, width, source = spec.indexer.num_heads, spec.indexer.width, theirs + "indexer."
        yield DenseTensor(ours + "index_q", (Part(source + "wq_b.weight", (heads * width, rank)),))
        yield DenseTensor(ours + "index_k", (Part(source + "wk.weight", (width, hidden)),))
        yield _norm(ours + "index_k_norm", source + "k_norm.weight", width)
        yield DenseTensor(ours + "index_k_norm_bias", (Part(source + "k_norm.bias", (width,)),), "bias")
        yield DenseTensor(ours + "index_weights", (Part(source + "weights_proj.weight", (heads, hidden)),))
    yield _norm(ours + "kv_a_norm", theirs + "kv_a_layernorm.weight", spec.kv_lora_rank)
    heads, latent = spec.num_heads, spec.kv_lora_rank
    if spec.splits_heads:
        keys = Part(theirs + "k_b_proj.weight", (heads, latent, spec.nope_dim))
        values = Part(theirs + "v_b_proj.weight", (heads, spec.value_dim, latent))
        yield DenseTensor(ours + "kv_b", (keys, values), in_heads=True)
    else:
        kv_b = Part(theirs + "kv_b_proj.weight", (heads * (spec.nope_dim + spec.value_dim), latent))
        yield DenseTensor(ours + "kv_b", (kv_b,))
    out = theirs + spec.out_name
    yield DenseTensor(ours + "o", (Part(out + ".weight", (hidden, spec.num_heads * spec.value_dim)),))
    if spec.bias:
        yield DenseTensor(ours + "o_bias", (Part(out + ".bias", (hidden,)),), "bias")
    if spec.gate_name is not None:
        yield DenseTensor(ours + "head_gates", (Part(f"{theirs}{spec.gate_name}.weight", (spec.num_heads, hidden)),))


def _compressed(spec: CompressedSpec, hidden: int, layer: int, ours: str, theirs: str) -> Iterator[DenseTensor]:
    """Yields the tensors of attention to a window and to entries; all that is projected of x is one matrix."""
    shape, rank, heads = spec.in_layer(layer, 1.0), spec.q_lora_rank, spec.num_heads * spec.head_dim
    blocks = [("", spec.head_dim, "entry")] if shape.every else []
    blocks += [("indexer.", shape.index_width, "index")] if shape.index_heads else []
    into = [Part(theirs + "wq_a.weight", (rank, hidden)), Part(theirs + "wkv.weight", (spec.head_dim, hidden))]
    for block, width, _ in blocks:
        size = shape.parts * width, hidden
        into += [Part(f"{theirs}{block}compressor.{name}.weight", size) for name in ("wkv", "wgate")]
    if shape.index_heads:
        into.append(Part(theirs + "indexer.weights_proj.weight", (shape.index_heads, hidden)))
    yield DenseTensor(ours + "attend_in", tuple(into))
    yield _norm(ours + "q_a_norm", theirs + "q_norm.weight", rank)
    yield DenseTensor(ours + "q_b", (Part(theirs + "wq_b.weight", (heads, rank)),))
    # As transformers names it, and as its authors do.
    kv_norm = Part(theirs + "norm.weight", (spec.head_dim,), (theirs + "kv_norm.weight",))
    yield DenseTensor(ours + "kv_norm", (kv_norm,), "norm")
    yield DenseTensor(ours + "sinks", (Part(theirs + "attn_sink", (spec.num_heads,)),), "bias32")
    for block, width, name in blocks:
        source = f"{theirs}{block}compressor."
        yield _norm(f"{ours}{name}_norm", source + "norm.weight", width)
        yield DenseTensor(f"{ours}{name}_bias", (Part(source + "ape", (shape.every, shape.parts * width)),), "bias32")
    if shape.index_heads:
        index_q = Part(theirs + "indexer.wq_b.weight", (shape.index_heads * shape.index_width, rank))
        yield DenseTensor(ours + "index_q_b", (index_q,))
    ranks = spec.num_groups * spec.group_rank
    yield DenseTensor(ours + "o_groups", (Part(theirs + "wo_a.weight", (ranks, heads // spec.num_groups)),))
    yield DenseTensor(ours + "o", (Part(theirs + "wo_b.weight", (hidden, ranks)),))


def _streams(spec: ModelSpec, ours: str, theirs: str, mixes: bool) -> Iterator[DenseTensor]:
    """Yields what joins a sublayer to the streams of the residual."""
    shape = spec.stream_shape(mixes)
    # transformers writes a block's name in front of those of its last weights, which the authors do not.
    published, size = theirs.replace("hc_head.hc", "hc_head"), shape.num_weights
    shapes = {"fn": (size, shape.streams * shape.width), "base": (size,), "scale": (3 if mixes else 1,)}
    parts = [Part(f"{theirs}_{name}", numbers, (f"{published}_{name}",)) for name, numbers in shapes.items()]
    yield DenseTensor(ours, (parts[0],))
    yield DenseTensor(ours + "_base", (parts[1],), "bias32")
    yield DenseTensor(ours + "_scale", (parts[2],), "bias32")
