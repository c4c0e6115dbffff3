"""Qwen2-MoE (Qwen1.5-MoE too): biases on q, k and v, and a shared expert whose rows have a weight of their own."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import gqa, model_of, sparse_layers, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    attention = replace(gqa(config), qkv_bias=config.flag("qkv_bias", default=True))
    if config.flag("use_sliding_window"):
        first_full = config.size("max_window_layers", minimum=0)
        attention = windowed_by_layer(attention, config, lambda layer: layer % 2 == 0 and layer < first_full)
    router = RouterSpec(
        num_logical=config.size("num_experts", "num_local_experts"),
        topk=config.size("num_experts_per_tok"),
        norm_topk=config.flag("norm_topk_prob"),
    )
    return replace(
        model_of(config, attention, router, config.size("moe_intermediate_size"), sparse_layers(config)),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        has_shared_gate=True,
        expert_names=ExpertNames(shared="mlp.shared_expert"),
    )


DEFAULTS = {
    "qwen2_moe": {"max_window_layers": 28, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "sliding_window": 4096}
}
READERS = {"qwen2_moe": read}
