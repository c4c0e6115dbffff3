"""How the weights of a checkpoint are coded, as `quantization_config` in config.json says it for every family.

Which tensors have scales is seen in the files, so lists of ignored modules are not read. Activations are not quantised,
whatever is said of them.
"""

from collections.abc import Mapping
from typing import Any

from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, Fp8Block
from moe_serve.models.hf_config import LARGEST_SIZE, HfConfig
from moe_serve.models.model_files import shown


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
