"""config.json files: what they become, and which are refused by name."""

import json
import math
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import Fp8Block
from moe_serve.models.families.common import mscale_of
from moe_serve.models.families.registry import FAMILIES, REFUSED, read_spec
from moe_serve.models.spec import GqaSpec, MlaSpec, ModelSpec
from moe_serve.models.weight_plan import dense_parameters
from tests.models.families import LAGUNA, MIMO, MLA, QWEN, YARN
from tests.models.published import (
    DBRX,
    DEEPSEEK_V4_FLASH,
    DOTS_LLM1,
    ERNIE_45_21B,
    GLM_5,
    GLM_45,
    GLM_47_FLASH,
    GPT_OSS_20B,
    GRANITE_1B,
    HUNYUAN_A13B,
    JAMBA,
    KIMI_LINEAR_48B,
    MIMO_V2_FLASH,
    MINIMAX_M2,
    OLMOE_1B_7B,
    PHI_35_MOE,
    PUBLISHED,
)

QWEN_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 48, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "max_position_embeddings": 163840,
    "rope_theta": 10000, "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}  # fmt: skip

DEEPSEEK_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120,
    "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 160,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
    "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "group_limited_greedy", "rope_theta": 10000,
    "max_position_embeddings": 163840, "bos_token_id": 100000, "eos_token_id": 100001, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "n_routed_experts": 64, "moe_intermediate_size": 1408, "intermediate_size": 10944,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy",
}  # fmt: skip
KIMI_K2: dict[str, Any] = {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131072, "rope_theta": 50000.0, "eos_token_id": 163585, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip

V4_IN_FP4: dict[str, Any] = {
    "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                                   "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}  # fmt: skip


def total_parameters(spec: ModelSpec) -> int:
    return dense_parameters(spec) + spec.num_moe_layers * spec.num_logical * spec.expert_parameters


def folder(tmp_path: Path, config: dict[str, Any] | str, generation: dict[str, Any] | None = None) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_qwen3_30b_has_the_published_sizes(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, QWEN_30B, {"eos_token_id": [151645, 151643]}))
    assert spec.attention == GqaSpec(32, 4, 128, qk_norm="head")
    assert (spec.num_logical, spec.topk, spec.num_moe_layers) == (128, 8, 48)
    assert total_parameters(spec) == pytest.approx(30.5e9, rel=0.01)
    assert spec.expert_parameters == 3 * 2048 * 768
    assert spec.eos_token_ids == (151645, 151643)


def test_deepseek_v3_has_the_published_sizes(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, DEEPSEEK_V3))
    attention = spec.attention
    assert isinstance(attention, MlaSpec)
    assert attention.softmax_scale == pytest.approx(192**-0.5 * mscale_of(40, 1.0) ** 2)
    assert spec.rope.table_factor == 1.0
    assert spec.rope.interleaved
    assert spec.moe_layer_ids == tuple(range(3, 61))
    assert (spec.router.num_groups, spec.router.topk_groups, spec.router.has_bias) == (8, 4, True)
    assert total_parameters(spec) == pytest.approx(671e9, rel=0.005)
    assert (spec.fp8_block, spec.checkpoint_dtype) == (Fp8Block(128, 128), "bfloat16")


def test_deepseek_v2_has_the_published_sizes(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, DEEPSEEK_V2))
    assert isinstance(spec.attention, MlaSpec)
    assert spec.attention.softmax_scale == pytest.approx(192**-0.5 * mscale_of(40, 0.707) ** 2)
    assert (spec.rope.table_factor, spec.rope.interleaved) == (1.0, True)
    assert (spec.router.num_groups, spec.router.topk_groups, spec.router.group_score) == (8, 3, "best")
    assert (spec.router.norm_topk, spec.router.scaling) == (False, 16.0)
    assert total_parameters(spec) == pytest.approx(235.7e9, rel=0.001)
    lite = read_spec(folder(tmp_path, DEEPSEEK_V2 | DEEPSEEK_V2_LITE))
    assert (lite.router.num_groups, lite.attention.q_lora_rank) == (1, None)  # type: ignore[union-attr]
    assert total_parameters(lite) == pytest.approx(15.7e9, rel=0.002)


