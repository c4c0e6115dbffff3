"""Laguna: a norm over each head, gates of heads by softplus, other numbers of query heads and rotations in windows.

Sigmoid scores with a correction bias, a shared expert, and a list of dense layers.
"""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import (
    dense_width,
    gqa,
    model_of,
    moe_layers_of_list,
    ropes_by_kind,
    windowed_by_layer,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, GqaSpec, ModelSpec

_KINDS = {"full_attention": (500000.0, 0.5), "sliding_attention": (10000.0, 1.0)}  # theta, and the share that rotates


def read(config: HfConfig) -> ModelSpec:
    if config.get("gating", True) not in (True, "per-head"):
        raise config.refuse("a gate of each element behind attention")
    config.only("moe_apply_router_weight_on_input", False)
    config.only("moe_router_logit_softcapping", 0.0)
    bias, attention = config.flag("attention_bias"), _with_heads_by_kind(config)
    attention = replace(attention, qk_norm="head", qkv_bias=bias, out_bias=bias, head_gate_name="g_proj")
    if config.get("rope_parameters") is None:
        ropes = {kind: {"rope_theta": theta, "partial_rotary_factor": share} for kind, (theta, share) in _KINDS.items()}
        config = HfConfig({**config.values, "rope_parameters": ropes}, config.where)
    rope, windowed_rope = ropes_by_kind(config, attention, {}, rotated=attention.head_dim)
    router = RouterSpec(
        num_logical=config.size("num_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        scaling=config.positive("moe_routed_scaling_factor"),
        has_bias=True,
    )
    width, moe_layer_ids = config.size("moe_intermediate_size"), moe_layers_of_list(config, 1)
    return replace(
        model_of(config, attention, router, width, moe_layer_ids, rope),
        dense_intermediate=dense_width(config, moe_layer_ids),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        windowed_rope=windowed_rope,
        expert_names=ExpertNames(router_bias="experts.e_score_correction_bias", shared="mlp.shared_expert"),
    )


def _with_heads_by_kind(config: HfConfig) -> GqaSpec:
    """Returns attention with the query heads of num_attention_heads_per_layer, which are those of kinds of layers."""
    attention = windowed_by_layer(gqa(config), config, lambda layer: False)
    usual = [attention.num_heads] * config.num_layers
    given = config.get("num_attention_heads_per_layer", usual)
    kv_heads, windowed = attention.num_kv_heads, attention.windowed_layer_ids
    if (
        not isinstance(given, list)
        or len(given) != config.num_layers
        or any(type(heads) is not int or not 0 < heads <= 1 << 16 or heads % kv_heads for heads in given)
    ):
        key = "num_attention_heads_per_layer"
        raise config.wrong(key, given, f"a list of {config.num_layers} multiples of num_key_value_heads {kv_heads}")
    full = {heads for layer, heads in enumerate(given) if layer not in windowed} or {attention.num_heads}
    in_windows = {given[layer] for layer in windowed}
    if len(full) > 1 or len(in_windows) > 1:
        raise config.refuse("query heads of several numbers in layers of one kind")
    return replace(attention, num_heads=full.pop(), windowed_heads=(in_windows.pop(), kv_heads) if in_windows else None)


DEFAULTS = {
    "laguna": {
        "head_dim": 128, "moe_routed_scaling_factor": 1.0, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "sliding_window": 512,
    }
}  # fmt: skip
READERS = {"laguna": read}
