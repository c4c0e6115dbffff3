"""Qwen3-Next and Qwen3.5-MoE: the gated delta rule in three of four layers, gated full attention in the others.

Norms multiply by 1 + weight; a quarter of each head is rotated; a shared expert's rows have a weight of their own.
Qwen3.5 stores the projections of linear attention in another order.
"""

from dataclasses import replace

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import DeltaShape
from moe_serve.models.families.common import (
    WIDEST_HEAD,
    gqa,
    model_of,
    read_rope,
    softmax_router,
    sparse_layers,
    stateful_layers,
)
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = replace(gqa(config), qk_norm="head", qkv_bias=bias, out_bias=bias, has_gate=True)
    rope = read_rope(config, attention.head_dim, rotated=attention.head_dim // 4)
    interval = config.size("full_attention_interval", default=4)
    linear = stateful_layers(config, "linear_attention", lambda layer: (layer + 1) % interval != 0)
    width = config.size("moe_intermediate_size")
    return replace(
        model_of(config, attention, softmax_router(config), width, sparse_layers(config), rope),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        has_shared_gate=True,
        expert_names=ExpertNames(shared="mlp.shared_expert"),
        norms_from_zero=True,
        stateful=replace(delta_shape(config), grouped=True) if linear else None,
        stateful_layer_ids=linear,
        stateful_block="linear_attn",
    )


def delta_shape(config: HfConfig) -> DeltaShape:
    """Returns the shape of linear attention. Raises ModelError for heads that are not possible."""
    key_heads, value_heads = (config.size(f"linear_num_{name}_heads") for name in ("key", "value"))
    widths = [config.size(f"linear_{name}_head_dim", largest=WIDEST_HEAD) for name in ("key", "value")]
    if value_heads % key_heads:
        raise ModelError(
            f"{config.where}: {value_heads} value heads of linear attention do not divide over {key_heads} key heads; "
            "correct linear_num_key_heads"
        )
    taps = config.size("linear_conv_kernel_dim", minimum=2, largest=16)
    return DeltaShape(key_heads, value_heads, widths[0], widths[1], taps)


def read_3_5(config: HfConfig) -> ModelSpec:
    # All layers have experts, and the router always divides the weights by their sum.
    fixed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None}
    spec = read(HfConfig({**config.values, **fixed}, config.where))
    shape = spec.stateful
    return replace(spec, stateful=replace(shape, grouped=False)) if isinstance(shape, DeltaShape) else spec


NEXT_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "norm_topk_prob": True,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
DEFAULTS = {"qwen3_next": NEXT_DEFAULTS, "qwen3_5_moe_text": NEXT_DEFAULTS}
READERS = {"qwen3_next": read, "qwen3_5_moe_text": read_3_5}
