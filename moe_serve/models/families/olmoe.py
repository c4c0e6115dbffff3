"""OLMoE: GQA with one norm over all query heads and one over all key heads, clipped where config.json says so."""

from dataclasses import replace

from moe_serve.models.families.common import gqa, model_of, softmax_router
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    clip = None if config.get("clip_qkv") is None else config.positive("clip_qkv", 1.0)
    attention = replace(gqa(config), qk_norm="projection", qkv_bias=bias, out_bias=bias, clip=clip)
    return model_of(config, attention, softmax_router(config), config.size("intermediate_size"))


DEFAULTS = {"olmoe": {"eos_token_id": 50279, "rms_norm_eps": 1e-5}}
READERS = {"olmoe": read}
