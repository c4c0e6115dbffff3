"""Qwen2-MoE (Qwen1.5-MoE too): biases on q, k and v, and a shared expert whose rows have a weight of their own."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import common_fields, gqa, sparse_layers, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    attention = replace(gqa(config), qkv_bias=config.flag("qkv_bias", default=True))
    if config.flag("use_sliding_window"):
        first_full = config.size("max_window_layers", default=28, minimum=0)
        with_window = HfConfig({"sliding_window": 4096, **config.values}, config.where)
        attention = windowed_by_layer(attention, with_window, lambda layer: layer % 2 == 0 and layer < first_full)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=sparse_layers(config),
        router=RouterSpec(
            num_logical=config.size("num_experts", "num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            norm_topk=config.flag("norm_topk_prob"),
        ),
        moe_intermediate=config.size("moe_intermediate_size"),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        has_shared_gate=True,
        dense_intermediate=config.size("intermediate_size"),
        expert_names=ExpertNames(shared="mlp.shared_expert"),
    )


READERS = {"qwen2_moe": read}
