"""Kolibri: norms on both sides of attention and of experts, windowed layers that rotate and others that do not.

A norm over each query and key head, a shared expert. The router's bias is added to logits, of which the chosen ones'
sigmoids are the weights.
"""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec, NormNames


def read(config: HfConfig) -> ModelSpec:
    attention = windowed_by_layer(gqa(config), config, lambda layer: (layer + 1) % 5 != 0)
    full = tuple(layer for layer in range(config.num_layers) if layer not in attention.windowed_layer_ids)
    is_hybrid = config.values.get("sliding_window", 0) is not None
    attention = replace(attention, qk_norm="head", unrotated_layer_ids=full if is_hybrid else ())
    router = RouterSpec(
        num_logical=config.size("num_local_experts", "num_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid_of_chosen",
        norm_topk=config.flag("norm_topk_prob"),
        has_bias=True,
    )
    return replace(
        model_of(config, attention, router, config.size("moe_intermediate_size")),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        expert_names=ExpertNames(bias_block="moe", router_bias="router.expert_bias"),
        norm_names=NormNames(behind_attention="post_attn_norm", behind_moe="post_ffn_norm"),
    )


DEFAULTS = {
    "kolibri1": {
        "head_dim": 128,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 512,
        "sliding_window": 513,
    }
}
READERS = {"kolibri1": read}
