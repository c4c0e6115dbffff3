"""The parts of a config.json that several families share, and the model made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe_serve.ep.routing import RouterSpec
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, Fp8Block
from moe_serve.models.families.rope import read_rope
from moe_serve.models.hf_config import LARGEST_SIZE, LONGEST_CONTEXT, HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.spec import ExpertNames, GqaSpec, MlaSpec, ModelSpec, RopeSpec

W1_W3_W2 = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")  # as Mixtral's


def model_of(
    config: HfConfig,
    attention: GqaSpec | MlaSpec,
    router: RouterSpec,
    width: int,
    moe_layer_ids: tuple[int, ...] | None = None,
    rope: RopeSpec | None = None,
) -> ModelSpec:
    """Returns a model with the fields that all families share, and refuses what none of them supports.

    width:         of a routed expert
    moe_layer_ids: None: all layers
    rope:          None: all of each head is rotated, in pairs that lie half a head apart
    """
    config.only("hidden_act", "silu")
    if rope is None:
        assert isinstance(attention, GqaSpec)
        rope = read_rope(config.values, attention.head_dim, False, config.where)
    moe_layer_ids = tuple(range(config.num_layers)) if moe_layer_ids is None else moe_layer_ids
    return ModelSpec(
        model_type=str(config.get("model_type")),
        vocab_size=config.size("vocab_size"),
        hidden=config.size("hidden_size"),
        num_layers=config.num_layers,
        max_position=config.size("max_position_embeddings", largest=LONGEST_CONTEXT),
        norm_eps=config.positive("rms_norm_eps"),
        tie_embeddings=config.flag("tie_word_embeddings"),
        attention=attention,
        rope=rope,
        moe_layer_ids=moe_layer_ids,
        router=router,
        moe_intermediate=width,
        dense_intermediate=dense_width(config, moe_layer_ids),
        checkpoint_dtype=config.text("dtype", "torch_dtype"),
        fp8_block=fp8_block(config),
    )


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
    return replace(attention, window=window, windowed_layer_ids=tuple(range(config.num_layers)))


def windowed_by_layer(attention: GqaSpec, config: HfConfig, is_windowed: Callable[[int], bool]) -> GqaSpec:
    """Returns the attention with sliding windows in the layers that layer_types says; without it, as is_windowed."""
    windowed_ids = layers_of_kind(config, "sliding_attention", is_windowed)
    window = config.size("sliding_window") if windowed_ids else None
    return replace(attention, window=window, windowed_layer_ids=windowed_ids)


def layers_of_kind(config: HfConfig, kind: str, is_usual: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns the layers to which layer_types gives this kind of attention; it may give the others full_attention.

    is_usual: whether a layer is of the kind where layer_types is missing
    """
    num_layers = config.num_layers
    known = ("full_attention", kind)
    kinds = config.get("layer_types", [known[is_usual(layer)] for layer in range(num_layers)])
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.wrong("layer_types", kinds, f"a list of {num_layers} kinds of attention")
    if unknown := [each for each in kinds if each not in known]:
        raise config.refuse(f"attention {shown(unknown[0])} ({kind} and full_attention are)")
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def sparse_layers(config: HfConfig) -> tuple[int, ...]:
    """Returns the MoE layers' ids of Qwen models: every decoder_sparse_step-th but those of mlp_only_layers."""
    num_layers = config.num_layers
    step = config.size("decoder_sparse_step", default=1)
    dense_only = config.sizes("mlp_only_layers", below=num_layers)
    return tuple(layer for layer in range(num_layers) if layer not in dense_only and (layer + 1) % step == 0)


def moe_layers_behind_dense_ones(config: HfConfig) -> tuple[int, ...]:
    """Returns the MoE layers' ids where the first layers are dense, as many as config.json says."""
    num_layers = config.num_layers
    return tuple(range(min(config.size("first_k_dense_replace", minimum=0), num_layers), num_layers))


def dense_width(config: HfConfig, moe_layer_ids: Sequence[int], key: str = "intermediate_size") -> int:
    """Returns the width of the MLP of layers without experts; 0 where all have experts."""
    return config.size(key) if len(moe_layer_ids) < config.num_layers else 0


def deepseek_v3_router(config: HfConfig) -> RouterSpec:
    """Returns the router of DeepSeek-V3, which other families use, too."""
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


# ---- quantization_config
# Which tensors have scales is seen in the files, so lists of ignored modules are not read. Activations are not
# quantised, whatever the configuration says of them.


def fp8_block(config: HfConfig) -> Fp8Block | None:
    """Returns what shares a scale in an FP8 checkpoint; None where weights are not quantised, or in MXFP4."""
    quantization = _quantization(config)
    if not quantization or is_mxfp4(config):
        return None
    method, edges = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method == "compressed-tensors":
        return _compressed(config, quantization)
    if method == "fp8" and edges is None:  # as AutoFP8 writes it, and vLLM reads it
        return PER_TENSOR
    block = _square(edges)
    if method != "fp8" or block is None:
        raise config.refuse(f"quantization {shown(method)} with blocks {shown(edges)} (only fp8 with square blocks is)")
    return block


def is_mxfp4(config: HfConfig) -> bool:
    """Returns whether experts are stored in MXFP4, which gpt-oss alone is."""
    return config.get("model_type") == "gpt_oss" and _quantization(config).get("quant_method") == "mxfp4"


def _compressed(config: HfConfig, quantization: Mapping[str, Any]) -> Fp8Block:
    """Returns what shares a scale in compressed-tensors in FP8, whose weights are values times scales."""
    if transforms := quantization.get("transform_config"):
        raise config.refuse(f"compressed-tensors with transform_config {shown(transforms)}")
    groups = quantization.get("config_groups")
    weights = [_weights_of(group) for group in (groups.values() if isinstance(groups, Mapping) else ())]
    blocks = {_block_of(each) for each in weights}
    block = blocks.pop() if len(blocks) == 1 else None
    if block is None:
        keys = ("type", "num_bits", "strategy", "block_structure")
        kinds = [tuple(each.get(key) for key in keys) for each in weights]
        raise config.refuse(
            f"compressed-tensors with weights {shown(kinds)} (only float of 8 bits with scales per tensor, per channel "
            "or in square blocks is, the same for all groups; use the model's checkpoint with quant_method fp8, or the "
            "one in bfloat16)"
        )
    return block


def _weights_of(group: Any) -> Mapping[str, Any]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _block_of(weights: Mapping[str, Any]) -> Fp8Block | None:
    """Returns what shares a scale in a group of compressed-tensors; None: its weights are coded otherwise."""
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        return None
    match weights.get("strategy"):
        case "tensor":
            return PER_TENSOR
        case "channel":
            return PER_CHANNEL
        case "block":
            return _square(weights.get("block_structure"))
        case _:
            return None


def _square(edges: Any) -> Fp8Block | None:
    """Returns square blocks of [edge, edge]; None where that is not what is said."""
    if not isinstance(edges, list) or len(edges) != 2 or not all(type(edge) is int for edge in edges):
        return None
    return Fp8Block(*edges) if edges[0] == edges[1] and 1 <= edges[0] <= LARGEST_SIZE else None


def _quantization(config: HfConfig) -> Mapping[str, Any]:
    quantization = config.get("quantization_config", {})
    if not isinstance(quantization, Mapping):
        raise config.refuse(f"quantization_config {shown(quantization)}")
    return quantization
