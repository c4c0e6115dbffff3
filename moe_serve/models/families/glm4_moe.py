"""GLM-4.5, 4.6 and Air: GQA that rotates half of a head, the router and the shared experts of DeepSeek-V3."""

from dataclasses import replace

from moe_serve.models.families.common import (
    deepseek_v3_router,
    gqa,
    model_of,
    moe_layers_behind_dense_ones,
    num_predictors,
    read_rope,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    attention = replace(gqa(config), qkv_bias=config.flag("attention_bias"))
    if config.flag("use_qk_norm"):
        attention = replace(attention, qk_norm="head")
    rope = read_rope(config, attention.head_dim, rotated=attention.head_dim // 2)
    width = config.size("moe_intermediate_size")
    spec = model_of(config, attention, deepseek_v3_router(config), width, moe_layers_behind_dense_ones(config), rope)
    shared = width * config.size("n_shared_experts", default=1, minimum=0)
    return replace(spec, shared_intermediate=shared, num_predictors=num_predictors(config))


DEFAULTS = {
    "glm4_moe": {
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
    }
}
READERS = {"glm4_moe": read}
