"""K-EXAONE: windowed layers rotate and the others do not, norms over heads, the router of DeepSeek-V3."""

from dataclasses import replace

from moe_serve.models.families.common import (
    deepseek_v3_router,
    gqa,
    model_of,
    moe_layers_of_list,
    windowed_by_layer,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    pattern = 1 if config.get("layer_types") is not None else config.size("sliding_window_pattern", default=4)
    attention = windowed_by_layer(gqa(config), config, lambda layer: (layer + 1) % pattern != 0)
    full = tuple(layer for layer in range(config.num_layers) if layer not in attention.windowed_layer_ids)
    attention = replace(attention, qk_norm="head", unrotated_layer_ids=full)
    width = config.size("moe_intermediate_size")
    moe_layer_ids = moe_layers_of_list(config, config.size("first_k_dense_replace", minimum=0))
    router = deepseek_v3_router(config, "num_experts")
    return replace(
        model_of(config, attention, router, width, moe_layer_ids),
        shared_intermediate=width * config.size("num_shared_experts", default=1, minimum=0),
        expert_names=ExpertNames(router_bias="e_score_correction_bias"),
    )


DEFAULTS = {
    "exaone_moe": {
        "eos_token_id": 53,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "sliding_window": 4096,
    }
}
READERS = {"exaone_moe": read}
