"""gpt-oss: sinks, every other layer windowed, biases everywhere, clamped SwiGLU, experts in MXFP4."""

from dataclasses import replace

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import MXFP4_BLOCK, Activation, RouterSpec
from moe_serve.models.families.common import gqa, is_mxfp4, model_of, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias", default=True)
    attention = replace(gqa(config), qkv_bias=bias, out_bias=bias, has_sinks=True)
    attention = windowed_by_layer(attention, config, lambda layer: layer % 2 == 0)
    if config.get("rope_parameters", config.get("rope_scaling")) is None:
        raise ModelError(f"{config.where}: rope_parameters is missing; is this the folder of a gpt_oss model?")
    in_mxfp4 = is_mxfp4(config)
    for key in ("hidden_size", "intermediate_size"):
        if in_mxfp4 and config.size(key) % MXFP4_BLOCK:
            raise config.wrong(key, config.get(key), f"a multiple of {MXFP4_BLOCK}, the block of MXFP4")
    # Softmax over the chosen logits is softmax over all, divided by the chosen ones' sum.
    router = RouterSpec(config.size("num_local_experts"), config.size("num_experts_per_tok"), has_logit_bias=True)
    alpha, limit = config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)
    return replace(
        model_of(config, attention, router, config.size("intermediate_size")),
        expert_names=ExpertNames(router="router", form="interleaved"),
        expert_bias=True,
        activation=Activation("clamped_swiglu", alpha, limit),
        experts_in_mxfp4=in_mxfp4,
    )


DEFAULTS = {"gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}}
READERS = {"gpt_oss": read}
