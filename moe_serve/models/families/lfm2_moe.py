"""LFM2-MoE: gated short convolutions in most layers, attention with a norm over heads in the others.

The first layers are dense; sigmoid scores, with a correction bias where config.json says so.
"""

from dataclasses import replace

from moe_serve.kernels.forms import GatedConvShape, RouterSpec
from moe_serve.models.families.common import gqa, model_of, stateful_layers
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec, NormNames


def read(config: HfConfig) -> ModelSpec:
    values = {
        **config.values,
        "rms_norm_eps": config.positive("norm_eps"),
        "tie_word_embeddings": config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
    }
    config = HfConfig(values, config.where)
    config.require("layer_types")
    convolved = stateful_layers(config, "conv", lambda layer: True)
    norms = ("q_layernorm", "k_layernorm")
    attention = replace(gqa(config), qk_norm="head", norm_names=norms, out_name="out_proj")
    has_bias = config.flag("use_expert_bias", True)
    router = RouterSpec(
        num_logical=config.size("num_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        norm_topk=config.flag("norm_topk_prob"),
        scaling=config.positive("routed_scaling_factor"),
        has_bias=has_bias,
        norm_eps=1e-6,
    )
    num_dense = min(config.size("num_dense_layers", minimum=0), config.num_layers)
    moe_layer_ids = tuple(range(num_dense, config.num_layers))
    block = ExpertNames(
        block="feed_forward", dense="feed_forward", gate="w1", up="w3", down="w2", router_bias="expert_bias"
    )
    taps = config.size("conv_L_cache", minimum=2, largest=16)
    shape = GatedConvShape(config.size("hidden_size"), taps, config.flag("conv_bias"))
    return replace(
        model_of(config, attention, router, config.size("moe_intermediate_size"), moe_layer_ids),
        expert_names=block,
        norm_names=NormNames(input="operator_norm", post="ffn_norm", last="embedding_norm"),
        stateful=shape if convolved else None,
        stateful_layer_ids=convolved,
        stateful_block="conv",
    )


DEFAULTS = {
    "lfm2_moe": {
        "conv_L_cache": 3,
        "eos_token_id": 2,
        "norm_eps": 1e-5,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
    }
}
READERS = {"lfm2_moe": read}
