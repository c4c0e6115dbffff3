"""DeepSeek-V2 and V2-Lite: MLA, shared experts, softmax scores, groups of experts with the score of their best."""

from moe_serve.ep.routing import RouterSpec
from moe_serve.models.families.deepseek_v3 import latent_model
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import shown
from moe_serve.models.spec import ModelSpec


def read(config: HfConfig, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    if config.get("scoring_func", "softmax") != "softmax":
        raise config.refuse(f"scoring_func {shown(config.get('scoring_func'))} (only 'softmax' is)")
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse(f"topk_method {shown(method)} (greedy and group_limited_greedy are)")
    if config.flag("norm_topk_prob"):  # transformers takes no notice of it; DeepSeek's own code leaves out the scaling
        raise config.refuse("norm_topk_prob true (no published model has it)")
    in_groups = method == "group_limited_greedy"
    router = RouterSpec(
        num_logical=config.size("n_routed_experts"),
        topk=config.size("num_experts_per_tok"),
        scoring="softmax",
        norm_topk=False,
        scaling=config.positive("routed_scaling_factor"),
        num_groups=config.size("n_group") if in_groups else 1,
        topk_groups=config.size("topk_group") if in_groups else 1,
        group_score="best",
    )
    return latent_model(config, eos_token_ids, router)


DEFAULTS = {
    "deepseek_v2": {
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.0,
    }
}
READERS = {"deepseek_v2": read}
