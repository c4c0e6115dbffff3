"""Maps routed tokens to slots: the placement in use, and the split of a batch among the replicas of an expert.

Every rank computes the same split from the same counts, in integers, without further communication. On devices a new
placement is copied over the old one between two steps: tables never change address or shape, so captured graphs stay
valid.

Shape words: E = num_logical, P = num_slots, R = num_ranks, T = tokens, K = topk.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.layout import count_slots
from moe_serve.ep.device_split import DeviceSplit
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.layer import LayerSlots
from moe_serve.eplb.split.make import SEARCHED_SPLITS, ServedSplit, assign_tokens, layers_of, make_split
from moe_serve.eplb.split.policy import SplitPolicy, find_library
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

_Pair = tuple[SplitPolicy, SplitPolicy]  # one layer's own split and its even one: the same where only one can serve


class ReplicaMap:
    """The slots of all layers of a placement, on the compute device.

    split_name: how replicas share a batch
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device | str = "cpu",
        split: ServedSplit = "even",
        topology: Topology | None = None,
        compiled: bool = True,
        time: ExpertTime | None = None,
    ):
        """split: how replicas share a batch, see eplb/split/make.py;  topology: None = all ranks on one node; both
        equal on all ranks

        compiled: on CPUs, split in C where a compiler is found; the numbers are the same
        time:     what the split by time balances
        """
        assert split != "time" or torch.device(device).type != "cuda", "GPUs have no split by time"
        self.split_name = split
        self._topology = topology = topology or Topology(1, placement.num_ranks)
        self._placement = placement
        self._first_slot = _first_slots(layers_of(placement, topology)).to(device)
        self._split: HostSplit | DeviceSplit | None = None
        self._time = time if split == "time" else None
        self._is_searched = split in SEARCHED_SPLITS
        # A fact of the shape, not of the placement: with as many slots as experts nothing can have a replica.
        if placement.num_layers and placement.num_slots > placement.num_logical:
            if torch.device(device).type == "cpu":
                self._split = HostSplit(placement, split, topology, compiled, time)
            else:
                self._split = DeviceSplit(placement, split, topology, device)

    @property
    def device(self) -> torch.device:
        """Where the tables are, and rows are routed."""
        return self._first_slot.device

    @property
    def num_layers(self) -> int:
        """The number of MoE layers."""
        return self._placement.num_layers

    @property
    def version(self) -> int:
        """The version of the placement in use."""
        return self._placement.version

    @property
    def has_replicas(self) -> bool:
        """Whether an expert may have several slots, so that batches have to be split; a fact of the shape."""
        return self._split is not None

    @property
    def time(self) -> ExpertTime | None:
        """What the split by time balances; None where another one serves."""
        return self._time

    @property
    def split_outcomes(self) -> Tensor | None:
        """Returns how many batches were proven optimal at once, proven after repair, and not proven: [3] int64.

        None where neither the exact split nor the split by time serves.
        """
        return self._split.outcomes if self._split is not None and self._is_searched else None

    @property
    def splits_exactly(self) -> bool:
        """Whether the next batches are split exactly, or by time."""
        return self._split is not None and self._split.serves_exact

    def split_evenly(self, flag: bool) -> None:
        """Splits the next batches evenly instead of exactly or by time, or so again; other splits stay as they are.

        Call it between steps, with what the plan says: the ranks must split a batch alike. On devices the host
        chooses between two code paths, so a captured graph holds the one that was in use.
        """
        if self._split is not None:
            self._split.split_evenly(flag)

    def activate(self, placement: Placement) -> None:
        """Switches to a new placement, in place. Only the layers in which it is new cost time.

        Raises PlacementError, and changes nothing, when its shape is another one or an expert has no slot.
        """
        if _shape_of(placement) != _shape_of(self._placement):
            raise PlacementError(
                f"the new placement has (layers, experts, slots, ranks) {_shape_of(placement)}, serving runs with "
                f"{_shape_of(self._placement)}; give a placement of the same shape, or restart with it"
            )
        is_new = (placement.physical_to_logical != self._placement.physical_to_logical).any(axis=1)
        layers = layers_of(placement, self._topology, map(int, np.flatnonzero(is_new)))
        if layers:
            rows = torch.tensor([layer.layer_row for layer in layers], device=self._first_slot.device)
            self._first_slot.index_copy_(0, rows, _first_slots(layers).to(self._first_slot.device))
            if self._split is not None:
                self._split.activate(layers)
        self._placement = placement

    def layer(self, row: int) -> "LayerReplicas":
        """Returns the choice of replica in one row of the placement; it follows `activate`."""
        return LayerReplicas(self._first_slot[row], row, self._split)


