"""Flint: Qwen3-MoE with sinks, windowed layers that rotate and others that do not, sigmoid scores, a shared expert."""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, sparse_layers, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ExpertNames, ModelSpec


def read(config: HfConfig) -> ModelSpec:
    bias, last = config.flag("attention_bias"), config.num_layers - 1
    attention = windowed_by_layer(gqa(config), config, lambda i: not (i < 2 or i % 4 == 1 or i == last))
    full = tuple(layer for layer in range(config.num_layers) if layer not in attention.windowed_layer_ids)
    attention = replace(
        attention,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        has_sinks=True,
        sinks_name="softmax_offset",
        unrotated_layer_ids=full,
    )
    router = RouterSpec(
        num_logical=config.size("num_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="sigmoid",
        norm_topk=config.flag("norm_topk_prob"),
    )
    if config.get("mlp_only_layers") is None:
        config = HfConfig({**config.values, "mlp_only_layers": [0, 1]}, config.where)
    return replace(
        model_of(config, attention, router, config.size("moe_intermediate_size"), sparse_layers(config)),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        expert_names=ExpertNames(shared="mlp.shared_expert"),
    )


DEFAULTS = {
    "flint": {
        "head_dim": 128,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "sliding_window": 513,
    }
}
READERS = {"flint": read}
