"""Kimi-Linear: Kimi Delta Attention in three of four layers, latent attention that rotates nothing in the others.

Router, shared experts and dense first layers are those of DeepSeek-V3.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_serve.kernels.forms import DeltaShape
from moe_serve.models.families.common import WIDEST_HEAD, dense_width, moe_layers_of_list, stateful_layers
from moe_serve.models.families.deepseek import read_v3
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.spec import ExpertNames, ModelSpec, RopeSpec

_NAMES = {  # as the model's authors call what DeepSeek-V3 has
    "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts", "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}  # fmt: skip
_LINEAR = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
_LINEAR["short_conv_kernel_size"] = "linear_conv_kernel_dim"
_FIXED = {"rope_interleave": True, "rope_scaling": None, "rope_parameters": None, "rope_theta": None}


def read(config: HfConfig) -> ModelSpec:
    config.only("mla_use_nope", True)
    config.only("moe_router_activation_func", "sigmoid")
    config.only("mla_use_output_gate", False)  # this and the next ones: Kimi-K3
    config.only("attn_res_block_size", None)
    linear = config.get("linear_attn_config", {})
    if not isinstance(linear, Mapping):
        raise config.wrong("linear_attn_config", linear, "an object")
    if unknown := [key for key in linear if key not in (*_LINEAR, "full_attn_layers", "kda_layers")]:
        raise config.refuse(f"linear_attn_config with {shown(unknown[0])}")
    own = {ours: linear[theirs] for theirs, ours in _LINEAR.items() if theirs in linear}
    values = {**named_as_v3(config), **own, **_FIXED, "first_k_dense_replace": 0}
    values["tie_word_embeddings"] = False  # transformers ties nothing, whatever it says
    dense = config.size("first_k_dense_replace", default=1, minimum=0)
    if config.get("layer_types") is None:
        values["layer_types"] = _kinds_of_layers(config, linear)
    config = HfConfig(values, config.where)
    linear_ids = stateful_layers(config, "linear_attention", lambda layer: True)
    spec, moe_layer_ids = read_v3(config), moe_layers_of_list(config, dense)
    heads, width = config.size("linear_num_heads"), config.size("linear_head_dim", largest=WIDEST_HEAD)
    taps = config.size("linear_conv_kernel_dim", minimum=2, largest=16)
    return replace(
        spec,
        moe_layer_ids=moe_layer_ids,
        dense_intermediate=dense_width(config, moe_layer_ids),
        num_predictors=0,
        rope=RopeSpec(spec.rope.dim, 1e4, interleaved=True, rotates=False),
        expert_names=ExpertNames(
            "block_sparse_moe", gate="w1", up="w3", down="w2", shared="block_sparse_moe.shared_experts",
            mlp=("gate_proj", "up_proj", "down_proj"),
        ),
        stateful=DeltaShape(heads, heads, width, width, taps, rank=width) if linear_ids else None,
        stateful_layer_ids=linear_ids,
        stateful_block="self_attn",
    )  # fmt: skip


def named_as_v3(config: HfConfig) -> dict[str, Any]:
    """Returns the values of a config.json under the names that DeepSeek-V3 has for them, too."""
    named = {ours: config.values[theirs] for ours, theirs in _NAMES.items() if theirs in config.values}
    return {"n_routed_experts": config.get("num_local_experts"), **config.values, **named}


def _kinds_of_layers(config: HfConfig, linear: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of linear_attn_config, which counts layers from 1, or the usual ones."""
    if "full_attn_layers" not in linear or "kda_layers" not in linear:
        return [("linear_attention", "full_attention")[i > 0 and i % 4 == 0] for i in range(config.num_layers)]
    both = HfConfig(linear, config.where)
    full, kda = (both.sizes(key, below=config.num_layers + 1) for key in ("full_attn_layers", "kda_layers"))
    if full & kda or full | kda != set(range(1, config.num_layers + 1)):
        raise config.wrong("linear_attn_config", dict(linear), "each layer from 1 on in one of its two lists")
    return [("linear_attention", "full_attention")[layer + 1 in full] for layer in range(config.num_layers)]


DEFAULTS = {
    "kimi_linear": {
        "eos_token_id": 163586, "kv_lora_rank": 512, "linear_conv_kernel_dim": 4, "linear_head_dim": 128,
        "linear_num_heads": 32, "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, "topk_group": 1,
        "v_head_dim": 128,
    }
}  # fmt: skip
READERS = {"kimi_linear": read}
