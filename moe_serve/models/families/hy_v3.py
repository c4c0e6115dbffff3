"""Hunyuan-3: GQA with a norm over each query and key head, sigmoid scores with a correction bias, shared experts."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, moe_layers_of_list
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    config.only("mlp_bias", False)
    bias = config.flag("attention_bias")
    attention = replace(gqa(config), qk_norm="head", qkv_bias=bias, out_bias=bias)
    router = RouterSpec(
        num_logical=config.size("num_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        scaling=config.positive("router_scaling_factor"),
        has_bias=True,
        norm_eps=1e-20,
    )
    width = config.size("moe_intermediate_size")
    return replace(
        model_of(config, attention, router, width, moe_layers_of_list(config, 1)),
        shared_intermediate=width * config.size("num_shared_experts", default=1),
        expert_names=ExpertNames(router="router.gate", router_bias="expert_bias", shared="mlp.shared_mlp"),
    )


DEFAULTS = {
    "hy_v3": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "router_scaling_factor": 2.826,
    }
}
READERS = {"hy_v3": read}
