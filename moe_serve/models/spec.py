"""What a model is: a Hugging Face `config.json` read into one frozen value. Torch-free; the front end reads it too.

One decoder serves all families and takes its form from here: a new family is a reader below and an entry in FAMILIES.
A feature that would change the numbers and is not implemented is refused by name, never ignored.

Shape words: H = hidden, E = num_logical, I = moe_intermediate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.ep.routing import RouterSpec
from moe_serve.errors import ModelError
from moe_serve.models.hf_config import LARGEST_SIZE, LONGEST_CONTEXT, MOST_LAYERS, HfConfig, check_total, eos_token_ids
from moe_serve.models.model_files import read_json, shown
from moe_serve.models.rope_spec import RopeSpec, read_rope


@dataclass(frozen=True)
class GqaSpec:
    """Grouped-query attention: query head h reads key/value head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool  # RMS norm over each query and key head, before the rotation
    bias: bool  # on the q, k, v and output projections

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)


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

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class ExpertNames:
    """The names of a family's MoE block and of an expert's three matrices in its checkpoint."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


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
    tie_embeddings: bool
    attention: GqaSpec | MlaSpec
    rope: RopeSpec
    moe_layer_ids: tuple[int, ...]  # ascending; the other layers are dense
    router: RouterSpec
    moe_intermediate: int
    shared_intermediate: int  # width of the shared experts together; 0 = none
    dense_intermediate: int  # of the layers outside moe_layer_ids
    expert_names: ExpertNames = ExpertNames()
    checkpoint_dtype: str | None = None  # as in config.json; None: not given
    fp8_block: int | None = None  # edge of the square scale blocks of an FP8 checkpoint

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
        return 3 * self.hidden * self.moe_intermediate

    @property
    def dense_parameters(self) -> int:
        """Parameters that every rank holds: all but the routed experts."""
        hidden, attention = self.hidden, self.attention
        if isinstance(attention, GqaSpec):
            q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
            per_layer = hidden * (2 * q + 2 * kv) + (2 * attention.head_dim if attention.qk_norm else 0)
            per_layer += (q + 2 * kv + hidden) if attention.bias else 0
        else:
            q, rank = attention.num_heads * attention.query_dim, attention.q_lora_rank
            first = q if rank is None else rank
            per_layer = hidden * (first + attention.latent_dim) + (0 if rank is None else rank * (q + 1))
            per_layer += attention.kv_lora_rank * (1 + attention.num_heads * (attention.nope_dim + attention.value_dim))
            per_layer += attention.num_heads * attention.value_dim * hidden
            if attention.bias:
                per_layer += (0 if rank is None else rank) + attention.latent_dim + hidden
        moe = self.num_logical * hidden + 3 * hidden * self.shared_intermediate
        moe += self.num_logical if self.router.has_bias else 0
        dense = 3 * hidden * self.dense_intermediate
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        num_moe = self.num_moe_layers
        return (
            embeddings + hidden + self.num_layers * (per_layer + 2 * hidden)
            + num_moe * moe + (self.num_layers - num_moe) * dense
        )  # fmt: skip


def read_spec(folder: str | Path) -> ModelSpec:
    """Returns the spec of the model in a Hugging Face folder.

    Raises ModelError when config.json cannot be read, when the architecture is not one of FAMILIES, or when the
    configuration asks for a feature that is not implemented; each message names it.
    """
    path = Path(folder) / "config.json"
    values = read_json(path, "give a Hugging Face model folder, with config.json and *.safetensors")
    config = HfConfig(values, str(path))
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        raise ModelError(
            f"{path}: model_type {shown(values.get('model_type'))} (architectures "
            f"{shown(values.get('architectures'))}) is not "
            f"supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    generation = path.with_name("generation_config.json")
    extra = read_json(generation, "correct or remove it") if generation.exists() else {}
    spec = family(config, eos_token_ids(config, HfConfig(extra, str(generation))))
    parameters = spec.dense_parameters + spec.num_moe_layers * spec.num_logical * spec.expert_parameters
    check_total(str(path), spec.num_layers, spec.num_logical, parameters)
    return spec


def _common(config: HfConfig, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Returns the fields that all families share, and refuses what none of them supports."""
    if config.get("hidden_act", "silu") != "silu":
        raise config.refuse(f"hidden_act {shown(config.get('hidden_act'))}")
    return {
        "model_type": config.get("model_type"),
        "vocab_size": config.size("vocab_size"),
        "hidden": config.size("hidden_size"),
        "num_layers": config.size("num_hidden_layers", largest=MOST_LAYERS),
        "max_position": config.size("max_position_embeddings", largest=LONGEST_CONTEXT),
        "norm_eps": config.positive("rms_norm_eps", 1e-6),
        "eos_token_ids": eos_token_ids,
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "checkpoint_dtype": config.text("dtype", "torch_dtype"),
        "fp8_block": _fp8_block(config),
    }


