"""Mellum-2: Qwen3-MoE with windows in some layers, which rotate by another theta, and a list of dense layers."""

from dataclasses import replace

from moe_serve.models.families.common import (
    gqa,
    model_of,
    moe_layers_of_list,
    ropes_by_kind,
    softmax_router,
    windowed_by_layer,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = windowed_by_layer(gqa(config), config, lambda layer: False)
    attention = replace(attention, qk_norm="head", qkv_bias=bias, out_bias=bias)
    rope, windowed_rope = ropes_by_kind(config, attention, {"full_attention": 5e5, "sliding_attention": 1e4})
    width, moe_layer_ids = config.size("moe_intermediate_size"), moe_layers_of_list(config, 0)
    spec = model_of(config, attention, softmax_router(config), width, moe_layer_ids, rope)
    return replace(spec, windowed_rope=windowed_rope)


DEFAULTS = {
    "mellum": {
        "head_dim": 128,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
    }
}
READERS = {"mellum": read}
