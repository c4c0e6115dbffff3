"""DeepSeek-V4: several residual streams, attention to a window and to entries of groups of tokens, and layers in which
a token's id chooses its experts.

A config.json has the keys of transformers, or those of its authors, which transformers reads into them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from moe_serve.kernels.forms import Activation, RouterSpec
from moe_serve.models.families.common import model_of, read_rope
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.spec import (
    CompressedSpec,
    ExpertNames,
    IndexerSpec,
    ModelSpec,
    NormNames,
    RopeSpec,
    StreamsSpec,
)

_WINDOW, _INDEXED, _GROUPED = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KIND_OF_RATIO = {0: _WINDOW, 4: _INDEXED, 128: _GROUPED}
_ONLY = {
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "attention_bias": False, "mlp_bias": False,
    "num_key_value_heads": 1, "n_shared_experts": 1,
}  # fmt: skip
_SHARE = "partial_rotary_factor"
_MOST_TOGETHER = 512  # tokens of a group, and streams of a residual, that the kernels take
_MOST_STREAMS = 8


def read(config: HfConfig) -> ModelSpec:
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):  # transformers keeps expert_dtype when it saves what it has dequantised
        for experts in (config.get("expert_dtype"), quantization.get("expert_dtype")):
            if experts not in (None, "fp8"):
                raise config.refuse(
                    f"expert_dtype {shown(experts)} (a checkpoint in bfloat16 is: load the published one with "
                    "dequantize=True in transformers, and save it)"
                )
    for key, value in _ONLY.items():
        config.only(key, value)
    num_layers = config.num_layers
    attention = _attention(config, _kinds(config))
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        choosing = tuple(range(min(config.size("num_hash_layers", default=3, minimum=0), num_layers)))
    else:
        if not _is_list_of(kinds, num_layers, ("hash_moe", "moe")):
            raise config.wrong("mlp_layer_types", kinds, f'a list of {num_layers}, each "hash_moe" or "moe"')
        choosing = tuple(layer for layer, kind in enumerate(kinds) if kind == "hash_moe")
    router = RouterSpec(
        num_logical=config.size("n_routed_experts", "num_local_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sqrt_softplus",
        scaling=config.positive("routed_scaling_factor"),
        has_bias=True,
        norm_eps=1e-20,
    )
    width = config.size("moe_intermediate_size")
    main, compressed = _ropes(config, attention)
    return replace(
        model_of(config, attention, router, width, rope=compressed),
        windowed_rope=main,
        shared_intermediate=width,
        activation=Activation("clamped_silu", limit=config.positive("swiglu_limit")),
        streams=StreamsSpec(
            config.size("hc_mult", largest=_MOST_STREAMS),
            config.size("hc_sinkhorn_iters", largest=1000),
            config.positive("hc_eps"),
        ),
        choosing_layer_ids=choosing,
        expert_names=ExpertNames(
            block="ffn", gate="w1", up="w3", down="w2", router_bias="gate.bias", shared="ffn.shared_experts"
        ),
        norm_names=NormNames(input="attn_norm", post="ffn_norm"),
        head_name="head",
    )


def _kinds(config: HfConfig) -> list[str]:
    """Returns the kind of each layer's attention."""
    num_layers, kinds, ratios = config.num_layers, config.get("layer_types"), config.get("compress_ratios")
    if kinds is None and ratios is not None:
        if not isinstance(ratios, list) or any(type(each) is not int or each not in _KIND_OF_RATIO for each in ratios):
            raise config.wrong("compress_ratios", ratios, "a list of 0, 4 and 128")
        if len(ratios) < num_layers:  # those behind the last layer are of layers that predict tokens
            raise config.wrong("compress_ratios", ratios, f"a list of at least {num_layers}, one of each layer")
        kinds = [_KIND_OF_RATIO[each] for each in ratios[:num_layers]]
    if kinds is None:
        kinds = [_INDEXED if layer > 1 and layer % 2 else _GROUPED for layer in range(num_layers)]
    if not _is_list_of(kinds, num_layers, tuple(_KIND_OF_RATIO.values())):
        raise config.wrong("layer_types", kinds, f"a list of {num_layers} kinds of attention of DeepSeek-V4")
    return kinds


