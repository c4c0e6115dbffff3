"""Which slot serves a routed token: the placement in use, and how the replicas of an expert share a batch.

Every rank computes the same split from the same counts, in integers, without further communication. On devices a new
placement is copied over the old one between two steps: tables never change address or shape, so captured graphs stay
valid.

Shape words: E = num_logical, P = num_slots, R = num_ranks, T = tokens, K = topk.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_serve.ep.device_split import DeviceSplit
from moe_serve.ep.host_split import HostSplit
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology


class ReplicaMap:
    """The slots of all layers of a placement, on the compute device."""

    def __init__(
        self,
        placement: Placement,
        device: torch.device | str = "cpu",
        split: Literal["even", "nearest", "exact"] = "even",
        topology: Topology | None = None,
        compiled: bool = True,
    ):
        """split: how replicas share a batch, see eplb/split/make.py;  topology: None = all ranks on one node; both
        equal on all ranks

        compiled: on CPUs, split in C where a compiler is found; the numbers are the same
        """
        self._shape = _shape_of(placement)
        self._first_slot = _first_slots(placement).to(device)
        self.version = placement.version
        self._split: HostSplit | DeviceSplit | None = None
        self._is_exact = split == "exact"
        topology = topology or Topology(1, placement.num_ranks)
        # A fact of the shape, not of the placement: with as many slots as experts nothing can have a replica.
        if placement.num_slots > placement.num_logical:
            if torch.device(device).type == "cpu":
                self._split = HostSplit(placement, split, topology, compiled)
            else:
                self._split = DeviceSplit(placement, split, topology, device)

    @property
    def split_outcomes(self) -> Tensor | None:
        """Returns how many batches the exact split has proven at once, proven after repair, and not proven: [3] int64.

        None where it does not serve.
        """
        return self._split.outcomes if self._split is not None and self._is_exact else None

    def activate(self, placement: Placement) -> None:
        """Switches to a new placement, in place. Raises PlacementError when its shape is another one."""
        if _shape_of(placement) != self._shape:
            raise PlacementError(
                f"the new placement has (layers, experts, slots, ranks) {_shape_of(placement)}, serving runs with "
                f"{self._shape}; give a placement of the same shape, or restart with it"
            )
        self._first_slot.copy_(_first_slots(placement))
        if self._split is not None:
            self._split.activate(placement)
        self.version = placement.version

    def layer(self, row: int) -> "LayerReplicas":
        """Returns the choice of replica in one row of the placement; it follows `activate`."""
        return LayerReplicas(self._first_slot[row], row, self._split)


class LayerReplicas:
    """The choice of replica in one layer.

    needs_counts: whether `split`, with the counts of all ranks, has to choose; False: `only_slots` does without
    """

    def __init__(self, first_slot: Tensor, layer_row: int, split: HostSplit | DeviceSplit | None):
        self._first_slot = first_slot  # [E + 1] lowest slot of an expert; [E] = -1
        self._layer_row = layer_row
        self._split = split
        self.needs_counts = split is not None

    def only_slots(self, topk_ids: Tensor) -> Tensor:
        """Returns the slot of each expert where none has replicas: [T, K] (-1 stays -1)."""
        assert not self.needs_counts, "experts may have replicas: the split needs the counts of all ranks"
        return self._first_slot[topk_ids]  # -1 reads the last entry, which holds -1

    def count(self, topk_ids: Tensor) -> Tensor:
        """Returns how many ids name each expert: [T, K] int64, -1 = none -> [E] int64."""
        assert self._split is not None, "without replicas nobody needs the counts"
        return self._split.count(self._layer_row, topk_ids)

    def split(self, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Chooses a slot for each token of this rank.

        topk_ids: [T, K] int64 logical experts, -1 = none
        counts:   [R, E] int64, rows of each rank for each expert; row `rank` counts topk_ids
        returns:  physical ids [T, K] int64 (-1 stays -1), and the rows of every rank for every slot [R, P] int64
        """
        assert self._split is not None, "without replicas there is nothing to choose"
        return self._split.split(self._layer_row, topk_ids, counts, rank)


def _shape_of(placement: Placement) -> tuple[int, int, int, int]:
    return placement.num_layers, placement.num_logical, placement.num_slots, placement.num_ranks


def _first_slots(placement: Placement) -> Tensor:
    """Returns the lowest slot of every expert: [L, E + 1] int64, the last one -1."""
    if not placement.replica_count.all():
        row, expert = np.argwhere(placement.replica_count == 0)[0]
        raise PlacementError(
            f"expert {expert} of row {row} has no slot, so its tokens cannot be served; place every expert"
        )
    first = placement.logical_to_physical[:, :, 0].astype(np.int64)
    return torch.from_numpy(np.pad(first, ((0, 0), (0, 1)), constant_values=-1))
