"""Phi-3.5-MoE: layer norms with biases, biases of attention and logits, two experts by sparsemixer, LongRoPE."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import W1_W3_W2, gqa, model_of, read_rope, windowed
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = replace(windowed(gqa(config), config), qkv_bias=bias, out_bias=bias)
    rope = read_rope(config, attention.head_dim, may_be_long=True)
    router = RouterSpec(
        num_logical=config.size("num_local_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sparsemixer",
        norm_topk=False,
        jitter=config.positive("router_jitter_noise", 0.01),
    )
    spec = model_of(config, attention, router, config.size("intermediate_size"), rope=rope)
    return replace(spec, expert_names=W1_W3_W2, norm="layer_bias", head_bias=config.flag("lm_head_bias"))


DEFAULTS = {"phimoe": {"eos_token_id": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}}
READERS = {"phimoe": read}
