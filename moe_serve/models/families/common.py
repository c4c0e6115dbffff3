"""The parts of a config.json that several families share, and the model made of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import PER_CHANNEL, PER_TENSOR, Fp8Block, RouterSpec
from moe_serve.models.hf_config import LARGEST_SIZE, LONGEST_CONTEXT, HfConfig, is_positive
from moe_serve.models.model_files import shown
from moe_serve.models.spec import (
    CompressedSpec,
    ExpertNames,
    GqaSpec,
    IntegerCoding,
    LongRopeSpec,
    MlaSpec,
    ModelSpec,
    RopeSpec,
    YarnSpec,
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
WIDEST_HEAD = 256  # of layers with a state, that the kernels' buffers hold
NO_ROPE = RopeSpec(dim=2, theta=1e4, interleaved=True, rotates=False)
W1_W3_W2 = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")  # as Mixtral's


def model_of(
    config: HfConfig,
    attention: GqaSpec | MlaSpec | CompressedSpec,
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
        rope = read_rope(config, attention.head_dim)
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
        integers=integer_coding(config),
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
    if not head_dim:
        raise config.wrong("num_attention_heads", num_heads, "at most hidden_size")
    return GqaSpec(num_heads, num_kv_heads, head_dim)


def within_longest_context(config: HfConfig) -> HfConfig:
    """Returns the configuration with at most as many positions as a server knows the rotations of.

    Some models say ten million tokens.
    """
    longest = min(config.size("max_position_embeddings", largest=LARGEST_SIZE), LONGEST_CONTEXT)
    return HfConfig({**config.values, "max_position_embeddings": longest}, config.where)


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


def stateful_layers(config: HfConfig, kind: str, is_usual: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns the layers of a kind that keeps a state, as layers_of_kind. Raises ModelError where all of them are."""
    found = layers_of_kind(config, kind, is_usual)
    if len(found) == config.num_layers:
        raise config.refuse("a model without a layer of full_attention")
    return found


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


def moe_layers_of_list(config: HfConfig, num_dense: int) -> tuple[int, ...]:
    """Returns the MoE layers' ids: those that mlp_layer_types calls sparse; without it, all behind the first ones.

    num_dense: how many of the first layers are dense where mlp_layer_types is missing
    """
    num_layers = config.num_layers
    kinds = config.get("mlp_layer_types", [("dense", "sparse")[layer >= num_dense] for layer in range(num_layers)])
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise config.wrong("mlp_layer_types", kinds, f'a list of {num_layers}, each "dense" or "sparse"')
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def num_predictors(config: HfConfig) -> int:
    """Returns how many layers for multi-token prediction config.json names, in DeepSeek-V3's key."""
    return config.size("num_nextn_predict_layers", default=0, minimum=0)


def dense_width(config: HfConfig, moe_layer_ids: Sequence[int], key: str = "intermediate_size") -> int:
    """Returns the width of the MLP of layers without experts; 0 where all have experts."""
    return config.size(key) if len(moe_layer_ids) < config.num_layers else 0


def softmax_router(config: HfConfig) -> RouterSpec:
    """Returns the router of OLMoE and Qwen."""
    return RouterSpec(
        num_logical=config.size("num_experts", "num_local_experts"),
        topk=config.size("num_experts_per_tok"),
        norm_topk=config.flag("norm_topk_prob"),
    )


def deepseek_v3_router(config: HfConfig, experts: str = "n_routed_experts") -> RouterSpec:
    """Returns the router of DeepSeek-V3, which other families use, too. experts: the key of their number"""
    return RouterSpec(
        num_logical=config.size(experts),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        norm_topk=config.flag("norm_topk_prob"),
        scaling=config.positive("routed_scaling_factor"),
        num_groups=config.size("n_group", default=1),
        topk_groups=config.size("topk_group", default=1),
        has_bias=True,
        norm_eps=1e-20,
    )


# ---- rotary embedding: arXiv:2104.09864
# YaRN: arXiv:2309.00071; DeepSeek's mscale_all_dim also scales the softmax.