def _is_list_of(kinds: Any, number: int, known: tuple[str, ...]) -> TypeGuard[list[str]]:
    return isinstance(kinds, list) and len(kinds) == number and all(kind in known for kind in kinds)


def _attention(config: HfConfig, kinds: list[str]) -> CompressedSpec:
    given = config.get("compress_rates", {})
    if not isinstance(given, Mapping):
        raise config.wrong("compress_rates", given, "an object")
    rates = HfConfig({_INDEXED: 4, _GROUPED: 128, **given}, config.where)
    every = {_WINDOW: 0}
    for kind, key in ((_INDEXED, "compress_rate_csa"), (_GROUPED, "compress_rate_hca")):
        every[kind] = config.size(key, default=rates.size(kind, largest=_MOST_TOGETHER), largest=_MOST_TOGETHER)
    num_heads, head_dim, num_groups = (config.size(key) for key in ("num_attention_heads", "head_dim", "o_groups"))
    if num_heads * head_dim % num_groups:
        raise config.wrong("o_groups", num_groups, f"a divisor of all heads' {num_heads * head_dim} columns")
    rope_dim = _rotated(config, head_dim)
    indexer = IndexerSpec(config.size("index_n_heads"), config.size("index_head_dim"), config.size("index_topk"))
    if rope_dim > head_dim or rope_dim > indexer.width:
        widths = f"head_dim, {head_dim}, and index_head_dim, {indexer.width}"
        raise config.wrong("qk_rope_head_dim", rope_dim, f"at most {widths}")
    return CompressedSpec(
        num_heads,
        head_dim,
        rope_dim,
        q_lora_rank=config.size("q_lora_rank"),
        window=config.size("sliding_window"),
        every=tuple(every[kind] for kind in kinds),
        indexed_layer_ids=tuple(layer for layer, kind in enumerate(kinds) if kind == _INDEXED),
        indexer=indexer,
        num_groups=num_groups,
        group_rank=config.size("o_lora_rank"),
    )


def _rotated(config: HfConfig, head_dim: int) -> int:
    """Returns how many elements of a head are rotated: partial_rotary_factor is read before the authors' own key."""
    share = config.size("qk_rope_head_dim", default=64) / (head_dim if config.get("qk_rope_head_dim") else 512)
    share = config.positive(_SHARE, share)
    if share > 1:
        raise config.wrong(_SHARE, share, "at most 1")
    return int(head_dim * share)


def _ropes(config: HfConfig, attention: CompressedSpec) -> tuple[RopeSpec, RopeSpec]:
    """Returns the rotations of layers that have the window alone, and of the others, where YaRN scales no cosine."""
    given, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    if given and scaling:  # transformers reads rope_scaling alone
        raise config.refuse(f"rope_scaling {shown(scaling)} beside rope_parameters")
    given = given or scaling or {}
    if not isinstance(given, Mapping):
        raise config.wrong("rope_parameters", given, "an object")
    main, compress = given.get("main"), given.get("compress")
    if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
        rest = {key: value for key, value in given.items() if key not in ("main", "compress")}
        main = {"rope_theta": config.positive("rope_theta")}
        compress = {"attention_factor": 1.0, **rest, "rope_theta": config.positive("compress_rope_theta")}
    elif main.get(_SHARE) is None or compress.get(_SHARE) is None:  # transformers would rotate whole heads
        raise config.refuse(f"rope_parameters without {_SHARE} of each kind")
    return _rope(config, attention.rope_dim, main), _rope(config, attention.rope_dim, compress)


def _rope(config: HfConfig, dim: int, given: Mapping[str, Any]) -> RopeSpec:
    head_dim, of_all = config.size("head_dim"), {key: value for key, value in config.values.items() if key != _SHARE}
    of_kind = HfConfig({**of_all, "rope_scaling": None, "rope_parameters": given}, config.where)
    rope = read_rope(of_kind, head_dim, interleaved=True, rotated=dim)
    if rope.dim != dim:
        raise config.refuse(f"{_SHARE} of the rotations, {rope.dim / head_dim:g}, beside another of the model")
    return rope


READERS = {"deepseek_v4": read}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v4": {
        "compress_rope_theta": 160000.0,
        "eos_token_id": 1,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "num_experts_per_tok": 6,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "swiglu_limit": 10.0,
    }
}
