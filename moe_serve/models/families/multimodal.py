"""The text models of Qwen3-VL, Qwen3.5, Qwen3-Omni (its thinker), GLM-4.5V and Kimi-K2.5; no images, no sound.

Positions of text alone are the same on all axes of their rotations, so these are those of one axis.
"""

from dataclasses import replace

from moe_serve.models.families.deepseek import V3_DEFAULTS, read_v3
from moe_serve.models.families.glm4_moe import read as read_glm4
from moe_serve.models.families.qwen3_next import NEXT_DEFAULTS, read_3_5
from moe_serve.models.families.qwen_moe import read_qwen3
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read_qwen3_vl(config: HfConfig) -> ModelSpec:
    # The router of this model always divides the weights by their sum.
    spec = read_qwen3(_with(config, norm_topk_prob=True, use_sliding_window=False))
    names = ExpertNames(form="transposed")
    return replace(spec, expert_names=names, body_prefix="model.language_model.", other_models=("model.visual.",))


def read_qwen3_5(config: HfConfig) -> ModelSpec:
    return replace(read_3_5(config), body_prefix="model.language_model.", other_models=("model.visual.",))


def read_qwen3_omni(config: HfConfig) -> ModelSpec:
    spec = read_qwen3(_with(config, use_sliding_window=False))
    outer = "thinker." if config.get("model_type") == "qwen3_omni_moe" else ""
    other_models = (outer + "visual.", outer + "audio_tower.", "talker.", "code2wav.")
    return replace(spec, tensor_prefix=outer, other_models=other_models)


def read_glm4v(config: HfConfig) -> ModelSpec:
    spec = read_glm4(_with(config, use_qk_norm=False))
    return replace(spec, body_prefix="model.language_model.", other_models=("model.visual.",))


def read_kimi_k25(config: HfConfig) -> ModelSpec:
    other_models = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
    return replace(read_v3(config), tensor_prefix="language_model.", other_models=other_models)


def _with(config: HfConfig, **values: bool) -> HfConfig:
    return HfConfig({**config.values, **values}, config.where)


_OMNI = {"norm_topk_prob": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
DEFAULTS = {
    "qwen3_vl_moe": {"num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_theta": 500000.0},
    "qwen3_5_moe": NEXT_DEFAULTS,
    "qwen3_omni_moe": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
    "glm4v_moe": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
    },
    "kimi_k25": {**V3_DEFAULTS, "tie_word_embeddings": True},
}
READERS = {
    "qwen3_vl_moe": read_qwen3_vl,
    "qwen3_5_moe": read_qwen3_5,
    "qwen3_omni_moe": read_qwen3_omni,
    "qwen3_omni_moe_thinker": read_qwen3_omni,
    "glm4v_moe": read_glm4v,
    "kimi_k25": read_kimi_k25,
}
