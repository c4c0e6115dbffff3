"""Which ranks can serve which expert of one layer, laid out for the exact split.

Built once per placement and layer; every batch then reuses it. A replica here is a (replicated expert, rank) pair: two
slots of one expert on the same rank are one replica, served by the lower slot, because a rank streams the weights only
once.

Shape words: E = num_logical, R = num_ranks, P = num_slots, C = replicas of all replicated experts.
"""

from dataclasses import dataclass

import numpy as np

from moe_serve.eplb.split.layer_slots import Int64s, LayerSlots


@dataclass(frozen=True, eq=False)
class ReplicaGraph:
    """The replicas of one layer. Build it with `of`.

    fixed_slot:    [E] int64, the slot of an expert that lives on one rank only; -1 for a replicated or lost expert
    experts:       [X] ids of the experts that live on two or more ranks, ascending; "replicated" below
    replica_start: [X + 1]: replicas replica_start[i] .. replica_start[i + 1] - 1 belong to experts[i]
    replica_rank, replica_slot: [C], of each replica, ascending in rank for one expert
    owner:         [C], of each replica, the i of experts[i]
    holder_start, holder_replica: [R + 1], [C]: holder_replica[holder_start[r] : holder_start[r + 1]] are on rank r
    live:          ranks that have a slot in use; all ranks where none has
    """

    layer: LayerSlots
    fixed_slot: Int64s
    experts: tuple[int, ...]
    replica_start: tuple[int, ...]
    replica_rank: tuple[int, ...]
    replica_slot: tuple[int, ...]
    owner: tuple[int, ...]
    holder_start: tuple[int, ...]
    holder_replica: tuple[int, ...]
    live: tuple[int, ...]

    @classmethod
    def of(cls, layer: LayerSlots) -> "ReplicaGraph":
        """Returns the graph of one layer."""
        num_ranks = layer.topology.num_ranks
        slots = layer.by_expert[: layer.slot_start[-1]]  # without the empty ones
        expert_of, rank_of = layer.physical_to_logical[slots], slots // layer.slots_per_rank
        # Slots of an expert ascend, so a rank's are neighbours, the lowest first.
        is_lowest = np.ones(len(slots), dtype=bool)
        is_lowest[1:] = (expert_of[1:] != expert_of[:-1]) | (rank_of[1:] != rank_of[:-1])
        slots, expert_of, rank_of = slots[is_lowest], expert_of[is_lowest], rank_of[is_lowest]
        ranks_with = np.bincount(expert_of, minlength=layer.num_logical)
        is_fixed = ranks_with[expert_of] == 1
        fixed_slot = np.full(layer.num_logical, -1, dtype=np.int64)
        fixed_slot[expert_of[is_fixed]] = slots[is_fixed]
        experts = np.flatnonzero(ranks_with > 1)
        replica_rank, num_replicas = rank_of[~is_fixed], ranks_with[experts]
        holder_replica = np.argsort(replica_rank, kind="stable")
        arrays = (
            experts,
            np.concatenate([[0], num_replicas.cumsum()]),
            replica_rank,
            slots[~is_fixed],
            np.repeat(np.arange(len(experts)), num_replicas),
            np.searchsorted(replica_rank[holder_replica], np.arange(num_ranks + 1)),
            holder_replica,
            np.flatnonzero(np.bincount(rank_of, minlength=num_ranks)) if len(slots) else np.arange(num_ranks),
        )
        return cls(layer, fixed_slot, *(tuple(array.tolist()) for array in arrays))

    @property
    def num_ranks(self) -> int:
        return self.layer.topology.num_ranks

    @property
    def num_replicas(self) -> int:
        return len(self.replica_rank)

    def to_slots(self, counts: Int64s, replica_tokens: Int64s) -> Int64s:
        """Returns rows of every slot: counts [S, E], replica_tokens [S, C] -> [S, P] int64."""
        rows = np.zeros((len(counts), self.layer.num_slots), dtype=np.int64)
        fixed = np.flatnonzero(self.fixed_slot >= 0)
        rows[:, self.fixed_slot[fixed]] = counts[:, fixed]
        rows[:, self.replica_slot] = replica_tokens
        return rows
