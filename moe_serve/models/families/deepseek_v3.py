"""DeepSeek-V3, R1 and Kimi-K2: MLA, shared experts, sigmoid scores with a correction bias, groups of experts."""

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.attention_spec import MlaSpec
from moe_serve.models.families.common import (
    common_fields,
    deepseek_v3_router,
    dense_width,
    moe_layers_behind_dense_ones,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    for key, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, wanted) != wanted:
            raise config.refuse(f"{key} {shown(config.get(key))} (only {wanted!r} is)")
    return latent_model(config, eos_token_ids, deepseek_v3_router(config), config.flag("rope_interleave", default=True))


def latent_model(
    config: HfConfig, eos_token_ids: tuple[int, ...], router: RouterSpec, interleaved: bool = True
) -> ModelSpec:
    """Returns a model of DeepSeek's form with this router. interleaved: whether rotated pairs lie side by side"""
    if config.get("moe_layer_freq", 1) != 1:
        raise config.refuse(f"moe_layer_freq {shown(config.get('moe_layer_freq'))} (only 1 is)")
    rope_dim = config.size("qk_rope_head_dim")
    rope = read_rope(config.values, rope_dim, interleaved, config.where)
    nope_dim = config.size("qk_nope_head_dim")
    q_lora_rank = config.get("q_lora_rank")
    moe_intermediate = config.size("moe_intermediate_size")
    moe_layer_ids = moe_layers_behind_dense_ones(config)
    num_shared = config.size("n_shared_experts", default=0, minimum=0)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
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
        moe_layer_ids=moe_layer_ids,
        router=router,
        moe_intermediate=moe_intermediate,
        shared_intermediate=num_shared * moe_intermediate,
        dense_intermediate=dense_width(config, moe_layer_ids),
    )


def read_kimi(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """transformers has no class for it, and that of its authors takes other defaults than the one of DeepSeek-V3."""
    config.require("first_k_dense_replace", "n_group", "n_shared_experts", "norm_topk_prob", "topk_group")
    return read(config, eos_token_ids)


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
DEFAULTS = {"deepseek_v3": V3_DEFAULTS}
READERS = {"deepseek_v3": read, "kimi_k2": read_kimi}
