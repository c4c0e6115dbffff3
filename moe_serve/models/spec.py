"""The description of a model: one frozen value, read from a Hugging Face `config.json` by `families/`.

One decoder serves all families and takes its form from here: a new family is a file in `families/`.

Shape words: H = hidden, E = num_logical, I = moe_intermediate.
"""

from dataclasses import dataclass, replace
from typing import Literal

from moe_serve.kernels.forms import (
    SILU,
    Activation,
    CompressedShape,
    DeltaShape,
    Fp8Block,
    GatedConvShape,
    LightningShape,
    MambaShape,
    RouterSpec,
    SelectiveShape,
    StreamShape,
)

AnyStateful = DeltaShape | GatedConvShape | LightningShape | MambaShape | SelectiveShape


@dataclass(frozen=True)
class QueryTemperature:
    """Queries are multiplied by 1 + scale * ln(1 + floor((position + shift) / floor_scale)).

    Under grouped-query attention only those of layers without rotation, under latent attention all.
    """

    floor_scale: float
    scale: float
    shift: int = 1


@dataclass(frozen=True)
class GqaSpec:
    """Grouped-query attention: query head h reads key/value head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # RMS norm over each query and key head, before the rotation or behind it; over all query heads and over all key
    # heads, before it; or over each head of rotating layers, without weights
    qk_norm: Literal["head", "rotated_head", "projection", "unit"] | None = None
    norm_names: tuple[str, str] = ("q_norm", "k_norm")  # in the checkpoint
    qkv_name: str | None = None  # of the q, k and v projections as one, in the checkpoint; None: they are three
    qkv_bias: bool = False  # on the q, k and v projections
    out_bias: bool = False
    clip: float | None = None  # largest magnitude of queries, keys and values, behind the norm and before the rotation
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    has_sinks: bool = False  # each query head has a learned score that takes its share beside those of the keys
    sinks_name: str = "sinks"  # in the checkpoint
    out_name: str = "o_proj"  # of the projection behind attention, in the checkpoint
    block: str = "self_attn"  # in the checkpoint, below the layer
    value_dim: int | None = None  # of a head's values, which are padded with zeros; None: head_dim
    value_scale: float = 1.0  # on values
    window: int | None = None  # keys that a token sees in windowed layers, its own included
    windowed_layer_ids: tuple[int, ...] = ()
    windowed_heads: tuple[int, int] | None = None  # of queries, and of keys and values, in windowed layers
    sinks_in_windows: bool = False  # no other layers have sinks
    chunk: int | None = None  # in chunked layers a token sees those from the last multiple of it on
    chunked_layer_ids: tuple[int, ...] = ()
    unrotated_layer_ids: tuple[int, ...] = ()
    temperature: QueryTemperature | None = None
    has_gate: bool = False  # what heads attend is multiplied by sigmoid of a gate
    gate_name: str | None = None  # of a projection to gates, in the checkpoint; None: they lie behind each head's query
    head_gate_name: str | None = None  # likewise, to a number of each head; what it attends is times softplus of that

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    @property
    def norm_widths(self) -> tuple[int, int]:
        """Returns how many weights the norms of queries and of keys have."""
        if self.qk_norm in (None, "unit"):
            return 0, 0
        heads = (self.num_heads, self.num_kv_heads) if self.qk_norm == "projection" else (1, 1)
        return heads[0] * self.head_dim, heads[1] * self.head_dim

    def in_layer(self, layer_id: int) -> "GqaSpec":
        """Returns the attention with the heads and the sinks of a layer."""
        is_windowed, heads = layer_id in self.windowed_layer_ids, (self.num_heads, self.num_kv_heads)
        if is_windowed and self.windowed_heads is not None:
            heads = self.windowed_heads
        has_sinks = self.has_sinks and (is_windowed or not self.sinks_in_windows)
        return replace(self, num_heads=heads[0], num_kv_heads=heads[1], has_sinks=has_sinks)

    def window_of(self, layer_id: int) -> int | None:
        """Returns how many keys a token sees in a layer, its own included; None: all up to its own."""
        return self.window if layer_id in self.windowed_layer_ids else None

    def chunk_of(self, layer_id: int) -> int | None:
        """Returns the chunk size of a layer whose tokens see their own chunk only; None: they see all keys."""
        return self.chunk if layer_id in self.chunked_layer_ids else None


@dataclass(frozen=True)
class IndexerSpec:
    """Chooses the `topk` tokens that each token attends (DeepSeek-V3.2).

    num_heads, width: of its queries
    interleaved: whether the two of a rotated pair lie side by side (GLM-5); else half of the rotated width apart
    """

    num_heads: int
    width: int
    topk: int
    interleaved: bool = False


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): per token, one latent and one key."""

    num_heads: int
    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    nope_dim: int  # query/key width without rotation, per head
    rope_dim: int  # rotated width, shared by all key heads
    value_dim: int
    bias: bool  # on the two down projections and the output projection
    softmax_scale: float  # (nope_dim + rope_dim)^-0.5, times YaRN's mscale^2
    indexer: IndexerSpec | None = None
    temperature: QueryTemperature | None = None
    splits_heads: bool = False  # the projection from latents is stored in two, of keys and of values, as in GGUF files
    block: str = "self_attn"  # in the checkpoint, below the layer
    out_name: str = "o_proj"  # likewise, below the block
    gate_name: str | None = None  # of a projection to a gate of each head, whose values are times its sigmoid
    latent_factor: float = 1.0  # on normed latents
    # Queries are projected from their latent as it was normed and as it was, and so is a gate of each value (A.X-K2).
    gates_values: bool = False

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class CompressedSpec:
    """Attention of DeepSeek-V4: to a window of tokens, and to entries of groups of tokens, which an indexer may choose.

    head_dim:  of a query, and of the one key of a token, which is its value, too
    rope_dim:  elements at the end of a head, and of the indexer's heads, that are rotated
    every:     tokens of a group, by layer; 0: the layer has the window alone
    indexed_layer_ids: layers whose groups overlap, and whose entries `indexer` chooses
    num_groups, group_rank: of heads, each projected to so many columns before the output projection
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    window: int
    every: tuple[int, ...]
    indexed_layer_ids: tuple[int, ...]
    indexer: IndexerSpec
    num_groups: int
    group_rank: int
    temperature: None = None  # queries have none

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def in_layer(self, layer_id: int, eps: float) -> CompressedShape:
        """Returns the shape of a layer. eps: of its norms"""
        is_indexed, index = layer_id in self.indexed_layer_ids, self.indexer
        chosen_by = (index.num_heads, index.width, index.topk) if is_indexed else (0, 0, 0)
        sizes = self.num_heads, self.head_dim, self.rope_dim, self.window, self.every[layer_id], is_indexed
        return CompressedShape(*sizes, *chosen_by, scale=self.softmax_scale, eps=eps)


@dataclass(frozen=True)
class StreamsSpec:
    """A residual of several streams (kernels/streams.py). rounds, eps: as in StreamShape"""

    count: int
    rounds: int
    eps: float


@dataclass(frozen=True)
class YarnSpec:
    """YaRN: low frequencies are divided by `factor`, high ones kept, with a ramp between two borders."""

    factor: float
    original_max_position: int
    beta_fast: float  # rotations over the original length above which a frequency is kept
    beta_slow: float  # and below which it is divided
    truncate: bool  # round the ramp's borders to whole dimensions


@dataclass(frozen=True)
class LongRopeSpec:
    """LongRoPE: each pair's frequency has a divisor, and cos and sin a factor, of their own for long contexts.

    Its authors choose by the length of each sequence, and compute a cache anew where it outgrows the original length.
    Here a server's longest context chooses, once for all its requests, so that requests share what is cached.
    """

    original_max_position: int
    short_divisors: tuple[float, ...]
    long_divisors: tuple[float, ...]
    short_factor: float
    long_factor: float


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding of a model.

    dim: rotated width of a head
    interleaved: pairs are (0,1), (2,3), ..; else (0, dim/2), (1, dim/2 + 1), ..
    rotates: whether any pair turns at any position
    """

    dim: int
    theta: float
    interleaved: bool
    linear_factor: float = 1.0  # positions are divided by it
    yarn: YarnSpec | None = None
    table_factor: float = 1.0  # on cos and sin
    softmax_factor: float = 1.0  # on the softmax scale of MLA
    long: LongRopeSpec | None = None
    divisors: tuple[float, ...] = ()  # of each pair's frequency; empty: none
    rotates: bool = True

    def in_context(self, max_model_len: int) -> "RopeSpec":
        """Returns the rotations for requests of up to max_model_len tokens."""
        if self.long is None:
            return self
        is_long = max_model_len > self.long.original_max_position
        divisors = self.long.long_divisors if is_long else self.long.short_divisors
        return replace(
            self, divisors=divisors, table_factor=self.long.long_factor if is_long else self.long.short_factor
        )


