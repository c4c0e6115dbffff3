"""Llama-4, the text model: top-1 experts whose input the router scales, chunked attention, layers without rotation."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import (
    dense_width,
    gqa,
    layers_of_kind,
    model_of,
    read_rope,
    within_longest_context,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec, QueryTemperature


def read(config: HfConfig) -> ModelSpec:
    config = within_longest_context(config)
    longest, unrotated = config.size("max_position_embeddings"), _unrotated(config)
    chunk = config.size("attention_chunk_size", default=longest)
    bias = config.flag("attention_bias")
    attention = replace(
        gqa(config),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="unit" if config.flag("use_qk_norm", default=True) else None,
        unrotated_layer_ids=unrotated,
        chunk=chunk if chunk < longest else None,
        chunked_layer_ids=layers_of_kind(config, "chunked_attention", lambda layer: layer not in unrotated),
    )
    if config.get("attn_temperature_tuning", True):
        scales = config.positive("floor_scale", 8192), config.positive("attn_scale", 0.1)
        attention = replace(attention, temperature=QueryTemperature(*scales))
    step = config.size("interleave_moe_layer_step", default=1)
    listed = config.get("moe_layers")
    moe_layer_ids = tuple(
        sorted(config.sizes("moe_layers", below=config.num_layers))
        if listed is not None
        else range(step - 1, config.num_layers, step)
    )
    rope = read_rope(config, attention.head_dim, interleaved=True)
    router = RouterSpec(
        num_logical=config.size("num_local_experts"),
        topk=config.size("num_experts_per_tok", default=1),
        scoring="sigmoid_of_chosen",
        norm_topk=False,
        scales_input=True,
    )
    width = config.size("intermediate_size")
    return replace(
        model_of(config, attention, router, width, moe_layer_ids, rope),
        shared_intermediate=width,
        dense_intermediate=dense_width(config, moe_layer_ids, "intermediate_size_mlp"),
        expert_names=ExpertNames(
            "feed_forward", "feed_forward", "router", shared="feed_forward.shared_expert", form="transposed"
        ),
        tensor_prefix="language_model." if config.get("model_type") == "llama4" else "",
        other_models=("vision_model.", "multi_modal_projector.") if config.get("model_type") == "llama4" else (),
    )


def _unrotated(config: HfConfig) -> tuple[int, ...]:
    num_layers, interval = config.num_layers, config.size("no_rope_layer_interval", default=4)
    flags = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise config.wrong("no_rope_layers", flags, f"a list of {num_layers} numbers, 1 for a layer that rotates")
    return tuple(layer for layer, rotates in enumerate(flags) if not rotates)


TEXT_DEFAULTS = {
    "attention_chunk_size": 8192,
    "eos_token_id": 2,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
DEFAULTS = {"llama4_text": TEXT_DEFAULTS, "llama4": TEXT_DEFAULTS}
READERS = {"llama4_text": read, "llama4": read}
