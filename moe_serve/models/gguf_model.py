"""What a GGUF file says of its model, in the terms of a Hugging Face folder: its config.json, and its tensors' names.

The metadata and names are those that llama.cpp's converter (convert_hf_to_gguf.py, and its folder conversion/) writes,
and values that a file leaves out are those that llama.cpp takes. The converter changes tensors of some families:

- Experts lie together by matrix, [E, n, k]. Here each one is a tensor of its own, whose bytes are a piece of the file.
- Rows of queries and keys are reordered where llama.cpp rotates adjacent pairs but the family's code pairs halves of a
  head (Mixtral, Granite). That is the order that our decoder takes, so the model is said to rotate adjacent pairs.
- MLA's projection from latents to heads is split in two, and that of keys transposed (`weight_plan.py`).
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError
from moe_serve.models.gguf_file import GgufHeader, read_gguf
from moe_serve.models.model_files import shown
from moe_serve.models.spec import ExpertNames, GqaSpec, MlaSpec, ModelSpec
from moe_serve.models.stored_tensor import StoredTensor

TOKENS = "tokenizer.ggml.tokens"

# Tokens that end an answer by their text, since files name only one or two by id: as llama.cpp finds them.
_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    ]
)

_OF_LAYER = {  # below blk.N: below model.layers.N, where the names are the default ones of ExpertNames
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "output_norm.weight": "model.norm.weight",
}
_DIVISORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)\.(weight|bias)")
_MOST_EXPERTS = 1 << 20  # of all matrices together


@dataclass(frozen=True)
class GgufModel:
    """config: as in config.json, of a family's model_type;  tensors: by the names of Hugging Face checkpoints

    divisors: of the frequency of each rotated pair, as the file has them; empty: none
    rotates_neighbours: whether rows of queries and keys were reordered so that pairs lie side by side
    """

    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    divisors: tuple[float, ...]
    rotates_neighbours: bool

    def as_stored(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of a family with the names and the order of this file."""
        attention, rope = spec.attention, replace(spec.rope, divisors=self.divisors or spec.rope.divisors)
        if isinstance(attention, GqaSpec):
            attention = replace(attention, norm_names=("q_norm", "k_norm"))
        elif isinstance(attention, MlaSpec):
            attention = replace(attention, splits_heads=any(name.endswith(".k_b_proj.weight") for name in self.tensors))
        kinds = {tensor.dtype_name for name, tensor in self.tensors.items() if _is_expert_matrix(name)}
        return replace(
            spec,
            attention=attention,
            rope=replace(rope, interleaved=rope.interleaved or self.rotates_neighbours),
            expert_names=ExpertNames(),
            tensor_prefix="",
            experts_in_mxfp4=kinds == {"MXFP4"},
        )


def _is_expert_matrix(name: str) -> bool:
    return ".mlp.experts." in name and name.endswith(".weight")


