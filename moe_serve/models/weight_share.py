"""The part of a model's weights that one rank holds, and the form in which it holds them."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moe_serve.ep.expert_form import ExpertForm, SlotForm
from moe_serve.models.spec import ModelSpec

if TYPE_CHECKING:
    from moe_serve.eplb.placement import Placement


@dataclass(frozen=True)
class WeightShare:
    """All dense tensors, and the experts of the rank's own slots.

    placement: its moe_layer_ids are those of the spec
    dtype:     of everything but quantised experts;  form: of the experts
    """

    spec: ModelSpec
    placement: "Placement"
    rank: int
    dtype: torch.dtype
    device: torch.device | str
    form: ExpertForm = "dense"

    @property
    def slot_form(self) -> SlotForm:
        """Returns the form of one slot."""
        return SlotForm(self.form, self.spec.hidden, self.spec.moe_intermediate, self.dtype)

    @property
    def num_slots(self) -> int:
        """Returns the slots of the rank, per layer."""
        return self.placement.slots_per_rank

    @cached_property
    def slots(self) -> dict[int, dict[int, list[int]]]:
        """Returns the rank's local slots of each expert, {model layer id: {expert: [slot, ..]}}."""
        first, end = self.rank * self.num_slots, (self.rank + 1) * self.num_slots
        found: dict[int, dict[int, list[int]]] = {}
        for layer, row in zip(self.placement.moe_layer_ids, self.placement.physical_to_logical, strict=True):
            slots = found[layer] = {}
            for slot, expert in enumerate(row[first:end].tolist()):
                if expert >= 0:
                    slots.setdefault(expert, []).append(slot)
        return found