@dataclass(frozen=True)
class ExpertNames:
    """The names of a family's MoE block, its router and an expert's three matrices in its checkpoint.

    In models of paired layers "{half}" in these and other names below a layer is the number of a layer in its pair.

    block:  below the layer;  router: below the block;  shared: the shared experts, below the layer
    linears: of gate and up together, and of down, where a shared expert stores them so (Granite)
    mlp:     gate, up and down of MLPs and shared experts, where they are called otherwise than those of experts
    fused:   of the two tensors below the block that hold those of all experts, [E, n, k]; None: experts are stored
             apart, or under transformers' own names
    form:    "apart": a tensor of each expert and matrix; else each tensor holds all experts, [E, k, n] with gate before
             up ("transposed", Llama-4), or with both in every other column ("interleaved", gpt-oss); or three hold
             them one below the other, [E * I, H], down transposed ("flat", DBRX, where names are below the block)
    """

    block: str = "mlp"
    dense: str = "mlp"  # the MLP of layers without experts
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    form: Literal["apart", "transposed", "interleaved", "flat"] = "apart"
    router_bias: str = "gate.e_score_correction_bias"  # below the block, or below:
    bias_block: str | None = None
    router_bias_is_row: bool = False  # stored as [1, E]
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"  # below the layer
    linears: tuple[str, str] | None = None
    mlp: tuple[str, str, str] | None = None
    fused: tuple[str, str] | None = None


