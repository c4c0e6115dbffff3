"""AFMoE (Arcee's Trinity): gated attention of which windowed layers rotate, and norms on both sides of each sublayer.

A norm over each query and key head; sigmoid scores with a correction bias, shared experts, the first layers dense.
"""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec, NormNames


def read(config: HfConfig) -> ModelSpec:
    for key, value in (("attention_bias", False), ("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1)):
        config.only(key, value)
    every = config.size("global_attn_every_n_layers")
    attention = windowed_by_layer(gqa(config), config, lambda layer: (layer + 1) % every != 0)
    full = tuple(layer for layer in range(config.num_layers) if layer not in attention.windowed_layer_ids)
    attention = replace(attention, qk_norm="head", unrotated_layer_ids=full, has_gate=True, gate_name="gate_proj")
    router = RouterSpec(
        num_logical=config.size("num_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        scaling=config.positive("route_scale"),
        has_bias=True,
        norm_eps=1e-20,
    )
    width = config.size("moe_intermediate_size")
    moe_layer_ids = tuple(range(min(config.size("num_dense_layers", minimum=0), config.num_layers), config.num_layers))
    names = NormNames(
        behind_attention="post_attention_layernorm",
        post="pre_mlp_layernorm",
        behind_moe="post_mlp_layernorm",
        behind_dense="post_mlp_layernorm",
    )
    return replace(
        model_of(config, attention, router, width, moe_layer_ids),
        shared_intermediate=width * config.size("num_shared_experts"),
        embedding_factor=config.size("hidden_size") ** 0.5 if config.flag("mup_enabled") else 1.0,
        expert_names=ExpertNames(router="router.gate", router_bias="expert_bias"),
        norm_names=names,
    )


DEFAULTS = {
    "afmoe": {
        "global_attn_every_n_layers": 4,
        "head_dim": 128,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "route_scale": 1.0,
        "sliding_window": 1024,
    }
}
READERS = {"afmoe": read}
