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
        slots_of: dict[int, dict[int, int]] = {}
        for slot, expert in enumerate(layer.physical_to_logical.tolist()):
            slots_of.setdefault(expert, {}).setdefault(slot // layer.slots_per_rank, slot)
        slots_of.pop(layer.num_logical, None)  # empty slots
        fixed_slot = np.full(layer.num_logical, -1, dtype=np.int64)
        experts: list[int] = []
        start: list[int] = [0]
        rank_of: list[int] = []
        slot_of: list[int] = []
        owner: list[int] = []
        for expert in sorted(slots_of):
            where = slots_of[expert]
            if len(where) == 1:
                fixed_slot[expert] = next(iter(where.values()))
                continue
            rank_of += where.keys()  # slots ascend, so ranks do
            slot_of += where.values()
            owner += [len(experts)] * len(where)
            experts.append(expert)
            start.append(len(rank_of))
        num_ranks = layer.topology.num_ranks
        holder_replica = sorted(range(len(rank_of)), key=rank_of.__getitem__)
        holder_start = np.searchsorted([rank_of[c] for c in holder_replica], np.arange(num_ranks + 1)).tolist()
        live = sorted({rank for where in slots_of.values() for rank in where}) or range(num_ranks)
        return cls(layer, fixed_slot, tuple(experts), tuple(start), tuple(rank_of), tuple(slot_of), tuple(owner),
                   tuple(holder_start), tuple(holder_replica), tuple(live))  # fmt: skip

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
