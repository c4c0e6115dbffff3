"""The contract of every split of a batch, counts in and rows of every slot out; and the even and the nearest split.

Whole numbers in, whole numbers out: every rank that knows the same counts derives the same table. Serving, replay and
simulation use the same policies; ep/device_split.py has their twins on accelerators. split.c computes the same
integers, faster. It is built at first use with the machine's C compiler and called through ctypes; it is never
required.

In the even and the nearest split every source's tokens go in turn to the slots within its reach, a group of
neighbouring ranks. A source uses the first of its reaches that holds a slot of the expert: the even split knows one,
all ranks; the nearest split its own rank, then its node, then all. Sources of a group take their turns one after the
other, so the slots of a group differ by one row at most. The first turn rotates with expert and layer, or the odd rows
of all experts would pile up on the lowest slots.

Shape words: E = num_logical, R = num_ranks, P = num_slots, S = sources: R, or 1 where sources are not known; K =
reaches.
"""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import find_c_library
from moe_serve.eplb.split.layer import Int64s, LayerSlots, ReplicaGraph
from moe_serve.errors import PlacementError

_SOURCE = Path(__file__).with_name("split.c")
_FUNCTIONS = {"split_counts": 4, "split_and_assign": 7, "count_ids": 4, "split_totals": 1}


class SplitPolicy(ABC):
    """Shares batch after batch of one layer over the slots of its experts.

    native:   the same in C, which `split` then uses; None = plain
    outcomes: [3] int64, batches whose largest rank load was proven the smallest possible at once, after repair, or not
              at all; only the exact split counts them
    """

    def __init__(self, name: str, layer: LayerSlots, native: "NativeSplit | None" = None):
        self.name, self.layer, self.native = name, layer, native
        self.outcomes: Int64s = np.zeros(3, dtype=np.int64) if native is None else native.outcomes

    def split(self, counts: Int64s) -> Int64s:
        """Returns the rows of each slot: counts [E] -> [P], or by source rank [R, E] -> [R, P]; int64.

        Raises PlacementError where an expert has tokens but no slot, or shapes do not fit.
        """
        table = self.layer.check(counts)
        rows = self.split_plainly(table) if self.native is None else self.native.split(table)
        return rows if counts.ndim == 2 else rows[0]

    @abstractmethod
    def split_plainly(self, counts: Int64s) -> Int64s:
        """Returns the rows of each slot by numpy: [S, E] -> [S, P] int64."""


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns split.c, built where no earlier build is found; None, said once, where it cannot be built."""
    return find_c_library(_SOURCE, _FUNCTIONS, "batches are split by numpy")


class NativeSplit:
    """One layer's split and assignment in C. Keeps its buffers, so use one per thread.

    outcomes: as in SplitPolicy
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layer: LayerSlots,
        reaches: tuple[int, ...],
        graph: ReplicaGraph | None = None,
        prices: tuple[int, int] = (0, 0),
    ):
        """reaches: ranks that share their slots, ascending, see `TurnSplit`

        graph:  for the exact split and the split by time, else None
        prices: weight_rows and tile_rows of the split by time; no tiles = by tokens
        """
        num_ranks = layer.topology.num_ranks
        self.outcomes: Int64s = np.zeros(3, dtype=np.int64)
        self._split, self._assign, self._count = library.split_counts, library.split_and_assign, library.count_ids
        self._split_totals = library.split_totals
        # Fixed buffers of a batch without sources: a call with one address takes half the time of one with four.
        self._totals: Int64s = np.zeros(layer.num_logical, dtype=np.int64)
        self._total_rows: Int64s = np.zeros(layer.num_slots, dtype=np.int64)
        self._num_logical, self._num_slots = layer.num_logical, layer.num_slots
        arrays: list[object] = [reaches, layer.slot_start, layer.by_expert]
        sizes, num_replicas = [0, 0, 0], 0
        if graph is None:
            arrays += [()] * 11
        else:
            fixed = np.flatnonzero(graph.fixed_slot >= 0)
            fixed_slot = graph.fixed_slot[fixed]
            sizes, num_replicas = [len(fixed), len(graph.experts), len(graph.live)], graph.num_replicas
            arrays += [fixed, fixed_slot, layer.slot_rank[fixed_slot], graph.experts, graph.replica_start,
                       graph.replica_rank, graph.replica_slot, graph.owner, graph.holder_start, graph.holder_replica,
                       graph.live]  # fmt: skip
        scratch_size = 3 * layer.num_logical + layer.num_slots + 8 * num_ranks + 2 * sizes[1] + 3 * num_replicas
        self._arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in arrays]
        self._arrays += [np.zeros(scratch_size, dtype=np.int64), self._totals, self._total_rows, self.outcomes]
        numbers = [num_ranks, layer.num_logical, layer.num_slots, layer.layer_row, graph is not None, len(reaches)]
        addresses = [array.ctypes.data for array in self._arrays]
        self._layer = np.array([*numbers, *sizes, *prices, *addresses, 0, 0, 0, 0, 0], dtype=np.int64)
        self._graph_without_forest = graph
        self._layer_at = self._layer.ctypes.data

    def split(self, counts: Int64s) -> Int64s:
        """Returns the rows of each slot: [S, E] -> [S, P] int64."""
        if len(counts) == 1:
            if self._graph_without_forest is not None:
                self._add_forest(self._graph_without_forest)
            self._totals[:] = counts[0]
            self._split_totals(self._layer_at)
            return self._total_rows[None].copy()
        counts = np.ascontiguousarray(counts, dtype=np.int64)
        rows = np.empty((len(counts), self._num_slots), dtype=np.int64)
        self._split(self._layer_at, counts.ctypes.data, len(counts), rows.ctypes.data)
        return rows

    def _add_forest(self, graph: ReplicaGraph) -> None:
        """Gives C the forest of the graph. A server, which knows the sources of its batches, never asks for it."""
        forest = graph.forest
        arrays = [forest.child, forest.parent, forest.child_replica, forest.parent_replica]
        added = [np.array(array, dtype=np.int64) for array in arrays]
        self._arrays += added
        self._layer[-5:] = [len(forest.child), *(array.ctypes.data for array in added)]
        self._graph_without_forest = None

    def split_and_assign(
        self, counts_at: int, rank: int, ids_at: int, num_ids: int, rows_at: int, physical_at: int
    ) -> None:
        """Splits a batch and assigns this rank's tokens to slots, between addresses of contiguous int64 arrays.

        counts_at: [R, E];  ids_at: [num_ids] logical experts of this rank, -1 = none
        rows_at: [R, P] out;  physical_at: [num_ids] out, the slot of each id
        """
        self._assign(self._layer_at, counts_at, rank, ids_at, num_ids, rows_at, physical_at)

    def count(self, ids_at: int, num_ids: int, counts_at: int) -> None:
        """Counts how many ids name each expert: [num_ids] -> [E], between addresses likewise."""
        self._count(ids_at, num_ids, self._num_logical, counts_at)


