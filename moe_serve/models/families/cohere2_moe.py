"""Cohere-2-MoE: attention and experts side by side behind one norm; windowed layers rotate, the others do not.

Norms take the mean out and have no biases, unless rms_norm_eps is given; weights are a softmax over the chosen experts,
or their sigmoids; shared experts are added to the routed ones, or averaged with them; the first layers may be dense.
"""

from dataclasses import replace

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import gqa, model_of, moe_layers_of_list, read_rope, windowed_by_layer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import ModelSpec, NormNames


def read(config: HfConfig) -> ModelSpec:
    has_mean = config.get("rms_norm_eps") is None
    eps = config.positive("layer_norm_eps" if has_mean else "rms_norm_eps")
    config = HfConfig({**config.values, "rms_norm_eps": eps}, config.where)
    num_dense = min(config.size("first_k_dense_replace", default=0, minimum=0), config.num_layers)
    first = config.size("prefix_dense_sliding_window_pattern")
    every = config.size("sliding_window_pattern")

    def is_windowed(layer: int) -> bool:
        return (layer + 1) % first != 0 if layer < num_dense else (layer - num_dense + 1) % every != 0

    attention = windowed_by_layer(gqa(config), config, is_windowed)
    moe_layer_ids = moe_layers_of_list(config, num_dense)
    rotated = {*attention.windowed_layer_ids}
    if first == 1:
        rotated |= set(range(config.num_layers)) - set(moe_layer_ids)
    unrotated = tuple(layer for layer in range(config.num_layers) if layer not in rotated)
    bias = config.flag("attention_bias")
    attention = replace(attention, unrotated_layer_ids=unrotated, qkv_bias=bias, out_bias=bias)
    rope, width = read_rope(config, attention.head_dim, interleaved=True), config.size("intermediate_size")
    num_shared = config.size("num_shared_experts", minimum=0)
    how = config.text("shared_expert_combination_strategy")
    if num_shared and how not in ("sum", "average"):
        raise config.wrong("shared_expert_combination_strategy", how, '"sum" or "average"')
    spec = model_of(config, attention, _router(config), width, moe_layer_ids, rope)
    dense = config.size("prefix_dense_intermediate_size", default=width)
    return replace(
        spec,
        shared_intermediate=num_shared * width,
        dense_intermediate=dense if len(moe_layer_ids) < config.num_layers else 0,
        norm_names=NormNames(post=None),
        norm="layer" if has_mean else "rms",
        is_parallel=True,
        moe_factor=0.5 if num_shared and how == "average" else 1.0,
        logits_factor=config.positive("logit_scale"),
    )


def _router(config: HfConfig) -> RouterSpec:
    scoring = config.text("expert_selection_fn")
    if scoring not in ("softmax", "sigmoid"):
        raise config.wrong("expert_selection_fn", scoring, '"softmax" or "sigmoid"')
    sizes = config.size("num_experts"), config.size("num_experts_per_tok")
    if scoring == "softmax":  # over the chosen logits: that over all, divided by the chosen ones' sum
        return RouterSpec(*sizes)
    return RouterSpec(*sizes, scoring="sigmoid_of_chosen", norm_topk=config.flag("norm_topk_prob"))


DEFAULTS = {
    "cohere2_moe": {
        "eos_token_id": 255001, "expert_selection_fn": "softmax", "head_dim": 128, "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2,
        "num_shared_experts": 0, "prefix_dense_sliding_window_pattern": 1, "rope_theta": 10000.0,
        "shared_expert_combination_strategy": "average", "sliding_window": 4096, "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    }
}  # fmt: skip
READERS = {"cohere2_moe": read}
