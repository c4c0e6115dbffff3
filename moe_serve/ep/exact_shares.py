"""The exact split inside serving: how many tokens every rank sends to every slot, computed alike on all ranks.

On CPU by eplb/split, over short ways (own slots first, then those of the node). On CUDA by one small kernel that is
read back by nobody, over the ways that prefix sums give: source ranks in order, slots in order. Both have the same
largest rank load wherever the kernel proves its result; how often it did is in `outcomes`.

Shape words: L = MoE layers, E = num_logical, P = num_slots, R = num_ranks, N = most experts with replicas, P - E.
"""

from typing import Protocol

import torch
from torch import Tensor

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.batch import SplitPolicy, make_split
from moe_serve.eplb.split.replica_graph import ReplicaGraph
from moe_serve.kernels.exact_split import SplitTable, exact_split, split_table


class ExactShares(Protocol):
    """Shares batch after batch of any layer over the slots of the placement in use.

    outcomes: [3] int64: batches proven at once, proven after repair, not proven; since start
    """

    outcomes: Tensor

    def activate(self, placement: Placement) -> None:
        """Goes over to another placement of the same shape."""
        ...

    def slot_counts(self, layer_row: int, counts: Tensor) -> Tensor:
        """Returns what each rank sends to each slot: counts [R, E] int64 -> [R, P] int64, on the same device."""
        ...


def make_exact_shares(placement: Placement, device: torch.device) -> ExactShares:
    """Returns the way of doing it on this device."""
    return HostShares(placement) if device.type == "cpu" else DeviceShares(placement, device)


class HostShares:
    """By eplb/split, in C where a compiler is found; the numbers are the same."""

    def __init__(self, placement: Placement):
        self._policies: list[SplitPolicy]
        self.outcomes = torch.zeros(3, dtype=torch.int64)
        self._proven = self.outcomes[:1].numpy()
        self.activate(placement)

    def activate(self, placement: Placement) -> None:
        graphs = (ReplicaGraph.of(r, placement.num_ranks, placement.num_logical) for r in placement.physical_to_logical)
        self._policies = [make_split("exact", graph) for graph in graphs]

    def slot_counts(self, layer_row: int, counts: Tensor) -> Tensor:
        self._proven += 1  # always: it ends when nothing is left to improve
        return torch.from_numpy(self._policies[layer_row].split(counts.numpy()))


class DeviceShares:
    """By kernels/exact_split, from tables that never change address or shape."""

    def __init__(self, placement: Placement, device: torch.device | str):
        tables = _stacked(placement)
        self._home_slot, self._experts, self._copy_slot = (table.to(device) for table in tables)
        self._by_expert, self._logical = (order.to(device) for order in _slot_order(placement))
        self._num_slots = placement.num_slots
        self.outcomes = torch.zeros(3, dtype=torch.int64, device=device)

    def activate(self, placement: Placement) -> None:
        new = (*_stacked(placement), *_slot_order(placement))
        old = (self._home_slot, self._experts, self._copy_slot, self._by_expert, self._logical)
        for table, values in zip(old, new, strict=True):
            table.copy_(values)

    def slot_counts(self, layer_row: int, counts: Tensor) -> Tensor:
        by_expert, logical = self._by_expert[layer_row], self._logical[layer_row]
        table = SplitTable(
            self._home_slot[layer_row], self._experts[layer_row], self._copy_slot[layer_row], self._num_slots
        )
        slot_tokens = exact_split(counts.sum(0), table, self.outcomes)
        # Tokens of an expert lie in a row, by source rank; its slots cut the same row, in order of slot. Rows of all
        # experts follow each other (a slot without an expert takes none, an expert without tokens has none).
        rank_end = counts.t().reshape(-1).cumsum(0).view(counts.shape[1], -1).t()  # [R, E]
        rank_end = torch.nn.functional.pad(rank_end, (0, 1))  # column E: slots without an expert
        slot_end = slot_tokens[by_expert].cumsum(0)
        ends, starts = torch.empty_like(slot_end), torch.empty_like(slot_end)
        ends[by_expert] = slot_end
        starts[by_expert] = slot_end - slot_tokens[by_expert]
        own_end = rank_end[:, logical]
        own_start = own_end - torch.nn.functional.pad(counts, (0, 1))[:, logical]
        return (torch.minimum(ends, own_end) - torch.maximum(starts, own_start)).clamp(min=0)


def _stacked(placement: Placement) -> tuple[Tensor, Tensor, Tensor]:
    """Returns home_slot [L, E], experts [L, N] and copy_slot [L, N, R] of all layers; unused rows hold -1."""
    room = placement.num_slots - placement.num_logical  # an expert on two ranks takes a slot that is not needed
    homes, experts, copies = [], [], []
    for row in torch.from_numpy(placement.physical_to_logical.copy()).to(torch.int64):
        table = split_table(row, placement.num_ranks, placement.num_logical)
        unused = room - table.experts.shape[0]
        homes.append(table.home_slot)
        experts.append(torch.nn.functional.pad(table.experts, (0, unused), value=-1))
        copies.append(torch.nn.functional.pad(table.copy_slot, (0, 0, 0, unused), value=-1))
    return torch.stack(homes), torch.stack(experts), torch.stack(copies)


def _slot_order(placement: Placement) -> tuple[Tensor, Tensor]:
    """Returns slots by expert, then slot, and the expert of each slot (E = none): both [L, P] int64."""
    logical = torch.from_numpy(placement.physical_to_logical.copy()).to(torch.int64)
    logical = torch.where(logical < 0, placement.num_logical, logical)
    return torch.sort(logical, dim=1, stable=True).indices, logical
