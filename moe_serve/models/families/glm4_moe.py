"""GLM-4.5, 4.6 and Air: GQA that rotates half of a head, the router and the shared experts of DeepSeek-V3."""

from dataclasses import replace

from moe_serve.models.families.common import (
    common_fields,
    deepseek_v3_router,
    dense_width,
    gqa,
    moe_layers_behind_dense_ones,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    attention = replace(
        gqa(config),
        qk_norm="head" if config.flag("use_qk_norm") else None,
        qkv_bias=config.flag("attention_bias"),
    )
    moe_layer_ids = moe_layers_behind_dense_ones(config)
    width = config.size("moe_intermediate_size")
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where, partial_default=0.5),
        moe_layer_ids=moe_layer_ids,
        router=deepseek_v3_router(config),
        moe_intermediate=width,
        shared_intermediate=config.size("n_shared_experts", default=1, minimum=0) * width,
        dense_intermediate=dense_width(config, moe_layer_ids),
    )


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
