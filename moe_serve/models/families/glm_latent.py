"""GLM-4.7-Flash, GLM-5, A.X-K1 and A.X-K2: DeepSeek-V3 and V3.2 with a list of dense layers.

GLM-5's indexer rotates adjacent pairs; A.X-K1 norms what a MoE layer adds, and is published without the router's bias,
and with such a norm of dense layers, which do not use it. A.X-K2 gates its norms, but those in front of MLPs, and what
it attends.
"""

from dataclasses import replace

from moe_serve.models.families.common import dense_width, moe_layers_of_list
from moe_serve.models.families.deepseek import V3_DEFAULTS, read_v3, with_indexer
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import MlaSpec, ModelSpec, NormNames


def read_lite(config: HfConfig) -> ModelSpec:
    config.only("first_k_dense_replace", 1)  # transformers takes no notice of it
    return _listed(config, 1)


def read_dsa(config: HfConfig) -> ModelSpec:
    config.only("mlp_bias", False)
    if any(config.get(key) for key in ("indexer_types", "index_topk_pattern")):
        config.only("indexer_types", ["full"] * config.num_layers)
        config.only("index_topk_pattern", "F" * config.num_layers)
    config.only("index_topk_freq", 1)  # else layers share what an earlier one has chosen
    spec = _listed(config, config.size("first_k_dense_replace", minimum=0))
    return with_indexer(spec, config, interleaved=True)


def read_axk1(config: HfConfig) -> ModelSpec:
    spec = _listed(config, config.size("first_k_dense_replace", default=1, minimum=0))
    names = NormNames(behind_moe="post_mlp_layernorm")
    # Nobody says whether a layer for multi-token prediction would have the norm of MoE layers.
    return replace(spec, norm_names=names, may_lack_router_bias=True, num_predictors=0)


def read_axk2(config: HfConfig) -> ModelSpec:
    config.only("layer_types", ["indexed_attention"] * config.num_layers)
    spec = with_indexer(_listed(config, config.size("first_k_dense_replace", default=1, minimum=0)), config)
    assert isinstance(spec.attention, MlaSpec)
    names = NormNames(gate_rank=config.size("gated_norm_rank"))
    attention, router = replace(spec.attention, gates_values=True), replace(spec.router, masks_with_zero=True)
    return replace(spec, attention=attention, router=router, norm_names=names, num_predictors=0)


def _listed(config: HfConfig, num_dense: int) -> ModelSpec:
    """Returns a DeepSeek-V3 whose dense layers are those of mlp_layer_types, or the first ones."""
    moe_layer_ids = moe_layers_of_list(config, num_dense)
    as_v3 = read_v3(HfConfig({**config.values, "first_k_dense_replace": 0}, config.where))
    return replace(as_v3, moe_layer_ids=moe_layer_ids, dense_intermediate=dense_width(config, moe_layer_ids))


_LITE = {
    "eos_token_id": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "q_lora_rank": 768,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
}
DEFAULTS = {
    "glm4_moe_lite": _LITE,
    "glm_moe_dsa": _LITE | {"first_k_dense_replace": 3, "q_lora_rank": 2048, "routed_scaling_factor": 2.5},
    "axk2": {**V3_DEFAULTS, "eos_token_id": 163691, "first_k_dense_replace": 1, "gated_norm_rank": 16}
    | {"n_group": None, "topk_group": None, "q_lora_rank": 384},
    "axk1": {**V3_DEFAULTS, "eos_token_id": 163691, "first_k_dense_replace": 1},
}
READERS = {"glm4_moe_lite": read_lite, "glm_moe_dsa": read_dsa, "axk1": read_axk1, "axk2": read_axk2}
