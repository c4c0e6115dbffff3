"""Mistral-Small-4: DeepSeek-V3's latents and shared experts, softmax scores, and queries with a temperature."""

from dataclasses import replace
from typing import Any

from moe_serve.kernels.forms import RouterSpec
from moe_serve.models.families.common import read_rope
from moe_serve.models.families.deepseek import latent_model
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.spec import MlaSpec, ModelSpec, QueryTemperature


def read(config: HfConfig) -> ModelSpec:
    router = RouterSpec(
        num_logical=config.size("n_routed_experts"),
        topk=config.size("num_experts_per_tok"),
        norm_topk=config.flag("norm_topk_prob"),
        scaling=config.positive("routed_scaling_factor"),
        num_groups=config.size("n_group"),
        topk_groups=config.size("topk_group"),
        norm_eps=1e-20,
    )
    given = config.get("rope_parameters", config.get("rope_scaling"))
    if not isinstance(given, dict):
        raise config.wrong("rope_parameters", given, "an object with llama_4_scaling_beta")
    scaling = HfConfig(given, config.where)
    temperature = QueryTemperature(
        scaling.positive("original_max_position_embeddings"), scaling.positive("llama_4_scaling_beta"), shift=0
    )
    # What is rotated may be said as a share of the whole head.
    nope_dim, rope_dim = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    rope = read_rope(config, nope_dim + rope_dim, config.flag("rope_interleave", default=True), rope_dim)
    if rope.dim != rope_dim:
        raise config.refuse(f"partial_rotary_factor that rotates {rope.dim} elements of qk_rope_head_dim {rope_dim}")
    plain: Any = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    spec = latent_model(
        HfConfig({**config.values, "rope_scaling": None, "rope_parameters": plain}, config.where),
        router,
        rope.interleaved,
    )
    assert isinstance(spec.attention, MlaSpec)
    return replace(spec, attention=replace(spec.attention, temperature=temperature))


DEFAULTS = {
    "mistral4": {
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "q_lora_rank": 1024,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    }
}
READERS = {"mistral4": read}
