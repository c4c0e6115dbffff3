"""Qwen3-MoE: GQA with a norm over each query and key head; softmax over all experts."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import gqa, model_of, sparse_layers, windowed
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = replace(gqa(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    if config.flag("use_sliding_window"):  # null is no window
        attention = windowed(attention, config)
    router = RouterSpec(
        num_logical=config.size("num_experts", "num_local_experts"),
        topk=config.size("num_experts_per_tok"),
        norm_topk=config.flag("norm_topk_prob"),
    )
    return model_of(config, attention, router, config.size("moe_intermediate_size"), sparse_layers(config))


DEFAULTS = {"qwen3_moe": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 4096}}
READERS = {"qwen3_moe": read}