def read_rope(
    config: HfConfig,
    dim: int,
    interleaved: bool = False,
    rotated: int | None = None,
    may_be_long: bool = False,
) -> RopeSpec:
    """Returns the rotary embedding of a config.json, with old (rope_theta, rope_scaling) or new (rope_parameters) keys.

    dim: width of a head that may be rotated
    interleaved: whether the two of a pair lie side by side; else half a head apart
    rotated: how much of it is where config.json gives no share of it; None: always all of it
    may_be_long: whether the family knows LongRoPE
    Raises ModelError for a kind that is not ROPE_TYPES, and for missing or impossible numbers.
    """
    values, where = config.values, config.where
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{where}: rope_parameters is {shown(given)}, expected an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES and not (may_be_long and kind == "longrope"):
        raise ModelError(f"{where}: rope_type {shown(kind)} is not supported; supported are {', '.join(ROPE_TYPES)}")
    dim = _rotated(given, values, dim, where, rotated)
    if dim < 2 or dim % 2:
        raise ModelError(f"{where}: the rotated head width is {dim}; it must be even, and at least 2")
    theta = _number(given, "rope_theta", where, default=_number(values, "rope_theta", where, default=10000.0))
    if theta <= 1:
        raise ModelError(f"{where}: rope_theta of the rotary embedding is {theta:g}, expected a number above 1")
    if kind == "default":
        return RopeSpec(dim, theta, interleaved)
    if kind == "linear":
        return RopeSpec(dim, theta, interleaved, linear_factor=_number(given, "factor", where))
    if kind == "llama3":
        return replace(RopeSpec(dim, theta, interleaved), divisors=_llama3_divisors(given, dim, theta, where))
    if kind == "longrope":
        return _read_long(given, RopeSpec(dim, theta, interleaved), where)
    return _read_yarn(given, values, dim, theta, interleaved, where)


def ropes_by_kind(
    config: HfConfig, attention: GqaSpec, thetas: Mapping[str, float], rotated: int | None = None
) -> tuple[RopeSpec, RopeSpec | None]:
    """Returns the rotations of full layers and of windowed ones, where there are any; rope_parameters has both by kind.

    thetas: by kind, where rope_parameters is missing;  rotated: as of read_rope
    Raises ModelError as read_rope does, and for a rope_scaling, which would say nothing of kinds.
    """
    key, scaling = "partial_rotary_factor", config.get("rope_scaling", {})
    if not isinstance(scaling, Mapping) or any(value != "default" for value in scaling.values()):
        raise config.refuse(f"rope_scaling {shown(scaling)} beside rotations by kind of layer (in rope_parameters)")
    given, outer = config.get("rope_parameters"), dict(config.values)
    if given is None:
        given = {kind: {"rope_theta": theta} for kind, theta in thetas.items()}
    else:
        outer.pop(key, None)  # transformers reads that of the kind alone
    kinds = ("full_attention", "sliding_attention") if attention.windowed_layer_ids else ("full_attention",)
    found = []
    for kind in kinds:
        of_kind = given.get(kind) if isinstance(given, Mapping) else None
        if not isinstance(of_kind, Mapping) or "rope_theta" not in of_kind:
            raise config.wrong("rope_parameters", given, f"an object with the rope_theta of {' and of '.join(kinds)}")
        name = of_kind.get("rope_type") or of_kind.get("type") or "default"
        if name != "default" and key not in of_kind and rotated not in (None, attention.head_dim):
            raise config.refuse(f"rope_type {shown(name)} without {key}")  # transformers would rotate all of a head
        of_kind_alone = HfConfig({**outer, "rope_scaling": None, "rope_parameters": of_kind}, config.where)
        found.append(read_rope(of_kind_alone, attention.head_dim, rotated=rotated))
    return found[0], found[1] if len(kinds) > 1 else None


