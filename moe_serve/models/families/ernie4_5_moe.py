"""ERNIE-4.5-MoE: softmax scores with a correction bias, shared experts, MoE layers alternate with dense ones."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, read_rope
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    if config.flag("use_bias"):
        raise config.refuse("use_bias true (biases of every projection)")
    attention = gqa(config)
    rope = read_rope(config, attention.head_dim, interleaved=True)
    width = config.size("moe_intermediate_size")
    router = RouterSpec(
        num_logical=config.size("moe_num_experts", "num_experts"),
        topk=config.size("moe_k", "num_experts_per_tok"),
        norm_min=config.positive("moe_norm_min", 1e-12),
        has_bias=True,
    )
    return replace(
        model_of(config, attention, router, width, _moe_layers(config), rope),
        shared_intermediate=width * config.size("moe_num_shared_experts", default=0, minimum=0),
        expert_names=ExpertNames(router_bias="moe_statics.e_score_correction_bias", router_bias_is_row=True),
    )


def _moe_layers(config: HfConfig) -> tuple[int, ...]:
    num_layers = config.num_layers
    first = config.size("moe_layer_start_index", default=1, minimum=0)
    last = config.size("moe_layer_end_index", default=-1, minimum=-1)
    step = config.size("moe_layer_interval", default=1)
    last = num_layers - 1 if last == -1 else last
    return tuple(i for i in range(num_layers) if first <= i <= last and (i + 1) % step == 0)


DEFAULTS = {
    "ernie4_5_moe": {
        "eos_token_id": 2,
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }
}
READERS = {"ernie4_5_moe": read}