def _fp8_block(config: HfConfig) -> int | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise config.refuse(f"quantization_config {shown(quantization)}")
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size", [128, 128])
    is_square = isinstance(block, list) and len(block) == 2 and block[0] == block[1]
    if method != "fp8" or not is_square or type(block[0]) is not int or not 1 <= block[0] <= LARGEST_SIZE:
        raise config.refuse(f"quantization {shown(method)} with blocks {shown(block)} (only fp8 with square blocks is)")
    return int(block[0])


def _gqa(config: HfConfig, qk_norm: bool, bias: bool) -> GqaSpec:
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{config.where}: {num_heads} attention heads do not divide over {num_kv_heads} key/value heads; "
            "correct num_key_value_heads"
        )
    head_dim = config.size("head_dim", default=config.size("hidden_size") // num_heads)
    return GqaSpec(num_heads, num_kv_heads, head_dim, qk_norm, bias)


def _refuse_sliding_window(config: HfConfig, used: bool) -> None:
    longest = config.size("max_position_embeddings")
    # A window as long as the longest sequence masks nothing.
    if used and config.size("sliding_window", default=longest) < longest:
        raise config.refuse(f"sliding-window attention (sliding_window {config.get('sliding_window')})")


def _read_qwen3_moe(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    _refuse_sliding_window(config, config.flag("use_sliding_window"))
    attention = _gqa(config, qk_norm=True, bias=config.flag("attention_bias"))
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    step = config.size("decoder_sparse_step", default=1)
    dense_only = config.sizes("mlp_only_layers", below=num_layers)
    return ModelSpec(
        **_common(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=tuple(i for i in range(num_layers) if i not in dense_only and (i + 1) % step == 0),
        router=RouterSpec(
            num_logical=config.size("num_experts", "num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="softmax",
            norm_topk=config.flag("norm_topk_prob"),
        ),
        moe_intermediate=config.size("moe_intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=config.size("intermediate_size", default=0, minimum=0),
    )


def _read_mixtral(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    _refuse_sliding_window(config, used=True)
    attention = _gqa(config, qk_norm=False, bias=False)
    return ModelSpec(
        **{**_common(config, eos_token_ids), "norm_eps": config.positive("rms_norm_eps", 1e-5)},
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=tuple(range(config.size("num_hidden_layers", largest=MOST_LAYERS))),
        router=RouterSpec(
            num_logical=config.size("num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="softmax",
            norm_topk=True,
        ),
        moe_intermediate=config.size("intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=0,
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )


def _read_deepseek_v3(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    for key, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, wanted) != wanted:
            raise config.refuse(f"{key} {shown(config.get(key))} (only {wanted!r} is)")
    rope_dim = config.size("qk_rope_head_dim")
    rope = read_rope(config.values, rope_dim, config.flag("rope_interleave", default=True), config.where)
    nope_dim = config.size("qk_nope_head_dim")
    q_lora_rank = config.get("q_lora_rank")
    moe_intermediate = config.size("moe_intermediate_size")
    num_shared = config.size("n_shared_experts", default=0, minimum=0)
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    first_moe = min(config.size("first_k_dense_replace", default=0, minimum=0), num_layers)
    return ModelSpec(
        **_common(config, eos_token_ids),
        attention=MlaSpec(
            num_heads=config.size("num_attention_heads"),
            q_lora_rank=None if q_lora_rank is None else config.size("q_lora_rank"),
            kv_lora_rank=config.size("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=config.size("v_head_dim"),
            bias=config.flag("attention_bias"),
            softmax_scale=(nope_dim + rope_dim) ** -0.5 * rope.softmax_factor,
        ),
        rope=rope,
        moe_layer_ids=tuple(range(first_moe, num_layers)),
        router=RouterSpec(
            num_logical=config.size("n_routed_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="sigmoid",
            norm_topk=config.flag("norm_topk_prob", default=True),
            scaling=config.positive("routed_scaling_factor", 1.0),
            num_groups=config.size("n_group", default=1),
            topk_groups=config.size("topk_group", default=1),
            has_bias=True,
            norm_eps=1e-20,
        ),
        moe_intermediate=moe_intermediate,
        shared_intermediate=num_shared * moe_intermediate,
        dense_intermediate=config.size("intermediate_size", default=0, minimum=0),
    )


FAMILIES: Mapping[str, Callable[[HfConfig, tuple[int, ...]], ModelSpec]] = {
    "deepseek_v3": _read_deepseek_v3,
    "mixtral": _read_mixtral,
    "qwen3_moe": _read_qwen3_moe,
}
