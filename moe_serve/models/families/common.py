"""What readers of several families share: fields of every config.json, grouped-query attention."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moe_serve.ep.routing import RouterSpec
from moe_serve.errors import ModelError
from moe_serve.models.attention_spec import GqaSpec
from moe_serve.models.families.quantization import fp8_block
from moe_serve.models.hf_config import LONGEST_CONTEXT, MOST_LAYERS, HfConfig
from moe_serve.models.model_files import shown


def common_fields(config: HfConfig, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Returns the fields that all families share, and refuses what none of them supports."""
    if config.get("hidden_act", "silu") != "silu":
        raise config.refuse(f"hidden_act {shown(config.get('hidden_act'))}")
    return {
        "model_type": config.get("model_type"),
        "vocab_size": config.size("vocab_size"),
        "hidden": config.size("hidden_size"),
        "num_layers": config.size("num_hidden_layers", largest=MOST_LAYERS),
        "max_position": config.size("max_position_embeddings", largest=LONGEST_CONTEXT),
        "norm_eps": config.positive("rms_norm_eps"),
        "eos_token_ids": eos_token_ids,
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "checkpoint_dtype": config.text("dtype", "torch_dtype"),
        "fp8_block": fp8_block(config),
    }


def gqa(config: HfConfig) -> GqaSpec:
    """Returns grouped-query attention of the sizes in config.json, without norms and biases."""
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{config.where}: {num_heads} attention heads do not divide over {num_kv_heads} key/value heads; "
            "correct num_key_value_heads"
        )
    head_dim = config.size("head_dim", default=config.size("hidden_size") // num_heads)
    return GqaSpec(num_heads, num_kv_heads, head_dim)


def windowed(attention: GqaSpec, config: HfConfig) -> GqaSpec:
    """Returns the attention with the sliding window of config.json in every layer."""
    longest = config.size("max_position_embeddings")
    window = config.size("sliding_window", default=longest)
    if window >= longest:  # masks nothing
        return attention
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    return replace(attention, window=window, windowed_layer_ids=tuple(range(num_layers)))


def windowed_by_layer(attention: GqaSpec, config: HfConfig, is_windowed: Callable[[int], bool]) -> GqaSpec:
    """Returns the attention with sliding windows in the layers that layer_types says; without it, as is_windowed."""
    windowed_ids = layers_of_kind(config, "sliding_attention", is_windowed)
    window = config.size("sliding_window") if windowed_ids else None
    return replace(attention, window=window, windowed_layer_ids=windowed_ids)


def layers_of_kind(config: HfConfig, kind: str, is_usual: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns the layers of which layer_types says this kind of attention, as of the others full_attention.

    is_usual: whether a layer is of the kind where layer_types is missing
    """
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    known = ("full_attention", kind)
    kinds = config.get("layer_types", [known[is_usual(layer)] for layer in range(num_layers)])
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.wrong("layer_types", kinds, f"a list of {num_layers} kinds of attention")
    if unknown := [each for each in kinds if each not in known]:
        raise config.refuse(f"attention {shown(unknown[0])} ({kind} and full_attention are)")
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def sparse_layers(config: HfConfig) -> tuple[int, ...]:
    """Returns the MoE layers' ids of Qwen models: every decoder_sparse_step-th but those of mlp_only_layers."""
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    step = config.size("decoder_sparse_step", default=1)
    dense_only = config.sizes("mlp_only_layers", below=num_layers)
    return tuple(layer for layer in range(num_layers) if layer not in dense_only and (layer + 1) % step == 0)


def moe_layers_behind_dense_ones(config: HfConfig) -> tuple[int, ...]:
    """Returns the MoE layers' ids where the first layers are dense, as many as config.json says."""
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    return tuple(range(min(config.size("first_k_dense_replace", minimum=0), num_layers), num_layers))


def dense_width(config: HfConfig, moe_layer_ids: Sequence[int], key: str = "intermediate_size") -> int:
    """Returns the width of the MLP of layers without experts; 0 where all have experts."""
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    return config.size(key) if len(moe_layer_ids) < num_layers else 0


def deepseek_v3_router(config: HfConfig) -> RouterSpec:
    """Returns the router of DeepSeek-V3 and those who took it over."""
    return RouterSpec(
        num_logical=config.size("n_routed_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        norm_topk=config.flag("norm_topk_prob"),
        scaling=config.positive("routed_scaling_factor"),
        num_groups=config.size("n_group", default=1),
        topk_groups=config.size("topk_group", default=1),
        has_bias=True,
        norm_eps=1e-20,
    )
