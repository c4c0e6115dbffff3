"""The split of batches on CPUs: eplb/split over torch's memory, in C where a compiler is found."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.layout import count_slots
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.layer import LayerSlots
from moe_serve.eplb.split.make import assign_tokens, layers_of, make_split
from moe_serve.eplb.split.policy import SplitPolicy, find_library
from moe_serve.topology import Topology

_Pair = tuple[SplitPolicy, SplitPolicy]  # one layer's own split and its even one: the same where only one can serve


class HostSplit:
    """Splits batches of every layer of the placement in use. DeviceSplit has the same methods."""

    def __init__(self, placement: Placement, split: str, topology: Topology, compiled: bool):
        self._split = split
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
    def outcomes(self) -> Tensor:
        """Returns how many exact splits were proven at once, after repair, or not at all: [3] int64, since start."""
        counted = np.array([policy.outcomes for policy in self._own], dtype=np.int64)
        return self._outcomes + torch.from_numpy(counted.reshape(-1, 3).sum(axis=0))

    def split_evenly(self, flag: bool) -> None:
        """Splits the next batches evenly, or again as the exact split does; the even and nearest splits stay."""
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
        own = make_split(self._split, layer, self._library)
        return own, make_split("even", layer, self._library) if self._split == "exact" else own