@dataclass(frozen=True)
class NormNames:
    """The names of the norms of whole rows in a checkpoint; None: there is none at that place.

    input, post: of a layer, in front of attention and of the MLP or experts
    behind_attention, behind_moe, behind_dense: over what these add to the residual, a shared expert included
    last: behind all layers, below the model
    With gates a row y goes on as y * sigmoid(B silu(A y)), where A has gate_rank rows.
    """

    input: str | None = "input_layernorm"
    behind_attention: str | None = None
    post: str | None = "post_attention_layernorm"
    behind_moe: str | None = None
    behind_dense: str | None = None
    last: str = "norm"
    gate_rank: int | None = None  # of the gates of the norms in front of attention and of experts; None: there are none


@dataclass(frozen=True)
class NormedResidual:
    """The residual of a model that goes on with what a norm gives, not with what goes in (MiniMax-01).

    Each pair has the factors on that, and on what a sublayer adds: attention, a layer with a state, MLP or experts.
    """

    attention: tuple[float, float]
    stateful: tuple[float, float]
    fed: tuple[float, float]


@dataclass(frozen=True)
class IntegerCoding:
    """How matrices are packed as whole numbers (models/packed_integers.py).

    group:       neighbours in a row that share a scale; None: all of them
    symmetric:   the zero is in the middle of the codes where the checkpoint stores none
    act_order:   columns of a group are scattered
    zero_offset: what stored zeros lack (GPTQ)
    """

    method: Literal["gptq", "awq", "compressed"]
    bits: Literal[4, 8]
    group: int | None
    symmetric: bool = False
    act_order: bool = False
    zero_offset: int = 0

    def __str__(self) -> str:
        return f"{self.bits} bits, {'a scale per row' if self.group is None else f'groups of {self.group}'}"


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only MoE model. Sizes in elements; nothing here depends on ranks, dtype or device."""

    model_type: str
    vocab_size: int
    hidden: int
    num_layers: int
    max_position: int  # tokens, prompt + output
    norm_eps: float
    tie_embeddings: bool  # the projection to logits is the embedding
    attention: GqaSpec | MlaSpec | CompressedSpec
    rope: RopeSpec
    moe_layer_ids: tuple[int, ...]  # ascending; the other layers are dense
    router: RouterSpec
    moe_intermediate: int
    dense_intermediate: int  # of the layers outside moe_layer_ids
    shared_intermediate: int = 0  # width of the shared experts together; 0 = none
    latent: int | None = None  # width of the rows that routed experts take and give; None: hidden
    has_shared_gate: bool = False  # the shared expert's rows are multiplied by sigmoid(x W), one number each
    embedding_factor: float = 1.0  # on embeddings
    residual_factor: float = 1.0  # on what a sublayer adds to the residual
    normed_residual: NormedResidual | None = None
    logits_factor: float = 1.0  # on the rows that are projected to logits
    eos_token_ids: tuple[int, ...] = ()
    expert_names: ExpertNames = ExpertNames()
    norm_names: NormNames = NormNames()
    expert_bias: bool = False  # on gate, up and down of the routed experts
    activation: Activation = SILU  # of experts, shared ones too, and of MLPs
    checkpoint_dtype: str | None = None  # as in config.json; None: not given
    fp8_block: Fp8Block | None = None  # what shares a scale in an FP8 checkpoint
    integers: IntegerCoding | None = None  # of matrices that are packed in the checkpoint
    experts_in_mxfp4: bool = False  # the matrices of experts are stored so (kernels/quantised.py)
    norm: Literal["rms", "layer", "layer_bias"] = "rms"  # of whole rows; layer norms take the mean out
    is_parallel: bool = False  # MLP or experts read the rows that attention reads, and both are added to the residual
    moe_factor: float = 1.0  # on what experts and a shared one give together
    tensor_prefix: str = ""  # in front of the checkpoint's names
    body_prefix: str = "model."  # then, of all but the projection to logits
    other_models: tuple[str, ...] = ()  # beginnings of names of those for images and sound, which are not read
    head_bias: bool = False  # on the projection to logits
    num_predictors: int = 0  # layers for multi-token prediction that its checkpoint may have behind the last layer
    predictor_id: int | None = None  # the last of num_layers is such a layer; None: all are layers of the model
    stateful: AnyStateful | None = None  # of the layers that keep a state of each request
    stateful_layer_ids: tuple[int, ...] = ()  # ascending; the others attend over the KV cache
    stateful_block: str = ""  # in the checkpoint, below the layer
    unattended_layer_ids: tuple[int, ...] = ()  # those that are experts or an MLP alone
    unfed_layer_ids: tuple[int, ...] = ()  # those that have neither
    streams: StreamsSpec | None = None  # of the residual, under a CompressedSpec; None: it is one
    choosing_layer_ids: tuple[int, ...] = ()  # MoE layers in which a token's id chooses its experts
    embedding_name: str = "embed_tokens"  # in the checkpoint
    head_name: str = "lm_head"  # likewise, of the projection to logits
    layers_name: str = "layers"  # likewise
    windowed_rope: RopeSpec | None = None  # of windowed layers, where they do not share `rope`
    norms_from_zero: bool = False  # norms of rows and of query and key heads multiply by 1 + weight
    may_lack_router_bias: bool = False  # checkpoints may leave it out: it is 0 in all layers then
    # Two layers are one of the checkpoint. The first has an MLP beside its experts, whose rows are added behind the MLP
    # of the second (LongCat-Flash, arXiv:2509.01322, section 2.2).
    is_paired: bool = False

    @property
    def default_context(self) -> int:
        """Returns how many tokens a request may have where the configuration does not say."""
        long = self.rope.long
        return self.max_position if long is None else min(long.original_max_position, self.max_position)

    def in_context(self, max_model_len: int) -> "ModelSpec":
        """Returns the spec for requests of up to max_model_len tokens, on which LongRoPE's rotations depend."""
        return replace(self, rope=self.rope.in_context(max_model_len), max_position=max_model_len)

    def with_predictor(self) -> "ModelSpec":
        """Returns the spec with the first layer for multi-token prediction as one more MoE layer, which guesses tokens.

        It joins the last hidden state of a token with the embedding of the next one, and its rows are projected to
        logits of the one behind (DeepSeek-V3, arXiv:2412.19437, section 2.2).
        """
        assert self.num_predictors > 0, "the model has no layer that predicts"
        layer = self.num_layers
        moe_layer_ids = (*self.moe_layer_ids, layer)
        return replace(self, num_layers=layer + 1, moe_layer_ids=moe_layer_ids, predictor_id=layer)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Returns the rotations of the model, those of windowed layers last where they have their own."""
        return (self.rope,) if self.windowed_rope is None else (self.rope, self.windowed_rope)

    @property
    def attention_layer_ids(self) -> tuple[int, ...]:
        """Returns the layers that attend over the KV cache."""
        others = (*self.stateful_layer_ids, *self.unattended_layer_ids)
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    def stream_shape(self, mixes: bool) -> StreamShape:
        """Returns the shape of the residual's streams. mixes: as in StreamShape"""
        assert self.streams is not None, "the residual is one stream"
        streams = self.streams
        return StreamShape(streams.count, self.hidden, streams.rounds, streams.eps, self.norm_eps, mixes)

    @property
    def num_logical(self) -> int:
        return self.router.num_logical

    @property
    def topk(self) -> int:
        return self.router.topk

    @property
    def expert_hidden(self) -> int:
        """Returns the width of the rows that go to routed experts and come back."""
        return self.hidden if self.latent is None else self.latent

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layer_ids)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        stacks, hidden = self.activation.stacks, self.expert_hidden
        bias = stacks * self.moe_intermediate + hidden if self.expert_bias else 0
        return (stacks + 1) * hidden * self.moe_intermediate + bias
