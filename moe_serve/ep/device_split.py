"""The split of batches on accelerators: eplb/split/policy.py and make.py with the same integers, in torch, and on GPUs
in one launch (kernels/triton/replica_split.py). Nothing is read back to the host.

The exact split bounds its work, so its split may differ from eplb/split/exact.py; the largest rank load is the same
wherever it proves its result, and `outcomes` counts how often it did.

Shape words: E = num_logical, P = num_slots, R = num_ranks, N = most experts with replicas, P - E.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_serve.dispatch.layout import count_slots
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.layer import LayerSlots, ReplicaGraph
from moe_serve.eplb.split.make import layers_of
from moe_serve.eplb.split.policy import turn_tables
from moe_serve.kernels.exact_split import SplitTable, exact_split_reference
from moe_serve.topology import Topology


class DeviceSplit:
    """Splits batches of every layer from tables that never change address or shape; see HostSplit."""

    def __init__(self, placement: Placement, split: str, topology: Topology, device: torch.device | str):
        self._num_logical, self._is_exact = placement.num_logical, split == "exact"
        # Rows of the exact split's table: an expert on two ranks takes a slot more than others.
        self._most_replicated = max(1, placement.num_slots - placement.num_logical)
        self._ranks_per_node, num_ranks = topology.ranks_per_node, topology.num_ranks
        self._reaches = (1, self._ranks_per_node, num_ranks) if split == "nearest" else (num_ranks,)
        self.serves_exact = self._is_exact  # for the batches to come
        self.outcomes = torch.zeros(3, dtype=torch.int64, device=device)
        made = [self._make_tables(layer) for layer in layers_of(placement, topology)]
        self._tables = {name: torch.stack([tables[name] for tables in made]).to(device) for name in made[0]}

    def split_evenly(self, flag: bool) -> None:
        """As of HostSplit. The choice is made on the host: a captured graph holds one of the two paths."""
        self.serves_exact = self._is_exact and not flag

    def activate(self, layers: Sequence[LayerSlots]) -> None:
        made = [self._make_tables(layer) for layer in layers]
        rows = torch.tensor([layer.layer_row for layer in layers], device=self.outcomes.device)
        for name, table in self._tables.items():
            table.index_copy_(0, rows, torch.stack([tables[name] for tables in made]).to(table.device))

    def count(self, layer_row: int, topk_ids: Tensor) -> Tensor:
        return count_slots(topk_ids, self._num_logical)

    def split(self, layer_row: int, topk_ids: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        tables = {name: table[layer_row] for name, table in self._tables.items()}
        if topk_ids.is_cuda:
            from moe_serve.kernels.triton.replica_split import split_replicas_triton

            outcomes = self.outcomes if self.serves_exact else None
            return split_replicas_triton(topk_ids, counts, rank, tables, self._ranks_per_node, outcomes)
        rows = self._share_exactly(tables, counts) if self.serves_exact else self._share_in_turn(tables, counts)
        return _assign_tokens(tables["by_expert"], topk_ids, rows[rank]), rows

    def _make_tables(self, layer: LayerSlots) -> dict[str, Tensor]:
        """Returns one layer's tables, on the CPU: those of the turns, and of the exact split where it serves."""
        turns = turn_tables(layer, self._reaches)
        ends = np.append(layer.slot_start, layer.num_slots)  # empty slots come last
        arrays = {"logical": layer.physical_to_logical, "by_expert": layer.by_expert, "slot_start": ends} | vars(turns)
        tables = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._is_exact:
            table = split_table(layer, self._most_replicated)
            tables |= {"fixed_slot": table.fixed_slot, "experts": table.experts, "replica_slot": table.replica_slot}
        return tables

    def _share_in_turn(self, tables: dict[str, Tensor], counts: Tensor) -> Tensor:
        """Same contract as TurnSplit.split_plainly."""
        rows = counts.new_zeros(counts.shape[0], tables["logical"].shape[0])
        for k, width in enumerate(self._reaches):
            tokens = torch.where(tables["uses"][k], counts, 0)
            group = tokens.view(-1, width, tokens.shape[1])
            ahead = (group.cumsum(1) - group).view(tokens.shape)
            mine, before = pad(torch.stack([tokens, ahead]), (0, 1))[:, :, tables["logical"]].unbind(0)
            size = tables["size"][k]
            share = mine // size + ((tables["turn"][k] - before) % size < mine % size)
            rows += torch.where(tables["serves"][k], share, 0)
        return rows

    def _share_exactly(self, tables: dict[str, Tensor], counts: Tensor) -> Tensor:
        by_expert, logical = tables["by_expert"], tables["logical"]
        table = SplitTable(tables["fixed_slot"], tables["experts"], tables["replica_slot"], logical.shape[0])
        slot_tokens, outcome = exact_split_reference(counts.sum(0), table)
        self.outcomes[outcome] += 1
        # Tokens of an expert lie in a row, by source rank; its slots cut the same row, in order of slot. Rows of all
        # experts follow each other (a slot without an expert takes none, an expert without tokens has none).
        rank_end = counts.t().reshape(-1).cumsum(0).view(counts.shape[1], -1).t()  # [R, E]
        rank_end = pad(rank_end, (0, 1))  # column E: slots without an expert
        slot_end = slot_tokens[by_expert].cumsum(0)
        ends, starts = torch.empty_like(slot_end), torch.empty_like(slot_end)
        ends[by_expert] = slot_end
        starts[by_expert] = slot_end - slot_tokens[by_expert]
        own_end = rank_end[:, logical]
        own_start = own_end - pad(counts, (0, 1))[:, logical]
        return (torch.minimum(ends, own_end) - torch.maximum(starts, own_start)).clamp(min=0)


def split_table(layer: LayerSlots, num_rows: int = 1) -> SplitTable:
    """Returns the kernel's table of one layer, on the CPU. num_rows: N; more where more experts have replicas"""
    graph = ReplicaGraph.of(layer)
    num_rows = max(num_rows, len(graph.experts))
    experts = torch.full((num_rows,), -1)
    experts[: len(graph.experts)] = torch.tensor(graph.experts, dtype=torch.int64)
    replica_slot = torch.full((num_rows, graph.num_ranks), -1)
    replica_slot[list(graph.owner), list(graph.replica_rank)] = torch.tensor(graph.replica_slot, dtype=torch.int64)
    return SplitTable(torch.from_numpy(graph.fixed_slot), experts, replica_slot, layer.num_slots)


def _assign_tokens(by_expert: Tensor, topk_ids: Tensor, own_rows: Tensor) -> Tensor:
    """Same contract as eplb/split/assign.py; by_expert: [P] all slots by expert, empty ones last."""
    flat = topk_ids.reshape(-1)
    order = torch.sort(torch.where(flat < 0, by_expert.shape[0], flat), stable=True).indices
    # What is left after all experts is -1, sorted to the end; so the size is known without reading anything back.
    shares = torch.cat([own_rows[by_expert], flat.shape[0] - own_rows.sum()[None]])
    physical = torch.empty_like(flat)
    physical[order] = pad(by_expert, (0, 1), value=-1).repeat_interleave(shares, output_size=flat.shape[0])
    return physical.view(topk_ids.shape)
