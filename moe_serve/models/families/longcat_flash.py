"""LongCat-Flash: pairs of layers with latent attention and an MLP each, and experts on a shortcut around the second.

A layer of config.json is two of ours. Some choices of the router stand for experts that give back what they take.
"""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.deepseek import latent_model
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, MlaSpec, ModelSpec, NormNames

_ONLY = {
    "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "router_bias": False,
    "norm_topk_prob": False, "zero_expert_type": "identity",
}  # fmt: skip
_ALIASES = {  # which transformers reads into the key behind
    "num_local_experts": "n_routed_experts", "num_experts_per_tok": "moe_topk",
    "intermediate_size": "ffn_hidden_size", "moe_intermediate_size": "expert_ffn_hidden_size",
}  # fmt: skip


def read(config: HfConfig) -> ModelSpec:
    for key, value in _ONLY.items():
        config.only(key, value)
    for alias, key in _ALIASES.items():
        config.only(alias, config.size(key))
    num_layers = 2 * config.size("num_layers")
    config.only("num_hidden_layers", num_layers)
    config.only("num_key_value_heads", config.size("num_attention_heads"))
    rope_dim = config.size("qk_rope_head_dim")
    config.only("head_dim", rope_dim)
    config.only("qk_head_dim", config.size("qk_nope_head_dim") + rope_dim)
    router = RouterSpec(
        num_logical=config.size("n_routed_experts"),
        topk=config.size("moe_topk"),
        norm_topk=False,
        scaling=config.positive("routed_scaling_factor"),
        has_bias=True,
        num_identity=config.size("zero_expert_num", default=0, minimum=0),
    )
    as_deepseek = {
        "num_hidden_layers": num_layers, "first_k_dense_replace": 0, "n_shared_experts": 0, "moe_layer_freq": 1,
        "moe_intermediate_size": config.size("expert_ffn_hidden_size"),
    }  # fmt: skip
    spec = latent_model(HfConfig({**config.values, **as_deepseek}, config.where), router)
    attention = spec.attention
    assert isinstance(attention, MlaSpec)
    of_queries = (spec.hidden / config.size("q_lora_rank")) ** 0.5
    attention = replace(
        attention,
        softmax_scale=attention.softmax_scale * of_queries,
        latent_factor=(spec.hidden / attention.kv_lora_rank) ** 0.5,
        block="self_attn.{half}",
    )
    return replace(
        spec,
        attention=attention,
        is_paired=True,
        moe_layer_ids=spec.moe_layer_ids[::2],
        dense_intermediate=config.size("ffn_hidden_size"),
        expert_names=ExpertNames(
            dense="mlps.{half}", router="router.classifier", router_bias="router.e_score_correction_bias"
        ),
        norm_names=NormNames(input="input_layernorm.{half}", post="post_attention_layernorm.{half}"),
    )


DEFAULTS = {
    "longcat_flash": {
        "eos_token_id": 2,
        "head_dim": 64,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "routed_scaling_factor": 6.0,
        "zero_expert_num": 256,
    }
}
READERS = {"longcat_flash": read}
