"""Which ranks can serve which expert of one layer, laid out for the per-batch split.

Built once per placement and layer; every batch then reuses it. A copy is a (replicated expert, rank) pair: two slots
of one expert on the same rank are one copy, served by the lower slot, because a rank streams the weights only once.

Shape words: E = num_logical, R = num_ranks, P = num_slots, C = copies of all replicated experts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_serve.errors import PlacementError


@dataclass(frozen=True, eq=False)
class ReplicaGraph:
    """The replicas of one layer. Build it with `of`.

    num_logical, num_ranks, num_slots: E, R, P
    home_slot:   [E] int64, the slot of an expert that lives on one rank only; -1 for a replicated or lost expert
    experts:     ids of the experts that live on two or more ranks, ascending; "replicated" below
    copy_start:  copies copy_start[i] .. copy_start[i+1]-1 belong to experts[i]
    copy_rank, copy_slot: of each copy, ascending in rank for one expert
    holder_start, holder_copy: copies holder_copy[holder_start[r] .. holder_start[r+1]-1] are on rank r
    """

    num_logical: int
    num_ranks: int
    num_slots: int
    home_slot: NDArray[np.int64]
    experts: tuple[int, ...]
    copy_start: tuple[int, ...]
    copy_rank: tuple[int, ...]
    copy_slot: tuple[int, ...]
    holder_start: tuple[int, ...]
    holder_copy: tuple[int, ...]

    @classmethod
    def of(cls, physical_to_logical: ArrayLike, num_ranks: int, num_logical: int | None = None) -> "ReplicaGraph":
        """Reads one row of a placement: physical_to_logical [P] int, -1 = empty slot.

        num_logical: E; None = highest id + 1
        Raises PlacementError for another shape, a slot count that num_ranks does not divide, or an id out of range.
        """
        row = np.asarray(physical_to_logical)
        if row.ndim != 1 or row.dtype.kind not in "iu" or row.size == 0:
            raise PlacementError(
                f"physical_to_logical has shape {row.shape} and dtype {row.dtype}; give the integers of one layer, "
                "[num_slots]"
            )
        if num_ranks < 1 or row.size % num_ranks:
            raise PlacementError(
                f"physical_to_logical has {row.size} slots, which {num_ranks} ranks cannot share; give a multiple"
            )
        if num_logical is None:
            num_logical = int(row.max()) + 1
        if row.min() < -1 or row.max() >= num_logical:
            raise PlacementError(f"physical_to_logical holds ids {row.min()} .. {row.max()}; they must lie in -1 .. "
                                 f"{num_logical - 1}")  # fmt: skip
        slots_per_rank = row.size // num_ranks
        slots_of: dict[int, dict[int, int]] = {}
        for slot, expert in enumerate(row.tolist()):
            if expert >= 0:
                slots_of.setdefault(expert, {}).setdefault(slot // slots_per_rank, slot)
        home_slot = np.full(num_logical, -1, dtype=np.int64)
        experts: list[int] = []
        copy_start: list[int] = [0]
        copy_rank: list[int] = []
        copy_slot: list[int] = []
        for expert in sorted(slots_of):
            where = slots_of[expert]
            if len(where) == 1:
                home_slot[expert] = next(iter(where.values()))
                continue
            experts.append(expert)
            copy_rank += where.keys()  # slots ascend, so ranks do
            copy_slot += where.values()
            copy_start.append(len(copy_rank))
        home_slot.setflags(write=False)
        holder_copy = sorted(range(len(copy_rank)), key=copy_rank.__getitem__)
        holder_start = np.searchsorted([copy_rank[c] for c in holder_copy], np.arange(num_ranks + 1)).tolist()
        return cls(num_logical, num_ranks, row.size, home_slot, tuple(experts), tuple(copy_start), tuple(copy_rank),
                   tuple(copy_slot), tuple(holder_start), tuple(holder_copy))  # fmt: skip

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @property
    def num_copies(self) -> int:
        return len(self.copy_rank)

    def check_served(self, totals: NDArray[np.int64]) -> None:
        """Raises PlacementError when an expert has tokens (totals [E]) but no slot."""
        lost = (self.home_slot < 0) & (totals > 0)
        lost[list(self.experts)] = False
        if lost.any():
            raise PlacementError(
                f"expert {int(np.argmax(lost))} has tokens but no slot; give a placement in which every expert has one"
            )