@dataclass(frozen=True, eq=False)
class TurnTables:
    """The slots of one layer that take turns; see `turn_tables`.

    size:   [K, P] int64, slots that the expert of a slot has within that slot's group
    turn:   [K, P] int64, which of them the slot is, less the rotation
    uses:   [K, R, E] bool, whether this is the first reach of a source that holds the expert
    serves: [K, R, P] bool, whether a slot takes tokens of a source
    """

    size: Int64s
    turn: Int64s
    uses: NDArray[np.bool_]
    serves: NDArray[np.bool_]


class TurnSplit(SplitPolicy):
    """Slots take tokens in turn. reaches: ranks of a group, ascending, each a multiple of the one before."""

    def __init__(self, name: str, layer: LayerSlots, reaches: tuple[int, ...], library: ctypes.CDLL | None = None):
        super().__init__(name, layer, None if library is None else NativeSplit(library, layer, reaches))
        self.reaches = reaches

    @cached_property
    def _tables(self) -> TurnTables:
        return turn_tables(self.layer, self.reaches)

    def split(self, counts: Int64s) -> Int64s:
        if counts.ndim != 2 and len(self.reaches) > 1:
            raise PlacementError(
                f"the {self.name} split needs counts by source rank [num_ranks, num_logical], not shape "
                f"{counts.shape}; give them, or use even or exact"
            )
        return super().split(counts)

    def split_plainly(self, counts: Int64s) -> Int64s:
        tables, num_sources = self._tables, len(counts)
        rows = np.zeros((num_sources, self.layer.num_slots), dtype=np.int64)
        for k, width in enumerate(self.reaches):
            tokens = np.where(tables.uses[k, :num_sources], counts, 0)
            group = tokens.reshape(-1, min(width, num_sources), tokens.shape[1])
            ahead = (group.cumsum(axis=1) - group).reshape(tokens.shape)  # tokens of lower ranks of the group
            both = np.pad(np.stack([tokens, ahead]), ((0, 0), (0, 0), (0, 1)))  # a column for empty slots
            mine, before = both[:, :, self.layer.physical_to_logical]
            share = mine // tables.size[k] + ((tables.turn[k] - before) % tables.size[k] < mine % tables.size[k])
            rows += np.where(tables.serves[k, :num_sources], share, 0)
        return rows


def turn_tables(layer: LayerSlots, reaches: tuple[int, ...]) -> TurnTables:
    """Returns the tables of one layer; reaches as in TurnSplit."""
    logical, num_columns = layer.physical_to_logical, layer.num_logical + 1  # the last one: empty slots
    ranks = np.arange(layer.topology.num_ranks)
    size, turn, uses, serves = [], [], [], []
    served = np.zeros((len(ranks), num_columns), dtype=bool)
    served[:, -1] = True
    for width in reaches:
        keys = layer.slot_rank // width * num_columns + logical  # equal for slots that take turns
        order = np.argsort(keys, kind="stable")
        ordinal = np.empty_like(order)
        ordinal[order] = np.arange(len(order)) - np.searchsorted(keys[order], keys[order])
        held = np.bincount(keys, minlength=len(ranks) // width * num_columns)
        near = held.reshape(-1, num_columns)[ranks // width] > 0
        used = near & ~served
        served |= near
        size.append(held[keys])
        turn.append(ordinal - logical - layer.layer_row)
        uses.append(used[:, :-1])
        serves.append(used[:, logical] & (ranks[:, None] // width == layer.slot_rank // width))
    return TurnTables(*(np.stack(table) for table in (size, turn, uses, serves)))
