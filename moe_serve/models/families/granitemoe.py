"""Granite-MoE, with a shared expert or without: four multipliers, and experts stored together."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import common_fields, gqa
from moe_serve.models.hf_config import MOST_LAYERS, HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    bias, scale = config.flag("attention_bias"), config.positive("attention_multiplier", 1.0)
    attention = replace(gqa(config), qkv_bias=bias, out_bias=bias, scale=scale)
    shared = 0
    if config.get("model_type") == "granitemoeshared":
        shared = config.size("shared_intermediate_size", default=0, minimum=0)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=tuple(range(config.size("num_hidden_layers", largest=MOST_LAYERS))),
        router=RouterSpec(
            num_logical=config.size("num_local_experts", default=8),
            topk=config.size("num_experts_per_tok", default=2),
            norm_topk=True,  # softmax over the chosen logits, as in gpt_oss.py
        ),
        moe_intermediate=config.size("intermediate_size"),
        shared_intermediate=shared,
        dense_intermediate=0,
        embedding_factor=config.positive("embedding_multiplier", 1.0),
        residual_factor=config.positive("residual_multiplier", 1.0),
        logits_factor=1 / config.positive("logits_scaling", 1.0),
        expert_names=ExpertNames(
            block="block_sparse_moe",
            router="router.layer",
            shared="shared_mlp",
            linears=("input_linear", "output_linear"),
        ),
    )


DEFAULTS = {name: {"eos_token_id": 2, "rms_norm_eps": 1e-6} for name in ("granitemoe", "granitemoeshared")}
READERS = {"granitemoe": read, "granitemoeshared": read}
