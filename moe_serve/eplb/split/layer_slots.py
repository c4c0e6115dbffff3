"""One layer of a placement as a split sees it: which slots hold an expert, on which rank and node.

Shape words: E = num_logical, R = num_ranks, P = num_slots.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LayerSlots:
    """The slots of one layer. Build it with `of`.

    physical_to_logical: [P] int64, expert of each slot; E = empty slot
    layer_row:           row of the placement; the first turn of an expert differs from layer to layer
    """

    physical_to_logical: Int64s
    num_logical: int
    topology: Topology
    layer_row: int = 0

    @classmethod
    def of(
        cls, physical_to_logical: ArrayLike, topology: Topology, num_logical: int | None = None, layer_row: int = 0
    ) -> "LayerSlots":
        """Returns one row of a placement: physical_to_logical [P] int, -1 = empty slot.

        num_logical: E; None = highest id + 1
        Raises PlacementError for another shape, a slot count that the ranks do not divide, or an id out of range.
        """
        row, num_ranks = np.asarray(physical_to_logical), topology.num_ranks
        if row.ndim != 1 or row.dtype.kind not in "iu" or row.size == 0:
            raise PlacementError(
                f"physical_to_logical has shape {row.shape} and dtype {row.dtype}; give the integers of one layer, "
                "[num_slots]"
            )
        if row.size % num_ranks:
            raise PlacementError(
                f"physical_to_logical has {row.size} slots, which {num_ranks} ranks cannot share; give a multiple"
            )
        if num_logical is None:
            num_logical = int(row.max()) + 1
        if row.min() < -1 or row.max() >= num_logical:
            raise PlacementError(
                f"physical_to_logical holds ids {row.min()} .. {row.max()}; they must lie in -1 .. {num_logical - 1}"
            )
        return cls(np.where(row < 0, num_logical, row).astype(np.int64), num_logical, topology, layer_row)

    @property
    def num_slots(self) -> int:
        return len(self.physical_to_logical)

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.topology.num_ranks

    @cached_property
    def slot_rank(self) -> Int64s:
        """[P] int64, the rank of each slot."""
        return np.arange(self.num_slots) // self.slots_per_rank

    @cached_property
    def by_expert(self) -> Int64s:
        """[P] int64, all slots by expert, then slot; empty ones last."""
        return np.argsort(self.physical_to_logical, kind="stable")

    @cached_property
    def slot_start(self) -> Int64s:
        """[E + 1] int64: by_expert[slot_start[e] : slot_start[e + 1]] are the slots of expert e."""
        return np.searchsorted(self.physical_to_logical[self.by_expert], np.arange(self.num_logical + 1))

    def check(self, counts: Int64s) -> Int64s:
        """Returns counts, [E] or [R, E], with two dimensions.

        Raises PlacementError for other shapes, and for an expert that has tokens but no slot.
        """
        table = counts if counts.ndim == 2 else counts[None]
        if table.shape[1] != self.num_logical or (counts.ndim == 2 and len(counts) != self.topology.num_ranks):
            raise PlacementError(
                f"counts has shape {counts.shape}; give [{self.num_logical}], or [{self.topology.num_ranks}, "
                f"{self.num_logical}] by source rank"
            )
        if len(self._lost) and table[:, self._lost].any():
            expert = self._lost[int(np.argmax(table[:, self._lost].any(axis=0)))]
            raise PlacementError(
                f"expert {expert} has tokens but no slot; give a placement in which every expert has one"
            )
        return table

    @cached_property
    def _lost(self) -> Int64s:
        return np.flatnonzero(self.slot_start[1:] == self.slot_start[:-1])