def read_gguf_model(path: Path) -> GgufModel:
    """Returns a model by its GGUF file. Raises ModelError for a damaged file, and for one whose model is not served."""
    header = read_gguf(path, lists=(TOKENS,))
    told = _Metadata(header)
    arch = told.text("general.architecture")
    family = _ARCHITECTURES.get(arch)
    if family is None:
        raise ModelError(
            f"{path}: holds a model of the architecture {shown(arch)}, which is not served from GGUF; served are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    config = {key: value for key, value in {**told.common(), **family.config(told)}.items() if value is not None}
    return GgufModel(config, gguf_tensors(header), _divisors(header), family.reordered)


def gguf_tensors(header: GgufHeader) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by the names that Hugging Face checkpoints have; unknown ones keep theirs."""
    tensors: dict[str, StoredTensor] = {}
    num_experts = 0
    for name, tensor in header.tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            if name != _DIVISORS:
                tensors[_WHOLE_NAMES.get(name, name)] = tensor
            continue
        layer, part, kind = f"model.layers.{int(found[1])}.", found[2], found[3]
        if part in _OF_EXPERTS and len(tensor.shape) == (3 if kind == "weight" else 2):
            num_experts += tensor.shape[0]
            if num_experts > _MOST_EXPERTS:
                raise ModelError(f"{header.path}: has more than {_MOST_EXPERTS} experts; download the file again")
            tensors.update(_experts(tensor, f"{layer}mlp.experts.{{e}}.{_OF_EXPERTS[part]}.{kind}"))
        elif part == "ffn_gate_up_exps":
            tensors[layer + "mlp.experts.gate_up_proj"] = tensor
        elif part == "attn_sinks":
            tensors[layer + "self_attn.sinks"] = tensor
        elif part == "exp_probs_b":  # which some files have as [1, E]
            tensors[layer + "mlp.gate.e_score_correction_bias"] = replace(tensor, shape=tensor.shape[-1:])
        else:
            shape = (1, *tensor.shape) if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
            tensors[f"{layer}{_OF_LAYER.get(part, part)}.{kind}"] = replace(tensor, shape=shape)
    return tensors


def _experts(tensor: StoredTensor, template: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yields each expert of a tensor [E, ..], which is one piece of its bytes."""
    count, *shape = tensor.shape
    num_bytes = tensor.num_bytes // count
    for expert in range(count):
        start = tensor.start + expert * num_bytes
        place = replace(tensor, shape=tuple(shape), start=start, num_bytes=num_bytes)
        yield template.format(e=expert), place


def _divisors(header: GgufHeader) -> tuple[float, ...]:
    """Returns the divisors of frequencies, of which llama3's rotations are made."""
    tensor = header.tensors.get(_DIVISORS)
    if tensor is None:
        return ()
    if tensor.dtype_name != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
        raise ModelError(f"{tensor.path}: {_DIVISORS} is {tensor.dtype_name} {list(tensor.shape)}; convert it again")
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        values = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes))
    if not all(0 < value < 1e9 for value in values):
        raise ModelError(f"{tensor.path}: {_DIVISORS} holds numbers that are not above 0; convert the model again")
    return values


# ---- metadata


