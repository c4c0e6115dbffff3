"""Reads single experts again while serving: those that were lost with their ranks, from the checkpoint into slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from moe_serve.ep.expert_store import ExpertStore
from moe_serve.errors import ModelError
from moe_serve.models.checkpoint import Checkpoint
from moe_serve.models.weight_plan import ExpertTensor, expert_tensors
from moe_serve.models.weight_reader import WeightReader
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import DummyWeights


@dataclass(frozen=True)
class ExpertToRead:
    """layer_row: of the placement;  slot: of the rank's own, counted from 0"""

    layer_row: int
    expert: int
    slot: int


class ExpertSource(Protocol):
    """Where single experts come from: WeightReader, DummyWeights."""

    def expert(self, plan: ExpertTensor, expert: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class ExpertReloader:
    """Reads experts of one model, with the bits that they were loaded with at start.

    share:  form and dtype in which the rank keeps experts; its placement does not matter
    folder: of the checkpoint; None: dummy weights, drawn again from the seed
    """

    share: WeightShare
    folder: Path | None
    seed: int = 0

    def read(self, experts: Sequence[ExpertToRead], stores: Sequence[ExpertStore]) -> None:
        """Writes experts into slots of their layers' stores, which belong to the rows of the placement in order.

        One expert at a time is held beside the slots.
        Raises ModelError, naming the file, when it cannot be read; slots that were not reached keep what they held.
        """
        if not experts:
            return
        if self.folder is None:
            self._copy(DummyWeights(self.share, self.seed), experts, stores)
            return
        try:
            with Checkpoint(self.folder) as checkpoint:
                self._copy(WeightReader(checkpoint, self.share), experts, stores)
        except (OSError, KeyError) as error:  # the files were whole at the start, and have changed since
            raise ModelError(
                f"{self.folder}: an expert cannot be read again ({error}); restore the checkpoint"
            ) from None

    def _copy(self, source: ExpertSource, experts: Sequence[ExpertToRead], stores: Sequence[ExpertStore]) -> None:
        plans: dict[int, list[ExpertTensor]] = {}
        for plan in expert_tensors(self.share.spec):
            plans.setdefault(plan.layer_id, []).append(plan)
        layer_ids = self.share.spec.moe_layer_ids
        for each in sorted(experts, key=lambda each: (each.layer_row, each.expert)):
            tensors: dict[str, Tensor] = {}
            for plan in plans[layer_ids[each.layer_row]]:
                tensors |= source.expert(plan, each.expert)
            stores[each.layer_row].write_slot(each.slot, ExpertStore(tensors, self.share.slot_form).slot(0))