def _rotated(given: Mapping[str, Any], values: Mapping[str, Any], dim: int, where: str, default: int | None) -> int:
    """Returns how many elements of a head are rotated."""
    key = "partial_rotary_factor"
    share = next((each[key] for each in (given, values) if each.get(key) is not None), None)
    if share is None:
        return dim if default is None else default
    partial = _number({key: share}, key, where)
    if default is None and partial != 1.0:
        raise ModelError(f"{where}: {key} {shown(partial)} is not supported; only 1.0 is")
    if partial > 1 or int(dim * partial) < 1:
        raise ModelError(
            f"{where}: {key} of the rotary embedding is {partial:g}, expected at most 1 and enough to rotate"
        )
    return int(dim * partial)


def _llama3_divisors(given: Mapping[str, Any], dim: int, theta: float, where: str) -> tuple[float, ...]:
    """Returns Llama 3's divisors: long waves are stretched by the factor, short ones kept, those between in part."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (_number(given, key, where) for key in keys)
    divisors = []
    for pair in range(dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / dim))  # over the original context
        kept = (turns - low) / (high - low) if low < turns < high else float(turns >= high)
        divisors.append(1 / (kept + (1 - kept) / factor))
    return tuple(divisors)


def _read_long(given: Mapping[str, Any], rope: RopeSpec, where: str) -> RopeSpec:
    key = "original_max_position_embeddings"
    original = _number(given, key, where)
    divisors = []
    for key in ("short_factor", "long_factor"):
        numbers = given.get(key)
        if not isinstance(numbers, list) or len(numbers) != rope.dim // 2:
            raise ModelError(f"{where}: {key} of the rotary embedding: expected a list of {rope.dim // 2} numbers")
        divisors.append(tuple(_number({key: number}, key, where) for number in numbers))
    long = LongRopeSpec(
        original_max_position=int(original),
        short_divisors=divisors[0],
        long_divisors=divisors[1],
        short_factor=_number(given, "short_mscale", where),
        long_factor=_number(given, "long_mscale", where),
    )
    return replace(rope, long=long).in_context(int(original))


def _read_yarn(
    given: Mapping[str, Any], values: Mapping[str, Any], dim: int, theta: float, interleaved: bool, where: str
) -> RopeSpec:
    longest = _number(values, "max_position_embeddings", where)
    original = _number(given, "original_max_position_embeddings", where, default=longest)
    factor = _number(given, "factor", where, default=longest / original)
    if original < 1 or factor < 1:
        raise ModelError(
            f"{where}: original_max_position_embeddings {original:g} and factor {factor:g} of the rotary embedding: "
            "expected at least 1"
        )
    # 0 means the same as none
    mscale, mscale_all = (
        _number(given, key, where) if given.get(key) else None for key in ("mscale", "mscale_all_dim")
    )
    for key, number in (("mscale", mscale), ("mscale_all_dim", mscale_all)):
        if number and number > 1e6:  # real ones are near 1; its square scales the softmax
            raise ModelError(f"{where}: {key} of the rotary embedding is {number:g}, expected at most 1e6")
    unscaled = mscale_of(factor, 1.0)
    if mscale and mscale_all:
        unscaled = mscale_of(factor, mscale) / mscale_of(factor, mscale_all)
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"{where}: truncate of the rotary embedding is {shown(truncate)}, expected true or false")
    return RopeSpec(
        dim,
        theta,
        interleaved,
        yarn=YarnSpec(
            factor=factor,
            original_max_position=int(original),
            beta_fast=_number(given, "beta_fast", where, default=32.0),
            beta_slow=_number(given, "beta_slow", where, default=1.0),
            truncate=truncate,
        ),
        table_factor=_number(given, "attention_factor", where, default=unscaled),
        softmax_factor=mscale_of(factor, mscale_all) ** 2 if mscale_all else 1.0,
    )


def mscale_of(factor: float, mscale: float) -> float:
    """Returns YaRN's attention temperature for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(values: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_positive(value):
        raise ModelError(f"{where}: {key} of the rotary embedding is {shown(value)}, expected a number above 0")
    return float(value)


# ---- quantization_config
# Which tensors have scales is seen in the files, so lists of ignored modules are not read. Activations are not
# quantised, whatever the configuration says of them.


