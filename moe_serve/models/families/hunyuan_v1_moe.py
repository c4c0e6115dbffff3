"""Hunyuan-A13B: heads are normed behind their rotation, one shared expert, frequencies stretched by a constant."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, read_rope
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    config = HfConfig({key: _of_all_layers(value) for key, value in config.values.items()}, config.where)
    width, bias = config.size("intermediate_size"), config.flag("attention_bias")
    config.only("use_qk_norm", True)
    config.only("use_cla", False)
    config.only("moe_layer_num_skipped", 0)
    config.only("num_shared_expert", 1)
    config.only("moe_intermediate_size", width)
    names = ("query_layernorm", "key_layernorm")
    attention = replace(gqa(config), qk_norm="rotated_head", norm_names=names, qkv_bias=bias, out_bias=bias)
    rope = read_rope(_stretched(config, attention.head_dim), attention.head_dim)
    router = RouterSpec(config.size("num_experts"), config.size("moe_topk", "num_experts_per_tok"))
    return replace(
        model_of(config, attention, router, width, rope=rope),
        shared_intermediate=width,
        expert_names=ExpertNames(router="gate.wg", shared="mlp.shared_mlp"),
    )


def _of_all_layers(value: Any) -> Any:
    """Returns the number that a list repeats for every layer; anything else as it is."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _stretched(config: HfConfig, head_dim: int) -> HfConfig:
    """Returns config.json with the theta that the `alpha` of its "dynamic" rotary embedding stands for."""
    given = config.get("rope_parameters", config.get("rope_scaling"))
    if not isinstance(given, Mapping) or not given.get("alpha"):
        return config
    rope = HfConfig({**config.values, **given}, config.where)
    alpha = rope.positive("alpha", 1.0)
    if alpha > 1e9 or head_dim <= 2:  # beyond, its power is no number
        raise rope.wrong("alpha", alpha, f"at most 1e9, with heads wider than 2 (they are {head_dim})")
    theta = rope.positive("rope_theta", 10000.0) * alpha ** (head_dim / (head_dim - 2))
    return HfConfig({**config.values, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}}, config.where)


DEFAULTS = {"hunyuan_v1_moe": {"eos_token_id": 2, "rms_norm_eps": 1e-5}}
READERS = {"hunyuan_v1_moe": read}
