"""MiMo-V2-Flash: five of six layers are windowed, with sinks and twice the key/value heads of the others.

Values are narrower than keys, and scaled; a third of each head rotates, by a theta of the kind of layer; the router of
DeepSeek-V3 without shared experts.
"""

from dataclasses import replace

from moe_serve.models.families.common import (
    deepseek_v3_router,
    gqa,
    model_of,
    moe_layers_of_list,
    ropes_by_kind,
    windowed_by_layer,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec

_THETAS = {"full_attention": 5e6, "sliding_attention": 1e4}


def read(config: HfConfig) -> ModelSpec:
    heads = gqa(config)
    value_dim = config.size("v_head_dim", largest=heads.head_dim)
    own: dict[str, float] = {"routed_scaling_factor": config.positive("routed_scaling_factor", 1.0)}
    if config.get("sliding_window_size") is not None:  # without the token itself
        own["sliding_window"] = config.size("sliding_window_size") + 1
    config = HfConfig({**config.values, **own}, config.where)
    attention = windowed_by_layer(heads, config, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    width, moe_layer_ids = config.size("moe_intermediate_size"), moe_layers_of_list(config, 1)
    _check_authors_keys(config, attention.windowed_layer_ids, moe_layer_ids, value_dim)
    attention = replace(
        attention,
        qkv_bias=config.flag("attention_bias"),
        has_sinks=bool(attention.windowed_layer_ids),
        sinks_in_windows=True,
        sinks_name="attention_sink_bias",
        windowed_heads=(heads.num_heads, 2 * heads.num_kv_heads),
        value_dim=None if value_dim == heads.head_dim else value_dim,
        value_scale=config.positive("attention_value_scale", 1.0),
    )
    if heads.num_heads % (2 * heads.num_kv_heads):
        raise config.wrong("num_key_value_heads", heads.num_kv_heads, f"a number that divides {heads.num_heads} twice")
    rope, windowed_rope = ropes_by_kind(config, attention, _THETAS, rotated=int(0.334 * heads.head_dim))
    spec = model_of(config, attention, deepseek_v3_router(config), width, moe_layer_ids, rope)
    if attention.value_dim is not None and spec.integers is not None:
        raise config.refuse("whole numbers of 4 or 8 bits, of values that are narrower than keys,")
    return replace(spec, windowed_rope=windowed_rope)


def _check_authors_keys(
    config: HfConfig, windowed: tuple[int, ...], moe_layer_ids: tuple[int, ...], value_dim: int
) -> None:
    """Raises ModelError where keys of the authors' own config.json, which transformers leaves unread, say otherwise."""
    kinds, sparse = ([int(layer in ids) for layer in range(config.num_layers)] for ids in (windowed, moe_layer_ids))
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    for key, value in (
        ("hybrid_layer_pattern", kinds), ("swa_num_attention_heads", heads), ("swa_num_key_value_heads", 2 * kv_heads),
        ("swa_head_dim", config.size("head_dim")), ("swa_v_head_dim", value_dim), ("n_shared_experts", 0),
        ("add_full_attention_sink_bias", False), ("add_swa_attention_sink_bias", True),
        ("layernorm_epsilon", config.positive("rms_norm_eps")), ("scoring_func", "sigmoid"),
        ("moe_layer_freq", sparse), ("topk_method", "noaux_tc"),
    ):  # fmt: skip
        config.only(key, value)
    if config.get("rope_parameters") is None:
        config.only("rope_theta", _THETAS["full_attention"])
        config.only("swa_rope_theta", _THETAS["sliding_attention"])


DEFAULTS = {
    "mimo_v2_flash": {
        "attention_value_scale": 0.707, "head_dim": 192, "norm_topk_prob": True, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5, "sliding_window": 129, "v_head_dim": 128,
    }
}  # fmt: skip
READERS = {"mimo_v2_flash": read}
