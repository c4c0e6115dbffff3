"""OLMoE: GQA with one norm over all query heads and one over all key heads, clipped where config.json says so."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import common_fields, gqa
from moe_serve.models.hf_config import MOST_LAYERS, HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    bias = config.flag("attention_bias")
    clip = None if config.get("clip_qkv") is None else config.positive("clip_qkv", 1.0)
    attention = replace(gqa(config), qk_norm="projection", qkv_bias=bias, out_bias=bias, clip=clip)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=tuple(range(config.size("num_hidden_layers", largest=MOST_LAYERS))),
        router=RouterSpec(
            num_logical=config.size("num_experts", "num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            norm_topk=config.flag("norm_topk_prob"),
        ),
        moe_intermediate=config.size("intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=0,
    )


DEFAULTS = {"olmoe": {"eos_token_id": 50279, "rms_norm_eps": 1e-5}}
READERS = {"olmoe": read}
