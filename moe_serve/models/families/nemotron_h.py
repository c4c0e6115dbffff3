"""Nemotron-H (Nemotron-3): each layer is a state space (Mamba-2), attention, experts or an MLP, alone behind one norm.

Nothing rotates; experts have no gate; the router is DeepSeek-V3's. Steps of a state space are not limited from below:
transformers limits those of prompts by time_step_min, and those of decodes not; the model's authors limit none.
"""

from dataclasses import replace

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import RELU2, MambaShape
from moe_serve.models.families.common import NO_ROPE, WIDEST_HEAD, deepseek_v3_router, gqa, model_of
from moe_serve.models.families.granitemoehybrid import check_time_steps
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec, NormNames

_KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_OLD_KEYS = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
             "mamba_dt_limit": "time_step_limit"}  # fmt: skip
_ONLY = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def read(config: HfConfig) -> ModelSpec:
    kinds = _kinds_of_layers(config)
    renamed = {new: config.values[old] for old, new in _OLD_KEYS.items() if old in config.values}
    own = {"num_hidden_layers": len(kinds), "rms_norm_eps": config.get("layer_norm_epsilon"), "hidden_act": None}
    own["tie_word_embeddings"] = False  # transformers ties nothing, whatever it says
    config = HfConfig({**config.values, **renamed, **own}, config.where)
    for key, value in (*_ONLY.items(), ("n_shared_experts", 1), ("sliding_window", None)):
        config.only(key, value)
    layers = range(config.num_layers)
    ids = {kind: tuple(layer for layer in layers if kinds[layer] == kind) for kind in _KINDS.values()}
    if not ids["full_attention"] or not ids["moe"]:
        raise config.refuse("a model without a layer of attention, or without experts,")
    attention = replace(gqa(config), unrotated_layer_ids=ids["full_attention"], block="mixer")
    width, router = config.size("moe_intermediate_size"), deepseek_v3_router(config)
    return replace(
        model_of(config, attention, router, width, tuple(layers), NO_ROPE),
        moe_layer_ids=ids["moe"],
        shared_intermediate=config.size("moe_shared_expert_intermediate_size"),
        dense_intermediate=config.size("intermediate_size") if ids["mlp"] else 0,
        latent=None if config.get("moe_latent_size") is None else config.size("moe_latent_size"),
        activation=RELU2,
        expert_names=ExpertNames(block="mixer", dense="mixer", shared="mixer.shared_experts"),
        norm_names=NormNames(input="norm", post="norm", last="norm_f"),
        body_prefix="backbone.",
        embedding_name="embeddings",
        stateful=_shape(config) if ids["linear_attention"] else None,
        stateful_layer_ids=ids["linear_attention"],
        stateful_block="mixer",
        unattended_layer_ids=tuple(sorted(ids["moe"] + ids["mlp"])),
        unfed_layer_ids=tuple(sorted(ids["linear_attention"] + ids["full_attention"])),
    )


def _kinds_of_layers(config: HfConfig) -> list[str]:
    listed = config.get("layers_block_type", config.get("layer_types"))
    if listed is None:
        listed = [_KINDS.get(each, each) for each in config.text("hybrid_override_pattern") or "ME*-"]
    kinds = [_OLD_KINDS.get(str(kind), str(kind)) for kind in listed] if isinstance(listed, list) else []
    if not kinds or not set(kinds) <= set(_KINDS.values()):
        raise config.wrong("layers_block_type", listed, f"a list of {', '.join(_KINDS.values())}")
    return kinds


def _shape(config: HfConfig) -> MambaShape:
    check_time_steps(config)
    heads, groups = config.size("mamba_num_heads"), config.size("n_groups")
    if heads % groups:
        raise ModelError(f"{config.where}: {heads} heads do not divide over {groups} groups; correct n_groups")
    width, taps = config.size("mamba_head_dim", largest=WIDEST_HEAD), config.size("conv_kernel", minimum=2, largest=16)
    biases = config.flag("use_conv_bias"), config.flag("use_bias")
    return MambaShape(groups, heads, config.size("ssm_state_size"), width, taps, *biases)


DEFAULTS = {
    "nemotron_h": {
        "conv_kernel": 4, "eos_token_id": 2, "head_dim": 128, "intermediate_size": 21504, "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 64, "mamba_num_heads": 128, "moe_intermediate_size": 7688, "n_groups": 8,
        "moe_shared_expert_intermediate_size": 7688, "n_routed_experts": 8, "norm_topk_prob": True,
        "num_experts_per_tok": 2, "num_key_value_heads": 8, "routed_scaling_factor": 1.0, "ssm_state_size": 128,
        "use_conv_bias": True,
    }
}  # fmt: skip
READERS = {"nemotron_h": read}
