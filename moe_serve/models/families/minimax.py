"""MiniMax-Text-01 and M1: lightning attention in most layers, full attention in the others, Mixtral's router.

The residual goes on with what a norm gives, times a factor; what a sublayer adds has a factor, too. Of heads as many
columns rotate as rotary_dim says, as in its authors' code; transformers reads no such key and rotates all.
"""

from dataclasses import replace

from moe_serve.kernels.forms import LightningShape, RouterSpec
from moe_serve.models.families.common import (
    W1_W3_W2,
    WIDEST_HEAD,
    gqa,
    model_of,
    read_rope,
    stateful_layers,
    windowed,
    within_longest_context,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec, NormedResidual


def read(config: HfConfig) -> ModelSpec:
    config = within_longest_context(config)
    linear = stateful_layers(config, "linear_attention", lambda layer: layer % 2 == 1)
    attention = windowed(gqa(config), config)
    rotated = config.size("rotary_dim", default=attention.head_dim, largest=attention.head_dim)
    router = RouterSpec(config.size("num_local_experts", "num_experts"), config.size("num_experts_per_tok"))
    rope = read_rope(config, attention.head_dim, rotated=rotated)
    width = config.size("head_dim", default=attention.head_dim, largest=WIDEST_HEAD)
    alphas, betas = (
        [config.positive(f"{part}_{name}_factor") for part in ("full_attn", "linear_attn", "mlp")]
        for name in ("alpha", "beta")
    )
    return replace(
        model_of(config, attention, router, config.size("intermediate_size"), rope=rope),
        expert_names=W1_W3_W2,
        normed_residual=NormedResidual(*zip(alphas, betas, strict=True)),
        stateful=LightningShape(attention.num_heads, width, config.num_layers) if linear else None,
        stateful_layer_ids=linear,
        stateful_block="self_attn",
    )


DEFAULTS = {
    "minimax": {
        "eos_token_id": 2, "full_attn_alpha_factor": 1, "full_attn_beta_factor": 1, "linear_attn_alpha_factor": 1,
        "linear_attn_beta_factor": 1, "mlp_alpha_factor": 1, "mlp_beta_factor": 1, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    }
}  # fmt: skip
READERS = {"minimax": read}