class LayerReplicas:
    """The choice of replica in one layer.

    first_slot:   [E + 1] int64, lowest slot of each expert, which where none has replicas is its only one; [E] = -1
    needs_counts: whether `split`, with the counts of all ranks, has to choose; False: `first_slot` does without
    """

    def __init__(self, first_slot: Tensor, layer_row: int, split: "HostSplit | DeviceSplit | None"):
        self.first_slot = first_slot  # `activate` writes to it
        self._layer_row = layer_row
        self._split = split
        self.needs_counts = split is not None

    def count(self, topk_ids: Tensor) -> Tensor:
        """Returns how many ids name each expert: [T, K] int64, -1 = none -> [E] int64."""
        assert self._split is not None, "without replicas nobody needs the counts"
        return self._split.count(self._layer_row, topk_ids)

    def split(self, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Chooses a slot for each token of this rank.

        topk_ids: [T, K] int64 logical experts, -1 = none
        counts:   [R, E] int64, rows of each rank for each expert; row `rank` counts topk_ids
        returns:  physical ids [T, K] int64 (-1 stays -1), and the rows of every rank for every slot [R, P] int64,
                  which hold until the next split of this layer
        """
        assert self._split is not None, "without replicas there is nothing to choose"
        return self._split.split(self._layer_row, topk_ids, counts, rank)


class HostSplit:
    """Splits batches of every layer of the placement in use, on CPUs: eplb/split over torch's memory.

    In C where a compiler is found. DeviceSplit has the same methods.
    """

    def __init__(
        self, placement: Placement, split: str, topology: Topology, compiled: bool, time: ExpertTime | None = None
    ):
        self._split, self._time = split, time
        self._library = find_library() if compiled else None
        self._outcomes = torch.zeros(3, dtype=torch.int64)  # of layers' placements that are no longer in use
        pairs = [self._make(layer) for layer in layers_of(placement, topology)]
        self._own, self._even = [own for own, _ in pairs], [even for _, even in pairs]
        self._policies = self._own  # those that serve
        # Of each layer, the last result of `split` for slots: new tensors cost more than a small batch's split.
        shape = placement.num_layers, placement.num_ranks, placement.num_slots
        self._slot_rows = list(torch.zeros(shape, dtype=torch.int64))
        self._slot_rows_at = [rows.data_ptr() for rows in self._slot_rows]

    @property
    def serves_exact(self) -> bool:
        return self._policies is self._own

    @property
    def outcomes(self) -> Tensor:
        """Returns how many exact splits were proven at once, after repair, or not at all: [3] int64, since start."""
        counted = np.array([policy.outcomes for policy in self._own], dtype=np.int64)
        return self._outcomes + torch.from_numpy(counted.reshape(-1, 3).sum(axis=0))

    def split_evenly(self, flag: bool) -> None:
        """Splits the next batches evenly, or again exactly or by time; the even and nearest splits stay."""
        self._policies = self._even if flag else self._own

    def activate(self, layers: Sequence[LayerSlots]) -> None:
        """Switches these layers to another placement of the same shape."""
        for layer in layers:
            row = layer.layer_row
            self._outcomes += torch.from_numpy(self._own[row].outcomes)
            self._own[row], self._even[row] = self._make(layer)

    def count(self, layer_row: int, topk_ids: Tensor) -> Tensor:
        """Same contract as LayerReplicas.count."""
        policy = self._policies[layer_row]
        if policy.native is None:
            return count_slots(topk_ids, policy.layer.num_logical)
        ids = topk_ids.contiguous()
        counts = torch.empty(policy.layer.num_logical, dtype=torch.int64)
        policy.native.count(ids.data_ptr(), ids.numel(), counts.data_ptr())
        return counts

    def split(self, layer_row: int, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Same contract as LayerReplicas.split."""
        policy = self._policies[layer_row]
        if policy.native is None:
            rows = policy.split(counts.numpy())
            physical_ids = assign_tokens(policy.layer, topk_ids.numpy(), rows[rank])
            return torch.from_numpy(physical_ids), torch.from_numpy(rows)
        ids, counts = topk_ids.contiguous(), counts.contiguous()
        physical = torch.empty_like(ids)
        policy.native.split_and_assign(
            counts.data_ptr(), rank, ids.data_ptr(), ids.numel(), self._slot_rows_at[layer_row], physical.data_ptr()
        )
        return physical, self._slot_rows[layer_row]

    def _make(self, layer: LayerSlots) -> _Pair:
        own = make_split(self._split, layer, self._library, self._time)
        return own, make_split("even", layer, self._library) if self._split in SEARCHED_SPLITS else own


def _shape_of(placement: Placement) -> tuple[int, int, int, int]:
    return placement.num_layers, placement.num_logical, placement.num_slots, placement.num_ranks


def _first_slots(layers: Sequence[LayerSlots]) -> Tensor:
    """Returns the lowest slot of every expert: [layers, E + 1] int64, the last one -1.

    Raises PlacementError for an expert without a slot.
    """
    first = []
    for layer in layers:
        start = layer.slot_start
        lost = np.flatnonzero(start[1:] == start[:-1])
        if len(lost):
            raise PlacementError(
                f"expert {lost[0]} of row {layer.layer_row} has no slot, so its tokens cannot be served; place every "
                "expert"
            )
        first.append(np.append(layer.by_expert[start[:-1]], -1))
    return torch.from_numpy(np.array(first, dtype=np.int64))
