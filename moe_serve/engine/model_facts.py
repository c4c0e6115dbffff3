"""What a rank says of its model in /server_info."""

from typing import Any

from moe_serve.dispatch.base import AnyAllToAll
from moe_serve.engine.model_plan import ModelPlan


def model_facts(plan: ModelPlan, all_to_all: AnyAllToAll) -> dict[str, Any]:
    """Returns the facts about the model that /server_info shows."""
    return {
        "model_type": plan.spec.model_type,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "numerics": plan.choice.name,
        "kernels": plan.choice.kernels,
        "kernels_why": plan.choice.why,
        "expert_weights": f"{plan.expert_form} ({plan.slot_form.meaning})",
        "device": str(plan.device),
        "num_logical": plan.placement.num_logical,
        "num_slots": plan.placement.num_slots,
        "moe_layer_ids": list(plan.placement.moe_layer_ids),
        "slots_per_rank": plan.placement.slots_per_rank,
        "num_redundant_experts": plan.placement.num_slots - plan.spec.num_logical,
        "num_cache_blocks": plan.num_blocks,
        "all_to_all": type(all_to_all).__name__,
        "all_to_all_note": all_to_all.note,
        "all_to_all_is_bitwise": all_to_all.capabilities.bitwise,
    }
