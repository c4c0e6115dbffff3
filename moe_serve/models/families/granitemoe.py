"""Granite-MoE, with a shared expert or without: four multipliers, and experts stored together."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias, scale = config.flag("attention_bias"), config.positive("attention_multiplier", 1.0)
    attention = replace(gqa(config), qkv_bias=bias, out_bias=bias, scale=scale)
    is_shared = config.get("model_type") == "granitemoeshared"
    # Softmax over the chosen logits, as in gpt_oss.py.
    router = RouterSpec(config.size("num_local_experts", default=8), config.size("num_experts_per_tok", default=2))
    return replace(
        model_of(config, attention, router, config.size("intermediate_size")),
        shared_intermediate=config.size("shared_intermediate_size", default=0, minimum=0) if is_shared else 0,
        embedding_factor=config.positive("embedding_multiplier", 1.0),
        residual_factor=config.positive("residual_multiplier", 1.0),
        logits_factor=1 / config.positive("logits_scaling", 1.0),
        expert_names=ExpertNames(
            block="block_sparse_moe",
            router="router.layer",
            shared="shared_mlp",
            linears=("input_linear", "output_linear"),
        ),
    )


DEFAULTS = {name: {"eos_token_id": 2, "rms_norm_eps": 1e-6} for name in ("granitemoe", "granitemoeshared")}
READERS = {"granitemoe": read, "granitemoeshared": read}