def fp8_block(config: HfConfig) -> Fp8Block | None:
    """Returns what shares a scale in an FP8 checkpoint; None where weights are not quantised, or in MXFP4."""
    quantization = _quantization(config)
    if not quantization or is_mxfp4(config) or integer_coding(config) is not None:
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


def integer_coding(config: HfConfig) -> IntegerCoding | None:
    """Returns how matrices are packed as whole numbers; None: they are not. Raises ModelError for what is not read."""
    quantization = _quantization(config)
    match quantization.get("quant_method"):
        case "gptq":
            return _gptq(config, quantization)
        case "awq":
            return _awq(config, quantization)
        case "compressed-tensors" if _is_packed(quantization):
            return _packed_integers(config, quantization)
        case _:
            return None


def _gptq(config: HfConfig, quantization: Mapping[str, Any]) -> IntegerCoding:
    offsets = {"gptq": 1, "gptq_v2": 0, None: 1}
    form = quantization.get("checkpoint_format")
    if form not in offsets or quantization.get("is_marlin_format"):
        raise config.refuse(f"GPTQ in the form {shown(form)} (gptq and gptq_v2 are)")
    modules = quantization.get("dynamic") or {}
    if not isinstance(modules, Mapping) or any(not str(name).startswith("-:") for name in modules):
        raise config.refuse(f"GPTQ with modules of their own bits (dynamic {shown(modules)})")
    coding = _coding(config, "gptq", quantization.get("bits"), quantization.get("group_size"))
    return replace(coding, act_order=quantization.get("desc_act") is True, zero_offset=offsets[form])


def _awq(config: HfConfig, quantization: Mapping[str, Any]) -> IntegerCoding:
    version = str(quantization.get("version", "gemm")).lower()
    bits = quantization.get("bits", quantization.get("w_bit"))
    if version != "gemm" or bits != 4:
        raise config.refuse(f"AWQ of {shown(bits)} bits in the form {shown(version)} (4 bits in the form gemm are)")
    return _coding(config, "awq", bits, quantization.get("group_size", quantization.get("q_group_size")))


def _is_packed(quantization: Mapping[str, Any]) -> bool:
    groups = quantization.get("config_groups")
    forms = (
        [each.get("format") for each in groups.values() if isinstance(each, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return "pack-quantized" in (quantization.get("format"), *forms)


def _packed_integers(config: HfConfig, quantization: Mapping[str, Any]) -> IntegerCoding:
    """Returns the coding of compressed-tensors in its form "pack-quantized"."""
    if transforms := quantization.get("transform_config"):
        raise config.refuse(f"compressed-tensors with transform_config {shown(transforms)}")
    weights = [_weights_of(group) for group in quantization["config_groups"].values()]
    keys = ("type", "num_bits", "strategy", "group_size", "symmetric", "actorder")
    kinds = {tuple(shown(each.get(key)) for key in keys) for each in weights}
    given = weights[0]
    if len(kinds) != 1 or given.get("type") != "int" or given.get("strategy") not in ("group", "channel"):
        raise config.refuse(
            f"compressed-tensors, pack-quantized, with weights {shown(sorted(kinds))} (only int with scales per group "
            "or channel is, the same for all groups)"
        )
    group = given.get("group_size") if given["strategy"] == "group" else None
    coding = _coding(config, "compressed", given.get("num_bits"), group)
    return replace(coding, symmetric=given.get("symmetric") is not False, act_order=given.get("actorder") == "group")


def _coding(
    config: HfConfig, method: Literal["gptq", "awq", "compressed"], bits: Any, group_size: Any
) -> IntegerCoding:
    group = None if group_size in (None, -1) else group_size
    known: dict[Any, Literal[4, 8]] = {4: 4, 8: 8}
    if type(bits) is not int or bits not in known:
        raise config.refuse(f"{method} weights of {shown(bits)} bits (4 and 8 are)")
    if group is not None and (type(group) is not int or not 1 <= group <= LARGEST_SIZE):
        raise config.wrong("group_size", group, "a whole number of at least 1, or -1 for whole rows")
    return IntegerCoding(method, known[bits], group)


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
