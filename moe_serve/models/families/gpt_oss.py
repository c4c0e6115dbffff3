"""gpt-oss: sinks, every other layer windowed, biases everywhere, clamped SwiGLU, experts in MXFP4."""

from dataclasses import replace

from moe_serve.ep.routing import RouterSpec
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import MXFP4_BLOCK, Activation
from moe_serve.models.families.common import common_fields, gqa, windowed_by_layer
from moe_serve.models.families.quantization import is_mxfp4
from moe_serve.models.hf_config import MOST_LAYERS, HfConfig
from moe_serve.models.rope_spec import read_rope
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    bias = config.flag("attention_bias", default=True)
    attention = replace(gqa(config), qkv_bias=bias, out_bias=bias, has_sinks=True)
    num_layers = config.size("num_hidden_layers", largest=MOST_LAYERS)
    attention = windowed_by_layer(attention, config, lambda layer: layer % 2 == 0)
    if config.get("rope_parameters", config.get("rope_scaling")) is None:
        raise ModelError(f"{config.where}: rope_parameters is missing; is this the folder of a gpt_oss model?")
    width = config.size("intermediate_size")
    in_mxfp4 = is_mxfp4(config)
    for key in ("hidden_size", "intermediate_size"):
        if in_mxfp4 and config.size(key) % MXFP4_BLOCK:
            raise config.wrong(key, config.get(key), f"a multiple of {MXFP4_BLOCK}, the block of MXFP4")
    return ModelSpec(
        **common_fields(config, eos_token_ids),
        attention=attention,
        rope=read_rope(config.values, attention.head_dim, False, config.where),
        moe_layer_ids=tuple(range(num_layers)),
        router=RouterSpec(
            num_logical=config.size("num_local_experts"),
            topk=config.size("num_experts_per_tok"),
            scoring="softmax",
            norm_topk=True,  # softmax over the chosen logits is softmax over all, divided by the chosen ones' sum
            has_logit_bias=True,
        ),
        moe_intermediate=width,
        shared_intermediate=0,
        dense_intermediate=0,
        expert_names=ExpertNames(router="router", form="interleaved"),
        expert_bias=True,
        activation=Activation(
            "clamped_swiglu", config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)
        ),
        experts_in_mxfp4=in_mxfp4,
    )


DEFAULTS = {"gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}}
READERS = {"gpt_oss": read}
