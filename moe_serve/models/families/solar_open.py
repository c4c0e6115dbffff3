"""Solar-Open: GQA without norms over heads, the router and the shared experts of DeepSeek-V3, no dense layers."""

from dataclasses import replace

from moe_serve.models.families.common import deepseek_v3_router, gqa, model_of
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    config.only("first_k_dense_replace", 0)
    config.only("use_qk_norm", False)
    attention = replace(gqa(config), qkv_bias=config.flag("attention_bias"))
    width = config.size("moe_intermediate_size")
    spec = model_of(config, attention, deepseek_v3_router(config), width)
    return replace(spec, shared_intermediate=width * config.size("n_shared_experts", default=1, minimum=0))


DEFAULTS = {
    "solar_open": {
        "head_dim": 128,
        "norm_topk_prob": True,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
    }
}
READERS = {"solar_open": read}
