"""FlexOlmo: OLMoE whose norms lie behind attention and experts alone: nothing is normed before it goes in."""

from dataclasses import replace

from moe_serve.models.families.common import gqa, model_of, softmax_router
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec, NormNames


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = replace(gqa(config), qk_norm="projection", qkv_bias=bias, out_bias=bias)
    names = NormNames(
        input=None, behind_attention="post_attention_layernorm", post=None, behind_moe="post_feedforward_layernorm"
    )
    spec = model_of(config, attention, softmax_router(config), config.size("intermediate_size"))
    return replace(spec, norm_names=names)


DEFAULTS = {
    "flex_olmo": {
        "eos_token_id": 100257,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
    }
}
READERS = {"flex_olmo": read}
