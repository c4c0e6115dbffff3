"""Jamba: state spaces (Mamba's first version) in seven of eight layers, experts in every other; nothing rotates.

Weights of experts are not divided by their sum.
"""

from dataclasses import replace

from moe_serve.kernels.forms import SelectiveShape
from moe_serve.models.families.common import NO_ROPE, gqa, model_of, softmax_router
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec, NormNames


def read(config: HfConfig) -> ModelSpec:
    layers = tuple(range(config.num_layers))
    attending, with_experts = _every(config, "attn_layer"), _every(config, "expert_layer")
    if not attending or not with_experts or config.size("num_experts", "num_local_experts") == 1:
        raise config.refuse("a model without a layer of attention, or without experts,")
    stateful = tuple(layer for layer in layers if layer not in attending)
    attention = replace(gqa(config), unrotated_layer_ids=layers)
    router = replace(softmax_router(config), norm_topk=False)
    return replace(
        model_of(config, attention, router, config.size("intermediate_size"), with_experts, NO_ROPE),
        expert_names=ExpertNames(block="feed_forward", dense="feed_forward", router="router"),
        norm_names=NormNames(post="pre_ff_layernorm", last="final_layernorm"),
        stateful=_shape(config) if stateful else None,
        stateful_layer_ids=stateful,
        stateful_block="mamba",
    )


def _every(config: HfConfig, which: str) -> tuple[int, ...]:
    """Returns the layers whose number, divided by a period, leaves an offset."""
    period, offset = config.size(f"{which}_period"), config.size(f"{which}_offset", minimum=0)
    return tuple(layer for layer in range(config.num_layers) if layer % period == offset)


def _shape(config: HfConfig) -> SelectiveShape:
    hidden = config.size("hidden_size")
    rank = -(-hidden // 16) if config.get("mamba_dt_rank") == "auto" else config.size("mamba_dt_rank")
    inner, taps = config.size("mamba_expand") * hidden, config.size("mamba_d_conv", minimum=2, largest=16)
    biases = config.flag("mamba_conv_bias"), config.flag("mamba_proj_bias")
    return SelectiveShape(inner, config.size("mamba_d_state"), rank, taps, *biases)


DEFAULTS = {
    "jamba": {
        "attn_layer_offset": 4, "attn_layer_period": 8, "eos_token_id": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": "auto", "mamba_expand": 2, "max_position_embeddings": 262144, "num_experts_per_tok": 2,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    }
}  # fmt: skip
READERS = {"jamba": read}