class _Metadata:
    """The metadata of a file, whose missing and ill-typed entries raise ModelErrors that name the file and the key."""

    def __init__(self, header: GgufHeader):
        self.path = header.path
        self.tensors = header.tensors
        self._values = header.metadata

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Returns the whole number under a key of the architecture, which may be a list that repeats it by layer."""
        value = self._of_architecture(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or value < 0:
            raise self.wrong(key, value, "a whole number, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._of_architecture(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return _shortest(value)

    def given(self, key: str) -> Any:
        """Returns the value under a key of the architecture, None without one."""
        return self._of_architecture(key, None)

    def flag(self, key: str, default: bool) -> bool:
        value = self._of_architecture(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def has(self, *names: str) -> bool:
        """Returns whether the file has one of these tensors of the first layer."""
        return any(f"blk.0.{name}" in self.tensors for name in names)

    def rows(self, name: str) -> int:
        """Returns the rows of a tensor of the whole model."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: has no tensor {name}; download the file again")
        return self.tensors[name].shape[0]

    def layers_with(self, name: str) -> list[int]:
        """Returns the layers that have a tensor."""
        found = (re.fullmatch(rf"blk\.(\d{{1,4}})\.{re.escape(name)}", each) for each in self.tensors)
        return sorted(int(each[1]) for each in found if each is not None)

    def common(self) -> dict[str, Any]:
        """Returns the keys of config.json that every family has."""
        heads = self.size("attention.head_count")
        return {
            "architectures": [f"GGUF {self.text('general.architecture')}"],
            "vocab_size": self.rows("token_embd.weight"),
            "hidden_size": self.size("embedding_length"),
            "intermediate_size": self.size("feed_forward_length", 0),
            "num_hidden_layers": self.size("block_count") - self.size("nextn_predict_layers", 0),
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("attention.head_count_kv", heads),
            "head_dim": self.given("attention.key_length"),
            "max_position_embeddings": self.size("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "num_experts_per_tok": self.size("expert_used_count"),
            "rope_parameters": self.rope(),
            "attention_bias": self.has("attn_q.bias"),
            "eos_token_id": self._ends(),
            "dtype": "bfloat16" if self.tensors["token_embd.weight"].dtype_name == "BF16" else "float32",
        }

    @property
    def num_experts(self) -> int:
        count = self.size("expert_count", 0)
        if not count:
            raise ModelError(
                f"{self.path}: holds a model without experts (expert_count 0), and only Mixture-of-Experts models are "
                "served; give another file"
            )
        return count

    @property
    def head_dim(self) -> int:
        return self.size("attention.key_length", self.size("embedding_length") // self.size("attention.head_count"))

    def rope(self) -> dict[str, Any]:
        """Returns rope_parameters of config.json."""
        theta = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        kind = self.given("rope.scaling.type") or "none"
        if kind == "none":
            return {"rope_type": "default", **theta}
        if kind not in ("linear", "yarn"):
            raise self.wrong("rope.scaling.type", kind, "none, linear or yarn")
        scaled = {"rope_type": kind, "factor": self.number("rope.scaling.factor"), **theta}
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = self.size("rope.scaling.original_context_length")
            scaled["beta_fast"] = self.number("rope.scaling.yarn_beta_fast", 32.0)
            scaled["beta_slow"] = self.number("rope.scaling.yarn_beta_slow", 1.0)
            if self.given("rope.scaling.yarn_attn_factor") is not None:
                scaled["attention_factor"] = self.number("rope.scaling.yarn_attn_factor")
        return scaled

    def _ends(self) -> list[int]:
        """Returns the ids of tokens that end an answer: those that the file names, and those known by their text."""
        tokens = self._values.get(TOKENS, [])
        if not isinstance(tokens, list):
            raise self.wrong(TOKENS, tokens, "a list of texts")
        named = (self._values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        by_text = (token_id for token_id, text in enumerate(tokens) if text in _ENDS)
        return list(dict.fromkeys([*(each for each in named if each is not None), *by_text]))

    def _of_architecture(self, key: str, default: Any) -> Any:
        return self._values.get(f"{self.text('general.architecture')}.{key}", default)

    def wrong(self, key: str, value: object, expected: str) -> ModelError:
        """Returns the error that a value is not what is expected."""
        return ModelError(
            f"{self.path}: the metadata {key} is {shown(value)}, expected {expected}; download or convert it again"
        )


def _shortest(value: float) -> float:
    """Returns the number of fewest decimals that a float32 stands for, such as 1e-06: what config.json had."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except (OverflowError, ValueError):
            break
    return value


# ---- architectures


@dataclass(frozen=True)
class _Architecture:
    """config: the keys of config.json that the family has beside the common ones

    reordered: whether the converter reorders rows of queries and keys
    """

    config: Callable[[_Metadata], Mapping[str, Any]]
    reordered: bool = False


def _mixtral(told: _Metadata) -> dict[str, Any]:
    _whole_heads_rotate(told)
    return {
        "model_type": "mixtral",
        "num_local_experts": told.num_experts,
        "sliding_window": told.given("attention.sliding_window"),
    }


def _qwen(told: _Metadata) -> dict[str, Any]:
    _whole_heads_rotate(told)
    return {"num_experts": told.num_experts, "moe_intermediate_size": told.size("expert_feed_forward_length")}


def _qwen2(told: _Metadata) -> dict[str, Any]:
    shared = told.tensors.get("blk.0.ffn_gate_shexp.weight")
    return _qwen(told) | {
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "qkv_bias": told.has("attn_q.bias"),
        "shared_expert_intermediate_size": told.size(
            "expert_shared_feed_forward_length", 0 if shared is None else shared.shape[0]
        ),
    }


def _qwen3(told: _Metadata) -> dict[str, Any]:
    return _qwen(told) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def _whole_heads_rotate(told: _Metadata) -> None:
    rotated = told.size("rope.dimension_count", told.head_dim)
    if rotated != told.head_dim:
        raise ModelError(
            f"{told.path}: rotates {rotated} of {told.head_dim} elements of a head, which this architecture does not; "
            "convert it again"
        )


def _olmoe(told: _Metadata) -> dict[str, Any]:
    _whole_heads_rotate(told)
    return {
        "model_type": "olmoe",
        "num_experts": told.num_experts,
        "norm_topk_prob": False,
        "clip_qkv": told.given("attention.clamp_kqv"),
    }


def _granite(told: _Metadata) -> dict[str, Any]:
    _whole_heads_rotate(told)
    shared = told.size("expert_shared_feed_forward_length", 0)
    return {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": told.num_experts,
        "shared_intermediate_size": shared,
        "attention_multiplier": told.number("attention.scale", told.head_dim**-0.5),
        "embedding_multiplier": told.number("embedding_scale", 1.0),
        "residual_multiplier": told.number("residual_scale", 1.0),
        "logits_scaling": told.number("logit_scale", 1.0),
    }


_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


def _deepseek2(told: _Metadata) -> dict[str, Any]:
    """DeepSeek-V2, V3, R1 and Kimi-K2, whose files have one architecture."""
    usual = _SIGMOID if told.layers_with("exp_probs_b.bias") else _SOFTMAX  # V3 has correction biases, V2 none
    scoring = told.size("expert_gating_func", usual)
    if scoring not in (_SOFTMAX, _SIGMOID):
        raise told.wrong("expert_gating_func", scoring, "1 (softmax) or 2 (sigmoid)")
    is_v3 = scoring == _SIGMOID
    rotated, groups = told.size("rope.dimension_count"), told.size("expert_group_count", 1)
    key_width = told.size("attention.key_length_mla", told.size("attention.key_length", 0))
    v2 = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    rope = told.rope()
    if told.given("rope.scaling.yarn_log_multiplier") is not None:
        # A tenth of mscale_all_dim. Its counterpart mscale is not in the file, and published models have both equal.
        mscale = 10 * told.number("rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        **({} if is_v3 else v2),
        "rope_parameters": rope,
        "head_dim": None,
        "num_key_value_heads": told.size("attention.head_count"),
        "n_routed_experts": told.num_experts,
        "n_shared_experts": told.size("expert_shared_count", 0),
        "n_group": groups,
        "topk_group": told.size("expert_group_used_count", 1),
        "moe_intermediate_size": told.size("expert_feed_forward_length"),
        "first_k_dense_replace": told.size("leading_dense_block_count", 0),
        "norm_topk_prob": told.flag("expert_weights_norm", False),
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0),
        "q_lora_rank": told.given("attention.q_lora_rank"),
        "kv_lora_rank": told.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_width - rotated,
        "v_head_dim": told.size("attention.value_length_mla", told.size("attention.value_length", 0)),
    }


def _behind_dense_layers(told: _Metadata) -> dict[str, Any]:
    """Returns what GLM-4.5 and dots.llm1 have of DeepSeek-V3."""
    if told.size("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise told.wrong("expert_gating_func", told.given("expert_gating_func"), "2 (sigmoid)")
    return {
        "n_routed_experts": told.num_experts,
        "n_shared_experts": told.size("expert_shared_count", 0),
        "n_group": told.size("expert_group_count", 1),
        "topk_group": told.size("expert_group_used_count", 1),
        "moe_intermediate_size": told.size("expert_feed_forward_length"),
        "first_k_dense_replace": told.size("leading_dense_block_count", 0),
        "norm_topk_prob": told.flag("expert_weights_norm", False),
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0),
    }


def _glm4(told: _Metadata) -> dict[str, Any]:
    rotated = told.size("rope.dimension_count", told.head_dim // 2)
    return _behind_dense_layers(told) | {
        "model_type": "glm4_moe",
        "use_qk_norm": told.has("attn_q_norm.weight"),
        "rope_parameters": {**told.rope(), "partial_rotary_factor": rotated / max(told.head_dim, 1)},
    }


def _dots1(told: _Metadata) -> dict[str, Any]:
    _whole_heads_rotate(told)
    return _behind_dense_layers(told) | {"model_type": "dots1", "max_window_layers": told.size("block_count")}


def _gpt_oss(told: _Metadata) -> dict[str, Any]:
    _whole_heads_rotate(told)
    rope = told.rope()
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as the model was trained
    return {
        "model_type": "gpt_oss",
        "num_local_experts": told.num_experts,
        "intermediate_size": told.size("expert_feed_forward_length"),
        "sliding_window": told.size("attention.sliding_window"),
        "rope_parameters": rope,
    }


def _llama4(told: _Metadata) -> dict[str, Any]:
    """What no file says is as llama.cpp has it: chunks, layers without rotation, temperature, norms but in Maverick."""
    _whole_heads_rotate(told)
    if told.given("attention.sliding_window") == 0:
        raise told.wrong("attention.sliding_window", 0, "none: models without chunks are not served")
    layers = told.size("block_count")
    return {
        "model_type": "llama4_text",
        "num_local_experts": told.num_experts,
        "intermediate_size": told.size("expert_feed_forward_length"),
        "intermediate_size_mlp": told.size("feed_forward_length"),
        "moe_layers": [layer for layer in told.layers_with("ffn_gate_inp.weight") if layer < layers],
        "use_qk_norm": told.num_experts != 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _minimax_m2(told: _Metadata) -> dict[str, Any]:
    if told.size("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise told.wrong("expert_gating_func", told.given("expert_gating_func"), "2 (sigmoid)")
    return {
        "model_type": "minimax_m2",
        "num_local_experts": told.num_experts,
        "intermediate_size": told.size("expert_feed_forward_length"),
        "rotary_dim": told.size("rope.dimension_count", told.head_dim),
    }


def _hunyuan(told: _Metadata) -> dict[str, Any]:
    """The theta of a file is stretched already."""
    _whole_heads_rotate(told)
    width = told.size("expert_feed_forward_length")
    if (shared := told.size("expert_shared_feed_forward_length", width)) != width:
        raise told.wrong("expert_shared_feed_forward_length", shared, f"that of the experts, {width}")
    return {
        "model_type": "hunyuan_v1_moe",
        "num_experts": told.num_experts,
        "intermediate_size": width,
        "rope_parameters": {"rope_type": "default", "rope_theta": told.number("rope.freq_base", 10000.0)},
    }


def _ernie(told: _Metadata) -> dict[str, Any]:
    _whole_heads_rotate(told)
    shared = told.tensors.get(f"blk.{told.size('block_count') - 1}.ffn_up_shexp.weight")
    width = told.size("expert_feed_forward_length")
    if shared is not None and shared.shape[0] % max(width, 1):
        raise told.wrong("expert_feed_forward_length", width, f"a divisor of the shared experts', {shared.shape[0]}")
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": told.num_experts,
        "moe_k": told.size("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": 0 if shared is None else shared.shape[0] // width,
        "moe_layer_start_index": told.size("leading_dense_block_count", 0),
        "moe_layer_interval": told.size("interleave_moe_layer_step", 1),
        "moe_layer_end_index": max(told.layers_with("ffn_gate_inp.weight"), default=-1),
    }


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(_mixtral, reordered=True),
    "qwen2moe": _Architecture(_qwen2),
    "qwen3moe": _Architecture(_qwen3),
    "olmoe": _Architecture(_olmoe),
    "granitemoe": _Architecture(_granite, reordered=True),
    "deepseek2": _Architecture(_deepseek2),
    "glm4moe": _Architecture(_glm4),
    "dots1": _Architecture(_dots1),
    "gpt-oss": _Architecture(_gpt_oss),
    "llama4": _Architecture(_llama4),
    "minimax-m2": _Architecture(_minimax_m2),
    "hunyuan-moe": _Architecture(_hunyuan),
    "ernie4_5-moe": _Architecture(_ernie),
}
