"""MiniMax-M2: norms over all query heads and all key heads, partly rotated heads, sigmoid scores with a bias."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import common_fields, gqa
from moe_serve.models.hf_config import MOST_LAYERS, HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    attention = replace(gqa(config), qk_norm="projection")
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    for key, wanted in (
        ("scoring_func", "sigmoid"), ("use_qk_norm", True), ("qk_norm_type", "per_layer"), ("use_routing_bias", True),
        ("shared_intermediate_size", 0), ("attn_type_list", [1] * num_layers),
    ):  # fmt: skip
        if config.get(key, wanted) != wanted:
            raise config.refuse(f"{key} {shown(config.get(key))} (only {shown(wanted)} is)")
    rotated = config.size("rotary_dim", default=attention.head_dim)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(
            config.values, attention.head_dim, False, config.where, partial_default=rotated / attention.head_dim
        ),
        moe_layer_ids=tuple(range(num_layers)),
        router=RouterSpec(
            num_logical=config.size("num_local_experts", "num_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="sigmoid",
            norm_topk=True,
            has_bias=True,
        ),
        moe_intermediate=config.size("intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=0,
        expert_names=ExpertNames(
            block="block_sparse_moe", router_bias="e_score_correction_bias", gate="w1", up="w3", down="w2"
        ),
    )


DEFAULTS = {
    "minimax_m2": {
        "eos_token_id": 200020,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
    }
}
READERS = {"minimax_m2": read}
