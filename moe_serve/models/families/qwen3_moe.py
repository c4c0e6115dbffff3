"""Qwen3-MoE: GQA with a norm over each query and key head; softmax over all experts."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import common_fields, dense_width, gqa, sparse_layers, windowed
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = replace(gqa(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    if config.flag("use_sliding_window"):  # null is no window
        attention = windowed(attention, config)
    moe_layer_ids = sparse_layers(config)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=moe_layer_ids,
        router=RouterSpec(
            num_logical=config.size("num_experts", "num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="softmax",
            norm_topk=config.flag("norm_topk_prob"),
        ),
        moe_intermediate=config.size("moe_intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=dense_width(config, moe_layer_ids),
    )


DEFAULTS = {"qwen3_moe": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 4096}}
READERS = {"qwen3_moe": read}
