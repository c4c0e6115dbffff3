"""dots.llm1: GQA with a norm over each query and key head, the router and the shared experts of DeepSeek-V3."""

from dataclasses import replace

from moe_serve.models.families.common import (
    deepseek_v3_router,
    gqa,
    model_of,
    moe_layers_behind_dense_ones,
    windowed_by_layer,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = replace(gqa(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    first_windowed = config.size("max_window_layers", minimum=0)
    has_window = config.get("sliding_window") is not None
    attention = windowed_by_layer(attention, config, lambda layer: has_window and layer >= first_windowed)
    width = config.size("moe_intermediate_size")
    spec = model_of(config, attention, deepseek_v3_router(config), width, moe_layers_behind_dense_ones(config))
    return replace(spec, shared_intermediate=width * config.size("n_shared_experts", default=0, minimum=0))


DEFAULTS = {
    "dots1": {
        "first_k_dense_replace": 0,
        "max_window_layers": 62,
        "norm_topk_prob": False,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
    }
}
READERS = {"dots1": read}
