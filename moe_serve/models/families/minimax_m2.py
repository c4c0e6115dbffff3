"""MiniMax-M2: norms over all query heads and all key heads, partly rotated heads, sigmoid scores with a bias."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import W1_W3_W2, gqa, model_of, read_rope
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig) -> ModelSpec:
    attention = replace(gqa(config), qk_norm="projection")
    config.only("scoring_func", "sigmoid")
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_layer")
    config.only("use_routing_bias", True)
    config.only("shared_intermediate_size", 0)
    config.only("attn_type_list", [1] * config.num_layers)
    rotated = config.size("rotary_dim", default=attention.head_dim, largest=attention.head_dim)
    rope = read_rope(config, attention.head_dim, rotated=rotated)
    router = RouterSpec(
        num_logical=config.size("num_local_experts", "num_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        has_bias=True,
    )
    spec = model_of(config, attention, router, config.size("intermediate_size"), rope=rope)
    return replace(spec, expert_names=replace(W1_W3_W2, router_bias="e_score_correction_bias"))


DEFAULTS = {
    "minimax_m2": {
        "eos_token_id": 200020,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
    }
}
READERS = {"minimax_m2": read}
