"""Mixtral: GQA, softmax over all experts, weights always divided by their sum."""

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.common import common_fields, gqa, windowed
from moe_serve.models.hf_config import MOST_LAYERS, HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    attention = windowed(gqa(config), config)
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=tuple(range(config.size("num_hidden_layers", largest=MOST_LAYERS))),
        router=RouterSpec(
            num_logical=config.size("num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="softmax",
            norm_topk=True,
        ),
        moe_intermediate=config.size("intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=0,
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )


DEFAULTS = {"mixtral": {"eos_token_id": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}}
READERS = {"mixtral": read}
