"""Granite-4.0-H: Granite-MoE with a shared expert, with state-space layers (Mamba-2) in nine of ten layers.

The layers with attention rotate nothing, unless config.json says so.
"""

import math
from dataclasses import replace

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import MambaShape
from moe_serve.models.families import granitemoe
from moe_serve.models.families.common import NO_ROPE, WIDEST_HEAD, stateful_layers
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.spec import GqaSpec, ModelSpec

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # as published, and as transformers says now


def read(config: HfConfig) -> ModelSpec:
    kinds = config.get("layer_types", config.get("layers_block_type"))
    if isinstance(kinds, list):
        kinds = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    config = HfConfig({**config.values, "layer_types": kinds}, config.where)
    stateful = stateful_layers(config, "linear_attention", lambda layer: True)
    spec = granitemoe.read(config)
    assert isinstance(spec.attention, GqaSpec)
    if config.get("position_embedding_type") != "rope":
        attention = replace(spec.attention, unrotated_layer_ids=tuple(range(config.num_layers)))
        spec = replace(spec, attention=attention, rope=NO_ROPE)
    shape = mamba_shape(config)
    return replace(spec, stateful=shape if stateful else None, stateful_layer_ids=stateful, stateful_block="mamba")


def check_time_steps(config: HfConfig) -> None:
    """Raises ModelError where the steps of a state space are limited."""
    limits = config.get("time_step_limit", [0.0, math.inf])
    if limits not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # the latter as transformers writes it
        raise config.refuse(f"time_step_limit {shown(limits)}")


def mamba_shape(config: HfConfig) -> MambaShape:
    """Returns the shape of state-space layers. Raises ModelError for heads that are not possible."""
    check_time_steps(config)
    inner = config.size("mamba_expand") * config.size("hidden_size")
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups")
    is_auto = config.get("mamba_d_head") == "auto"
    width = inner // heads if is_auto else config.size("mamba_d_head", largest=WIDEST_HEAD)
    if heads * width != inner or heads % groups or not 1 <= width <= WIDEST_HEAD:
        raise ModelError(
            f"{config.where}: {heads} heads of {width} in {groups} groups do not make {inner} columns of a state-space "
            f"layer (heads of up to {WIDEST_HEAD} columns can be served); correct mamba_n_heads or mamba_n_groups"
        )
    taps = config.size("mamba_d_conv", minimum=2, largest=16)
    biases = config.flag("mamba_conv_bias"), config.flag("mamba_proj_bias")
    return MambaShape(groups, heads, config.size("mamba_d_state"), width, taps, *biases)


DEFAULTS = {
    "granitemoehybrid": {
        **granitemoe.DEFAULTS["granitemoe"],
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "shared_intermediate_size": 1024,
    }
}
READERS = {"granitemoehybrid": read}
