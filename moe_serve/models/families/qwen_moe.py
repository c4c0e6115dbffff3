"""Qwen2-MoE (Qwen1.5-MoE too) and Qwen3-MoE: GQA, softmax over all experts, dense layers in between.

Qwen2 has biases on q, k and v, and a shared expert whose rows have a weight of their own; Qwen3 has a norm over each
query and key head.
"""

from dataclasses import replace

from moe_serve.models.families.common import (
    gqa,
    model_of,
    softmax_router,
    sparse_layers,
    windowed,
    windowed_by_layer,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, GqaSpec, ModelSpec


def read_qwen2(config: HfConfig) -> ModelSpec:
    attention = replace(gqa(config), qkv_bias=config.flag("qkv_bias", default=True))
    if config.flag("use_sliding_window"):
        first_full = config.size("max_window_layers", minimum=0)
        attention = windowed_by_layer(attention, config, lambda layer: layer % 2 == 0 and layer < first_full)
    return replace(
        _model(config, attention),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        has_shared_gate=True,
        expert_names=ExpertNames(shared="mlp.shared_expert"),
    )


def read_qwen3(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = replace(gqa(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    return _model(config, windowed(attention, config) if config.flag("use_sliding_window") else attention)


def _model(config: HfConfig, attention: GqaSpec) -> ModelSpec:
    width = config.size("moe_intermediate_size")
    return model_of(config, attention, softmax_router(config), width, sparse_layers(config))


DEFAULTS = {
    "qwen2_moe": {"max_window_layers": 28, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    "qwen3_moe": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 4096},
}
READERS = {"qwen2_moe": read_qwen2, "qwen3_moe": read_qwen3}
