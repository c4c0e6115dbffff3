"""The part of a model's weights that one rank holds, and the form in which it holds them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moe_serve.ep.expert_form import ExpertForm, SlotForm
from moe_serve.models.fp8_projections import scale_bytes
from moe_serve.models.spec import ModelSpec
from moe_serve.models.stored_weights import StoredWeights
from moe_serve.models.weight_plan import DenseTensor, dense_tensors

if TYPE_CHECKING:
    from moe_serve.eplb.placement import Placement


@dataclass(frozen=True)
class WeightShare:
    """All dense tensors, and the experts of the rank's own slots.

    placement: its moe_layer_ids are those of the spec
    dtype:     of everything but quantised experts, and of what `stored` says
    form:      of the experts
    stored:    for the compiled CPU kernels, which take matrices as they are stored, and experts packed; None: others
    """

    spec: ModelSpec
    placement: "Placement"
    rank: int
    dtype: torch.dtype
    device: torch.device | str
    form: ExpertForm = "dense"
    stored: StoredWeights | None = None

    @property
    def slot_form(self) -> SlotForm:
        """Returns the form of one slot."""
        dtype = self.dtype if self.stored is None else self.stored.experts
        spec, packed = self.spec, self.stored is not None
        return SlotForm(
            self.form,
            spec.hidden,
            spec.moe_intermediate,
            dtype,
            packed,
            by_channel=self.form == "fp8" and spec.fp8_block is not None and spec.fp8_block.by_channel,
            has_bias=spec.expert_bias,
            activation=spec.activation,
        )

    def dense_dtype(self, plan: DenseTensor) -> torch.dtype:
        """Returns the dtype in which the rank keeps a dense tensor."""
        if plan.kind == "bias32":
            return torch.float32
        return self.dtype if self.stored is None else self.stored.dense[plan.name]

    @property
    def dense_bytes(self) -> dict[str, int]:
        """Returns the size of each dense tensor by its name, with the scales of FP8."""
        sizes = {}
        for plan in dense_tensors(self.spec):
            dtype = self.dense_dtype(plan)
            scales = scale_bytes(self.spec, plan) if dtype == torch.float8_e4m3fn else 0
            sizes[plan.name] = math.prod(plan.shape) * dtype.itemsize + scales
        return sizes

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
