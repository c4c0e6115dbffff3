"""What a model is: one frozen value, read from a Hugging Face `config.json` by `families/`.

One decoder serves all families and takes its form from here: a new family is a file in `families/`.

Shape words: H = hidden, E = num_logical, I = moe_intermediate.
"""

from dataclasses import dataclass, replace
from typing import Literal

from moe_serve.ep.routing import RouterSpec
from moe_serve.kernels.forms import SILU, Activation, Fp8Block
from moe_serve.models.attention_spec import GqaSpec, MlaSpec
from moe_serve.models.rope_spec import RopeSpec


@dataclass(frozen=True)
class ExpertNames:
    """The names of a family's MoE block, its router and an expert's three matrices in its checkpoint.

    block:  below the layer;  router: below the block;  shared: the shared experts, below the layer
    linears: of gate and up together, and of down, where a shared expert stores them so, and where one tensor below the
             block holds those of all experts, [E, n, k] (Granite)
    form:    "apart": a tensor of each expert and matrix; else each tensor holds all experts, [E, k, n] with gate before
             up ("transposed", Llama-4), or with both in every other column ("interleaved", gpt-oss)
    """

    block: str = "mlp"
    dense: str = "mlp"  # the MLP of layers without experts
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    form: Literal["apart", "transposed", "interleaved"] = "apart"
    router_bias: str = "gate.e_score_correction_bias"  # below the block
    router_bias_is_row: bool = False  # stored as [1, E]
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"  # below the layer
    linears: tuple[str, str] | None = None


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only MoE model. Sizes in elements; nothing here depends on ranks, dtype or device."""

    model_type: str
    vocab_size: int
    hidden: int
    num_layers: int
    max_position: int  # tokens, prompt + output
    norm_eps: float
    eos_token_ids: tuple[int, ...]
    tie_embeddings: bool  # the projection to logits is the embedding
    attention: GqaSpec | MlaSpec
    rope: RopeSpec
    moe_layer_ids: tuple[int, ...]  # ascending; the other layers are dense
    router: RouterSpec
    moe_intermediate: int
    shared_intermediate: int  # width of the shared experts together; 0 = none
    dense_intermediate: int  # of the layers outside moe_layer_ids
    has_shared_gate: bool = False  # the shared expert's rows are multiplied by sigmoid(x W), one number each
    embedding_factor: float = 1.0  # on embeddings
    residual_factor: float = 1.0  # on what a sublayer adds to the residual
    logits_factor: float = 1.0  # on the rows that are projected to logits
    expert_names: ExpertNames = ExpertNames()
    expert_bias: bool = False  # on gate, up and down of the routed experts
    activation: Activation = SILU  # of the routed experts
    checkpoint_dtype: str | None = None  # as in config.json; None: not given
    fp8_block: Fp8Block | None = None  # what shares a scale in an FP8 checkpoint
    experts_in_mxfp4: bool = False  # the matrices of experts are stored so (kernels/mxfp4.py)
    layer_norm: bool = False  # norms of whole rows take the mean out, and have biases
    tensor_prefix: str = ""  # in front of the checkpoint's names
    head_bias: bool = False  # on the projection to logits

    @property
    def default_context(self) -> int:
        """Returns how many tokens a request may have where the configuration does not say."""
        long = self.rope.long
        return self.max_position if long is None else min(long.original_max_position, self.max_position)

    def in_context(self, max_model_len: int) -> "ModelSpec":
        """Returns the spec for requests of so many tokens, on which LongRoPE's rotations depend. No table is longer."""
        return replace(self, rope=self.rope.in_context(max_model_len), max_position=max_model_len)

    @property
    def num_logical(self) -> int:
        return self.router.num_logical

    @property
    def topk(self) -> int:
        return self.router.topk

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layer_ids)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        bias = 2 * self.moe_intermediate + self.hidden if self.expert_bias else 0
        return 3 * self.hidden * self.moe_intermediate + bias

    @property
    def dense_parameters(self) -> int:
        """Parameters that every rank holds: all but the routed experts."""
        hidden, num_moe, router = self.hidden, self.num_moe_layers, self.router
        per_layer = self.attention.num_parameters(hidden)
        moe = self.num_logical * hidden + 3 * hidden * self.shared_intermediate
        moe += hidden if self.has_shared_gate else 0
        moe += self.num_logical * (int(router.has_bias) + int(router.has_logit_bias))
        dense = 3 * hidden * self.dense_intermediate
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        embeddings += self.vocab_size if self.head_bias else 0
        norm = 2 * hidden if self.layer_norm else hidden
        return (
            embeddings + norm + self.num_layers * (per_layer + 2 * norm)
            + num_moe * moe + (self.num_layers - num_moe) * dense
        )  # fmt: skip
