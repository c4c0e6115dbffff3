"""What a model is: a Hugging Face `config.json` read into one frozen value. Torch-free; the front end reads it too.

One decoder serves all families and takes its form from here: a new family is a reader below and an entry in FAMILIES.
A feature that would change the numbers and is not implemented is refused by name, never ignored.

Shape words: H = hidden, E = num_logical, I = moe_intermediate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_serve.ep.routing import RouterSpec
from moe_serve.errors import ModelError
from moe_serve.kernels.activation import SILU, Activation
from moe_serve.models.attention_spec import GqaSpec, MlaSpec
from moe_serve.models.hf_config import LARGEST_SIZE, LONGEST_CONTEXT, MOST_LAYERS, HfConfig, check_total, eos_token_ids
from moe_serve.models.model_files import read_json, shown
from moe_serve.models.rope_spec import RopeSpec, read_rope

MXFP4_BLOCK = 32  # values that share a scale


@dataclass(frozen=True)
class ExpertNames:
    """The names of a family's MoE block, its router and an expert's three matrices in its checkpoint.

    interleaved: each tensor holds all experts, matrices as [E, k, n], gate and up in every other column (gpt-oss)
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False


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
    expert_bias: bool = False  # on gate, up and down of the routed experts
    activation: Activation = SILU  # of the routed experts
    checkpoint_dtype: str | None = None  # as in config.json; None: not given
    fp8_block: int | None = None  # edge of the square scale blocks of an FP8 checkpoint
    experts_in_mxfp4: bool = False  # the matrices of experts are stored so (mxfp4.py)

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
        moe += self.num_logical * (int(router.has_bias) + int(router.has_logit_bias))
        dense = 3 * hidden * self.dense_intermediate
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
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
    quantization = _quantization(config)
    if not quantization or _is_mxfp4(config):
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size", [128, 128])
    is_square = isinstance(block, list) and len(block) == 2 and block[0] == block[1]
    if method != "fp8" or not is_square or type(block[0]) is not int or not 1 <= block[0] <= LARGEST_SIZE:
        raise config.refuse(f"quantization {shown(method)} with blocks {shown(block)} (only fp8 with square blocks is)")
    return int(block[0])


def _quantization(config: HfConfig) -> Mapping[str, Any]:
    quantization = config.get("quantization_config", {})
    if not isinstance(quantization, Mapping):
        raise config.refuse(f"quantization_config {shown(quantization)}")
    return quantization


def _is_mxfp4(config: HfConfig) -> bool:
    """Returns whether experts are stored in MXFP4, which gpt-oss alone is."""
    return config.get("model_type") == "gpt_oss" and _quantization(config).get("quant_method") == "mxfp4"


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


def _windowed(attention: GqaSpec, config: HfConfig) -> GqaSpec:
    """Returns the attention with the sliding window of config.json in every layer."""
    longest = config.size("max_position_embeddings")
    window = config.size("sliding_window", default=longest)
    if window >= longest:  # masks nothing
        return attention
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    return replace(attention, window=window, windowed_layer_ids=tuple(range(num_layers)))


def _read_qwen3_moe(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    attention = _gqa(config, qk_norm=True, bias=config.flag("attention_bias"))
    if config.flag("use_sliding_window"):  # null is no window; no such key is the window of transformers
        attention = _windowed(attention, HfConfig({"sliding_window": 4096, **config.values}, config.where))
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
    attention = _windowed(_gqa(config, qk_norm=False, bias=False), config)
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


def _read_gpt_oss(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    attention = _gqa(config, qk_norm=False, bias=config.flag("attention_bias", default=True))
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    kinds = config.get("layer_types", [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)])
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.wrong("layer_types", kinds, f"a list of {num_layers} kinds of attention")
    if unknown := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
        raise config.refuse(f"attention {shown(unknown[0])} (sliding_attention and full_attention are)")
    windowed = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    window = config.size("sliding_window") if windowed else None
    if config.get("rope_parameters", config.get("rope_scaling")) is None:
        raise ModelError(f"{config.where}: rope_parameters is missing; is this the folder of a gpt_oss model?")
    width = config.size("intermediate_size")
    in_mxfp4 = _is_mxfp4(config)
    for key in ("hidden_size", "intermediate_size"):
        if in_mxfp4 and config.size(key) % MXFP4_BLOCK:
            raise config.wrong(key, config.get(key), f"a multiple of {MXFP4_BLOCK}, the block of MXFP4")
    return ModelSpec(
        **{**_common(config, eos_token_ids), "norm_eps": config.positive("rms_norm_eps", 1e-5)},
        attention=replace(attention, has_sinks=True, window=window, windowed_layer_ids=windowed),
        rope=read_rope({"rope_theta": 150000.0, **config.values}, attention.head_dim, False, config.where),
        moe_layer_ids=tuple(range(num_layers)),
        router=RouterSpec(
            num_logical=config.size("num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="softmax",
            norm_topk=True,  # softmax over the chosen logits is softmax over all, divided by the chosen ones' sum
            has_logit_bias=True,
        ),
        moe_intermediate=width,
        shared_intermediate=0,
        dense_intermediate=0,
        expert_names=ExpertNames(router="router", interleaved=True),
        expert_bias=True,
        activation=Activation(
            "clamped_swiglu", config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)
        ),
        experts_in_mxfp4=in_mxfp4,
    )


FAMILIES: Mapping[str, Callable[[HfConfig, tuple[int, ...]], ModelSpec]] = {
    "deepseek_v3": _read_deepseek_v3,
    "gpt_oss": _read_gpt_oss,
    "mixtral": _read_mixtral,
    "qwen3_moe": _read_qwen3_moe,
}
