"""DeepSeek-V2, V3, R1, V3.2 and Kimi-K2: MLA, shared experts, groups of experts.

V2 scores by softmax, and a group by its best expert; V3 by sigmoid, with a correction bias. In V3.2 an indexer chooses
the tokens that each one attends (sparse attention).
"""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import (
    deepseek_v3_router,
    model_of,
    moe_layers_behind_dense_ones,
    num_predictors,
    read_rope,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.spec import IndexerSpec, MlaSpec, ModelSpec


def read_v2(config: HfConfig) -> ModelSpec:
    config.only("scoring_func", "softmax")
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse(f"topk_method {shown(method)} (greedy and group_limited_greedy are)")
    if config.flag("norm_topk_prob"):  # transformers takes no notice of it; DeepSeek's own code leaves out the scaling
        raise config.refuse("norm_topk_prob true (no published model has it)")
    in_groups = method == "group_limited_greedy"
    router = RouterSpec(
        num_logical=config.size("n_routed_experts"),
        topk=config.size("num_experts_per_tok"),
        norm_topk=False,
        scaling=config.positive("routed_scaling_factor"),
        num_groups=config.size("n_group") if in_groups else 1,
        topk_groups=config.size("topk_group") if in_groups else 1,
        group_score="best",
    )
    return latent_model(config, router)


def read_v3(config: HfConfig) -> ModelSpec:
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    spec = latent_model(config, deepseek_v3_router(config), config.flag("rope_interleave", default=True))
    return replace(spec, num_predictors=num_predictors(config))


def read_v32(config: HfConfig) -> ModelSpec:
    return with_indexer(read_v3(config), config)


def with_indexer(spec: ModelSpec, config: HfConfig, interleaved: bool = False) -> ModelSpec:
    """Returns a model whose layers attend the tokens that an indexer chooses. interleaved: as in IndexerSpec"""
    attention = spec.attention
    assert isinstance(attention, MlaSpec)
    if attention.q_lora_rank is None:
        raise config.refuse("q_lora_rank null (the indexer reads the compressed queries)")
    if not spec.rope.interleaved:
        raise config.refuse("rope_interleave false")
    sizes = config.size("index_n_heads"), config.size("index_head_dim"), config.size("index_topk")
    indexer = IndexerSpec(*sizes, interleaved)
    if indexer.width < spec.rope.dim:
        raise config.wrong("index_head_dim", indexer.width, f"at least qk_rope_head_dim, {spec.rope.dim}")
    return replace(spec, attention=replace(attention, indexer=indexer))


def read_kimi(config: HfConfig) -> ModelSpec:
    """transformers has no class for it, and that of its authors takes other defaults than the one of DeepSeek-V3."""
    config.require("first_k_dense_replace", "n_group", "n_shared_experts", "norm_topk_prob", "topk_group")
    return read_v3(config)


def latent_model(config: HfConfig, router: RouterSpec, interleaved: bool = True) -> ModelSpec:
    """Returns a model with MLA and this router. interleaved: whether rotated pairs lie side by side"""
    config.only("moe_layer_freq", 1)
    nope_dim, rope_dim = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    rope = read_rope(config, rope_dim, interleaved)
    attention = MlaSpec(
        num_heads=config.size("num_attention_heads"),
        q_lora_rank=None if config.get("q_lora_rank") is None else config.size("q_lora_rank"),
        kv_lora_rank=config.size("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.size("v_head_dim"),
        bias=config.flag("attention_bias"),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * rope.softmax_factor,
    )
    width = config.size("moe_intermediate_size")
    spec = model_of(config, attention, router, width, moe_layers_behind_dense_ones(config), rope)
    return replace(spec, shared_intermediate=width * config.size("n_shared_experts", default=0, minimum=0))


V3_DEFAULTS = {
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
_V2 = {
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.0,
}
DEFAULTS = {"deepseek_v2": _V2, "deepseek_v3": V3_DEFAULTS, "deepseek_v32": V3_DEFAULTS}
READERS = {"deepseek_v2": read_v2, "deepseek_v3": read_v3, "deepseek_v32": read_v32, "kimi_k2": read_kimi}
