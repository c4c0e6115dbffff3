"""Ling-3.0: Kimi Delta Attention in five of six layers, latent attention with a gate of each head in the others.

Decays have a lower bound; router, shared experts and dense first layers are those of DeepSeek-V3.
"""

from dataclasses import replace

from moe_serve.kernels.forms import DeltaShape
from moe_serve.models.families.common import WIDEST_HEAD, dense_width, moe_layers_of_list, stateful_layers
from moe_serve.models.families.deepseek import read_v3
from moe_serve.models.families.kimi_linear import named_as_v3
from moe_serve.models.hf_config import HfConfig, is_positive
from moe_serve.models.spec import ExpertNames, MlaSpec, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    group = config.size("layer_group_size")
    dense = config.size("first_k_dense_replace", minimum=0)
    own = {"first_k_dense_replace": 0, "q_lora_rank": None, "rope_interleave": True, "tie_word_embeddings": False}
    config = HfConfig({**named_as_v3(config), **own}, config.where)
    linear_ids = stateful_layers(config, "linear_attention", lambda layer: (layer + 1) % group != 0)
    spec, moe_layer_ids = read_v3(config), moe_layers_of_list(config, dense)
    assert isinstance(spec.attention, MlaSpec)
    heads, width = spec.attention.num_heads, config.size("linear_head_dim", "head_dim", largest=WIDEST_HEAD)
    taps = config.size("short_conv_kernel_size", minimum=2, largest=16)
    bound = config.get("kda_lower_bound") if config.flag("kda_safe_gate") else None
    if bound is not None and (type(bound) not in (int, float) or not is_positive(-bound)):
        raise config.wrong("kda_lower_bound", bound, "a number below 0")
    return replace(
        spec,
        attention=replace(spec.attention, block="attention", out_name="dense", gate_name="g_proj"),
        moe_layer_ids=moe_layer_ids,
        dense_intermediate=dense_width(config, moe_layer_ids),
        num_predictors=0,
        embedding_name="word_embeddings",
        expert_names=ExpertNames(router_bias="gate.expert_bias"),
        stateful=DeltaShape(heads, heads, width, width, taps, rank=0, bound=bound) if linear_ids else None,
        stateful_layer_ids=linear_ids,
        stateful_block="attention",
    )


DEFAULTS = {
    "bailing_hybrid": {
        "eos_token_id": 156895, "first_k_dense_replace": 2, "head_dim": 128, "kda_lower_bound": -5.0,
        "kda_safe_gate": True, "kv_lora_rank": 512, "layer_group_size": 6, "n_group": 8, "n_shared_experts": 1,
        "norm_topk_prob": True, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 6e6, "routed_scaling_factor": 2.5, "short_conv_kernel_size": 4, "topk_group": 4,
        "v_head_dim": 128,
    }
}  # fmt: skip
READERS = {"bailing_hybrid": read}
