"""Granite-MoE, with a shared expert or without: four multipliers, and experts stored together.

The one with windows (granitemoe_swa) has sinks, too, and may have layers without rotation.
"""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, GqaSpec, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias, scale = config.flag("attention_bias"), config.positive("attention_multiplier", 1.0)
    attention = replace(gqa(config), qkv_bias=bias, out_bias=bias, scale=scale)
    is_shared = config.get("model_type") != "granitemoe"
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
            fused=("input_linear.weight", "output_linear.weight"),
        ),
    )


def read_swa(config: HfConfig) -> ModelSpec:
    num_layers = config.num_layers
    thetas = config.get("layer_rope_theta")
    unrotated: tuple[int, ...] = ()
    if thetas is not None:
        if not isinstance(thetas, list) or len(thetas) != num_layers:
            raise config.wrong("layer_rope_theta", thetas, f"a list of {num_layers} numbers, 0 for no rotation")
        unrotated = tuple(layer for layer, theta in enumerate(thetas) if not theta)
        rotating = [theta for theta in thetas if theta]
        if any(theta != rotating[0] for theta in rotating):
            raise config.refuse("layer_rope_theta with several numbers above 0")
        if rotating:
            given = config.get("rope_parameters", config.get("rope_scaling", {}))
            parameters = {**given, "rope_theta": rotating[0]} if isinstance(given, dict) else given
            config = HfConfig({**config.values, "rope_scaling": None, "rope_parameters": parameters}, config.where)
    spec = read(config)
    assert isinstance(spec.attention, GqaSpec)
    attention = windowed_by_layer(spec.attention, config, lambda layer: layer % 4 != 0)
    fused = "experts.gate_up_proj", "experts.down_proj"
    return replace(
        spec,
        attention=replace(attention, has_sinks=True, unrotated_layer_ids=unrotated),
        expert_names=replace(spec.expert_names, router="router", fused=fused),
    )


DEFAULTS = {name: {"eos_token_id": 2, "rms_norm_eps": 1e-6} for name in ("granitemoe", "granitemoeshared")}
DEFAULTS["granitemoe_swa"] = {**DEFAULTS["granitemoe"], "sliding_window": 128}
READERS = {"granitemoe": read, "granitemoeshared": read, "granitemoe_swa": read_swa}
