"""Phi-3.5-MoE: layer norms with biases, biases of attention and logits, two experts by sparsemixer, LongRoPE."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import common_fields, gqa, windowed
from moe_serve.models.hf_config import MOST_LAYERS, HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    has_bias = config.flag("attention_bias")
    attention = replace(windowed(gqa(config), config), qkv_bias=has_bias, out_bias=has_bias)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where, may_be_long=True),
        moe_layer_ids=tuple(range(config.size("num_hidden_layers", largest=MOST_LAYERS))),
        router=RouterSpec(
            num_logical=config.size("num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="sparsemixer",
            norm_topk=False,
            jitter=config.positive("router_jitter_noise", 0.01),
        ),
        moe_intermediate=config.size("intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=0,
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        layer_norm=True,
        head_bias=config.flag("lm_head_bias"),
    )


DEFAULTS = {"phimoe": {"eos_token_id": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}}
READERS = {"phimoe": read}
