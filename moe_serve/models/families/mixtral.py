"""Mixtral: GQA, softmax over all experts, weights always divided by their sum."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import W1_W3_W2, gqa, model_of, windowed
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    router = RouterSpec(config.size("num_local_experts"), config.size("num_experts_per_tok"))
    spec = model_of(config, windowed(gqa(config), config), router, config.size("intermediate_size"))
    return replace(spec, expert_names=W1_W3_W2)


DEFAULTS = {"mixtral": {"eos_token_id": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}}
READERS = {"mixtral": read}