def test_kimi_k2_is_a_deepseek_v3_of_384_experts(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, DEEPSEEK_V3 | KIMI_K2, {"eos_token_id": [163586]}))
    assert (spec.num_logical, spec.moe_layer_ids, spec.router.num_groups) == (384, tuple(range(1, 61)), 1)
    assert spec.eos_token_ids == (163585, 163586)
    assert total_parameters(spec) == pytest.approx(1.026e12, rel=0.002)
    as_v3 = read_spec(folder(tmp_path, DEEPSEEK_V3 | KIMI_K2 | {"model_type": "deepseek_v3"}, {"eos_token_id": 163586}))
    assert replace(spec, model_type="deepseek_v3") == as_v3


@pytest.mark.parametrize(("num_layers", "num_experts", "published"), [(24, 32, 20.9e9), (36, 128, 116.8e9)])
def test_gpt_oss_has_the_published_sizes(num_layers: int, num_experts: int, published: float, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": num_layers, "num_local_experts": num_experts}
    kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
    spec = read_spec(folder(tmp_path, GPT_OSS_20B | sizes | {"layer_types": kinds}))
    assert total_parameters(spec) == pytest.approx(published, rel=0.005)
    attention = spec.attention
    assert isinstance(attention, GqaSpec)
    assert [attention.window_of(layer) for layer in range(4)] == [128, None, 128, None]
    assert spec.experts_in_mxfp4
    assert spec.rope.table_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert spec.activation.limit == 7.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_give_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    config, published = PUBLISHED[name]
    spec = read_spec(folder(tmp_path, config))
    assert total_parameters(spec) == pytest.approx(published, rel=0.01)


def test_old_and_new_keys_of_the_rotation_are_the_same(tmp_path: Path) -> None:
    old = {k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")} | {"type": "yarn"}
    base = MLA | {"model_type": "deepseek_v3"}
    new = read_spec(folder(tmp_path, base | {"rope_parameters": YARN}))
    assert read_spec(folder(tmp_path, base | {"rope_scaling": old, "rope_theta": 10000})) == new


def test_rope_scaling_that_says_default_alone_changes_nothing_beside_rotations_by_kind(tmp_path: Path) -> None:
    wanted = read_spec(folder(tmp_path, MIMO_V2_FLASH))
    assert read_spec(folder(tmp_path, MIMO_V2_FLASH | {"rope_scaling": {"rope_type": "default"}})) == wanted


def test_keys_of_mimos_authors_that_say_what_transformers_takes_are_read(tmp_path: Path) -> None:
    said = {"moe_layer_freq": [0, *[1] * 47], "topk_method": "noaux_tc"}
    assert read_spec(folder(tmp_path, MIMO_V2_FLASH | said)) == read_spec(folder(tmp_path, MIMO_V2_FLASH))


def test_some_layers_may_be_dense(tmp_path: Path) -> None:
    config = QWEN_30B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read_spec(folder(tmp_path, config)).moe_layer_ids == (1, 5)


def test_an_unsupported_architecture_is_refused_with_the_list_of_supported_ones(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ModelError) as error:
        read_spec(folder(tmp_path, config))
    for word in ("llama", "LlamaForCausalLM", *FAMILIES):
        assert word in str(error.value)


def test_all_types_of_transformers_with_experts_that_write_text_are_served_or_refused_by_name() -> None:
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    tasks = "CAUSAL_LM", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM"
    writing = {kind for task in tasks for kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}
    models = Path(transformers.__file__).parent / "models"
    has_experts = re.compile(r"^class \w*(Experts?|SparseM\w+|MoE|Moe\w*Block)\w*\(", re.MULTILINE)
    found = {
        kind
        for kind in writing
        for source in models.glob(f"{model_type_to_module_name(kind)}/modeling_*.py")
        if has_experts.search(source.read_text(encoding="utf-8"))
    }
    assert {"mixtral", "qwen3_5_moe", "dbrx", "switch_transformers", "gemma4"} <= found
    assert not REFUSED.keys() & FAMILIES.keys()
    assert [kind for kind in sorted(found) if not {kind, kind.removesuffix("_text")} & {*FAMILIES, *REFUSED}] == []


STRETCHED = {key: value for key, value in YARN.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (QWEN_30B, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (QWEN_30B, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization 'bitsandbytes'"),
        (QWEN_30B, {"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "rope_type 'longrope'"),
        (QWEN_30B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (GLM_45, {"partial_rotary_factor": 1.5}, "partial_rotary_factor of the rotary embedding is 1.5"),
        (MINIMAX_M2, {"rotary_dim": 130}, "rotary_dim is 130, expected at most 128"),
        (GLM_45, {"partial_rotary_factor": "half"}, "partial_rotary_factor of the rotary embedding is 'half'"),
        (GLM_45, {"partial_rotary_factor": 0.4}, "the rotated head width is 51; it must be even"),
        (DOTS_LLM1, {"layer_types": ["chunked_attention"] * 62}, "attention 'chunked_attention'"),
        (DOTS_LLM1, {"sliding_window": "all", "max_window_layers": 8}, "sliding_window is 'all'"),
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (MINIMAX_M2, {"attn_type_list": [0, *[1] * 61]}, "attn_type_list [0, 1"),
        (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        (OLMOE_1B_7B, {"clip_qkv": -1}, "clip_qkv is -1"),
        (HUNYUAN_A13B, {"use_cla": True}, "use_cla True"),
        (HUNYUAN_A13B, {"moe_topk": [8, 4] * 16}, "moe_topk is [8, 4, "),
        (HUNYUAN_A13B, {"num_shared_expert": [2] * 32}, "num_shared_expert 2 (only 1 is)"),
        (HUNYUAN_A13B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        (HUNYUAN_A13B, {"rope_scaling": {"type": "dynamic", "alpha": "big"}}, "alpha is 'big'"),
        (GRANITE_1B, {"logits_scaling": 0}, "logits_scaling is 0"),
        (DBRX, {"rope_parameters": {"rope_theta": 7e4}}, "beside rope_theta 500000 of attn_config"),
        (DBRX, {"attn_config": {"kv_n_heads": 8}}, "rope_theta is missing"),
        (DBRX, {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights 2.0"),
        (QWEN_30B, {"head_dim": 127}, "127; it must be even"),
        (QWEN_30B, {"num_key_value_heads": 5}, "32 attention heads do not divide over 5"),
        (QWEN_30B, {"hidden_size": None}, "hidden_size is missing"),
        (QWEN_30B, {"hidden_size": "big"}, "hidden_size is 'big'"),
        (QWEN_30B, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        (QWEN_30B, {"num_experts_per_tok": 129}, "top-k is 129 with 128 experts"),
        (QWEN_30B, {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        (QWEN_30B, {"rope_theta": -1}, "rope_theta of the rotary embedding is -1"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (PHI_35_MOE, {"num_experts_per_tok": 3}, "top-k is 3, but sparsemixer chooses two experts"),
        (PHI_35_MOE, {"rope_scaling": {"type": "longrope"}}, "original_max_position_embeddings"),
        (
            PHI_35_MOE,
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096}},
            "expected a list of 64 numbers",
        ),
        (PHI_35_MOE, {"rope_scaling": PHI_35_MOE["rope_scaling"] | {"long_factor": [1.0]}}, "a list of 64 numbers"),
        (ERNIE_45_21B, {"use_bias": True}, "use_bias true"),
        (ERNIE_45_21B, {"model_type": "minimax_m3_vl_text"}, "attention to blocks that an indexer chooses is not"),
        (ERNIE_45_21B, {"model_type": "minimax_text_01"}, "which is served as converted, MiniMax-Text-01-hf, is not"),
        (ERNIE_45_21B, {"model_type": "step3p7"}, "activations with other limits in some layers"),
        (KIMI_LINEAR_48B, {"mla_use_output_gate": True}, "mla_use_output_gate"),
        (
            KIMI_LINEAR_48B,
            {"linear_attn_config": KIMI_LINEAR_48B["linear_attn_config"] | {"gate_lower_bound": -5.0}},
            "linear_attn_config with 'gate_lower_bound'",
        ),
        (MIMO_V2_FLASH, {"rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn', 'factor': 4} beside"),
        (MIMO_V2_FLASH, {"rope_scaling": {"full_attention": {"factor": 4}}}, "beside rotations by kind of layer"),
        (MIMO_V2_FLASH, {"moe_layer_freq": [1] * 48}, "moe_layer_freq [1, 1"),
        (MIMO_V2_FLASH, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (
            LAGUNA | {"model_type": "laguna"},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": None},
            "rope_scaling {'rope_type': 'linear', 'factor': 2.0} beside",
        ),
        (
            MIMO | {"model_type": "mimo_v2_flash"},
            {"rope_parameters": MIMO["rope_parameters"] | {"full_attention": {"rope_theta": 5e3, **STRETCHED}}},
            "'yarn' without partial_rotary_factor",
        ),
        (DEEPSEEK_V4_FLASH, V4_IN_FP4, "load the published one with dequantize=True in transformers"),
        (DEEPSEEK_V4_FLASH, {"quantization_config": {"expert_dtype": "fp4"}}, "expert_dtype 'fp4' (a checkpoint in"),
        (DEEPSEEK_V4_FLASH, {"scoring_func": "softmax"}, 'scoring_func \'softmax\' (only \'sqrtsoftplus\' is)'),
        (DEEPSEEK_V4_FLASH, {"compress_ratios": [2] * 43}, "a list of 0, 4 and 128"),
        (DEEPSEEK_V4_FLASH, {"compress_ratios": [0] * 42}, "compress_ratios is [0, 0, 0,"),
        (
            DEEPSEEK_V4_FLASH,
            {"rope_parameters": {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 1e5}}},
            "rope_scaling {'type': 'yarn', 'factor': 16",
        ),
        (DEEPSEEK_V4_FLASH, {"layer_types": ["full_attention"] * 43}, "43 kinds of attention of DeepSeek-V4"),
        (DEEPSEEK_V4_FLASH, {"mlp_layer_types": ["moe"]}, 'each "hash_moe" or "moe"'),
        (DEEPSEEK_V4_FLASH, {"compress_rates": {"heavily_compressed_attention": 513}}, "at most 512"),
        (DEEPSEEK_V4_FLASH, {"hc_mult": 9}, "hc_mult is 9, expected at most 8"),
        (DEEPSEEK_V4_FLASH, {"o_groups": 7}, "o_groups is 7, expected a divisor of all heads' 32768 columns"),
        (DEEPSEEK_V4_FLASH, {"index_head_dim": 63}, "at most head_dim, 512, and index_head_dim, 63"),
        (
            DEEPSEEK_V4_FLASH,
            {"rope_scaling": None, "rope_parameters": {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 1e5}}},
            "rope_parameters without partial_rotary_factor of each kind",
        ),
        (JAMBA, {"num_experts": 1}, "a model without a layer of attention, or without experts,"),
        (JAMBA, {"attn_layer_offset": 8}, "a model without a layer of attention, or without experts,"),
        (GLM_5, {"index_topk_freq": 4}, "index_topk_freq 4 (only 1 is)"),
        (GLM_5, {"indexer_types": ["full", *["shared"] * 77]}, "indexer_types ['full', 'shared'"),
        (GLM_47_FLASH, {"mlp_layer_types": ["sparse"] * 3}, "expected a list of 47"),
        (GRANITE_1B, {"model_type": "granitemoe_swa", "layer_rope_theta": [1e4, 5e3] * 12}, "several numbers above 0"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob true"),
        (GPT_OSS_20B, {"layer_types": ["full_attention"] * 23}, "layer_types is"),
        (GPT_OSS_20B, {"layer_types": ["chunked_attention"] * 24}, "attention 'chunked_attention'"),
        (GPT_OSS_20B, {"layer_types": [{}] * 24}, "attention {} ("),
        (GPT_OSS_20B, {"sliding_window": None}, "sliding_window is missing"),
        (GPT_OSS_20B, {"rope_scaling": None}, "rope_parameters is missing"),
        (GPT_OSS_20B, {"intermediate_size": 2890}, "intermediate_size is 2890, expected a multiple of 32"),
        (GPT_OSS_20B, {"swiglu_limit": 0}, "swiglu_limit is 0"),
        (QWEN_30B, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization 'mxfp4'"),
        (DEEPSEEK_V3, {"n_group": 7}, "256 experts do not divide into 7 groups"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        read_spec(folder(tmp_path, base | change))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"use_sliding_window": True, "sliding_window": 40960}, None),
        ({"use_sliding_window": False, "sliding_window": 4096}, None),
        ({"use_sliding_window": True, "sliding_window": 2048}, 2048),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"model_type": "mixtral", "num_local_experts": 8, "sliding_window": 4096}, 4096),
    ],
    ids=str,
)
def test_a_window_that_no_sequence_outgrows_is_no_window(
    change: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    attention = read_spec(folder(tmp_path, QWEN_30B | change)).attention
    assert isinstance(attention, GqaSpec)
    assert [attention.window_of(layer) for layer in (0, 1, 47)] == [window] * 3


def test_a_window_that_is_on_and_not_given_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    values = QWEN_30B | {"use_sliding_window": True}
    del values["sliding_window"]
    attention = read_spec(folder(tmp_path, values)).attention
    assert isinstance(attention, GqaSpec)
    assert attention.window_of(0) == Qwen3MoeConfig(use_sliding_window=True).sliding_window == 4096


def test_a_longer_context_than_the_original_one_has_the_long_rotations_of_transformers(tmp_path: Path) -> None:
    from transformers import PhimoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from moe_serve.models.decoder.gqa import rope_frequencies

    spec = read_spec(folder(tmp_path, PHI_35_MOE))
    theirs = PhimoeConfig(**deepcopy(PHI_35_MOE))  # it changes what it is given
    assert (spec.default_context, spec.max_position) == (4096, 131072)
    for context in (1, 4096, 4097, 131072):
        rope = spec.in_context(context).rope
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=context)
        assert rope_frequencies(rope).tolist() == pytest.approx(frequencies.tolist(), rel=1e-6)
        assert rope.table_factor == 1.243163121016122


def test_what_transformers_saves_of_a_dequantised_deepseek_v4_is_read(tmp_path: Path) -> None:
    from transformers import AutoConfig

    plain = read_spec(folder(tmp_path, DEEPSEEK_V4_FLASH))
    config = AutoConfig.from_pretrained(folder(tmp_path, DEEPSEEK_V4_FLASH | V4_IN_FP4))
    del config.quantization_config  # as dequantize=True does
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["expert_dtype"] == "fp4"
    assert read_spec(tmp_path) == plain


@pytest.mark.parametrize("stated", [{"expert_dtype": None}, {"expert_dtype": "fp8"}], ids=str)
def test_a_deepseek_v4_in_fp8_alone_is_read(stated: dict[str, Any], tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, DEEPSEEK_V4_FLASH | V4_IN_FP4 | stated))
    assert spec.fp8_block == Fp8Block(128, 128)


def test_layers_of_kimi_linear_are_counted_from_one(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, KIMI_LINEAR_48B))
    assert spec.attention_layer_ids == (3, 7, 11, 15, 19, 23, 26)
    assert (spec.num_logical, spec.topk, spec.router.scaling, spec.moe_layer_ids[0]) == (256, 8, 2.446, 1)
    lists = KIMI_LINEAR_48B["linear_attn_config"] | {"full_attn_layers": [4]}
    with pytest.raises(ModelError, match="each layer from 1 on in one of its two lists"):
        read_spec(folder(tmp_path, KIMI_LINEAR_48B | {"linear_attn_config": lists}))


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_config_that_is_not_an_object_is_one_clear_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(folder(tmp_path, text))


def test_a_missing_folder_says_what_to_give() -> None:
    with pytest.raises(ModelError, match="give a Hugging Face model folder"):
        read_spec("/no/such/model")


def test_reading_a_spec_needs_no_torch(tmp_path: Path) -> None:
    path = folder(tmp_path, QWEN | {"model_type": "qwen3_moe"})
    read = "from moe_serve.models.families.registry import read_spec; read_spec(sys.argv[1])"
    code = f"import sys; {read}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
