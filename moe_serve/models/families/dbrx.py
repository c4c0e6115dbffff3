"""DBRX: layer norms without biases; queries, keys and values of one matrix, clipped; experts one below the other.

Its config.json has other keys, and parts for attention and for experts. Rotations are those of attn_config, as its
authors read it: transformers 5 leaves that theta out, and writes its own default as rope_parameters.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.spec import ExpertNames, ModelSpec, NormNames

_KEYS = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}  # fmt: skip
_DEFAULT_THETA = 10000.0  # of transformers


def read(config: HfConfig) -> ModelSpec:
    attends, feeds = (_part(config, key) for key in ("attn_config", "ffn_config"))
    act, power = feeds.get("ffn_act_fn", {"name": "silu"}), feeds.values.get("moe_normalize_expert_weights", 1.0)
    if act != {"name": "silu"}:
        raise feeds.refuse(f"ffn_act_fn {shown(act)}")
    if power not in (None, 1.0):
        raise feeds.refuse(f"moe_normalize_expert_weights {shown(power)} (only 1.0 and null are)")
    theta = attends.positive("rope_theta")
    rotation = config.get("rope_parameters", {})
    if (
        not isinstance(rotation, Mapping)
        or rotation.get("rope_type", "default") != "default"
        or rotation.get("rope_theta", theta) not in (theta, _DEFAULT_THETA)
    ):
        raise config.refuse(f"rope_parameters {shown(rotation)} beside rope_theta {theta:g} of attn_config")
    own: dict[str, Any] = {
        "num_key_value_heads": attends.size("kv_n_heads", default=1), "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": theta}, "rope_scaling": None, "hidden_act": None, "head_dim": None,
    }  # fmt: skip
    renamed = {new: config.get(old, config.get(new)) for old, new in _KEYS.items()}
    config = HfConfig({**config.values, **renamed, **own}, config.where)
    config.only("tie_word_embeddings", False)
    clip = None if attends.get("clip_qkv") is None else attends.positive("clip_qkv")
    attention = replace(gqa(config), clip=clip, block="norm_attn_norm.attn", qkv_name="Wqkv", out_name="out_proj")
    router = RouterSpec(
        num_logical=feeds.size("moe_num_experts", default=4),
        topk=feeds.size("moe_top_k", default=1),
        norm_topk=power is not None,
    )
    stored = "experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"
    return replace(
        model_of(config, attention, router, feeds.size("ffn_hidden_size", default=3584)),
        norm="layer",
        body_prefix="transformer.",
        embedding_name="wte",
        layers_name="blocks",
        expert_names=ExpertNames("ffn", "ffn", "router.layer", *stored, form="flat"),
        norm_names=NormNames("norm_attn_norm.norm_1", post="norm_attn_norm.norm_2", last="norm_f"),
    )


def _part(config: HfConfig, key: str) -> HfConfig:
    values = config.get(key, {})
    if not isinstance(values, Mapping):
        raise config.wrong(key, values, "an object")
    return HfConfig({**values, "model_type": "dbrx"}, f"{config.where}: {key}")


DEFAULTS = {"dbrx": {"d_model": 2048, "max_seq_len": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 32000}}
READERS = {"dbrx": read}
