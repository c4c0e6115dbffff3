"""The contract of every split of a batch: counts in, rows of every slot out.

Whole numbers in, whole numbers out: every rank that knows the same counts derives the same table. Serving, replay and
simulation use the same policies; ep/device_split.py has their twins on accelerators.

split.c computes the same integers, faster. It is built at first use with the machine's C compiler and called through
ctypes; it is never required.

Shape words: E = num_logical, R = num_ranks, P = num_slots, S = sources: R, or 1 where sources are not known.
"""

import ctypes
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

import numpy as np

from moe_serve.c_library import find_c_library, load_c_library
from moe_serve.eplb.split.layer import Int64s, LayerSlots, ReplicaGraph

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


def build_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """Returns split.c, built where no earlier build is found; see c_library.py for where, and what it raises."""
    return load_c_library(_SOURCE, _FUNCTIONS, folder=cache_dir)[0]


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns split.c, built where no earlier build is found; None, said once, where it cannot be built."""
    return find_c_library(_SOURCE, _FUNCTIONS, "batches are split by numpy")


class NativeSplit:
    """One layer's split and assignment in C. Keeps its buffers, so use one per thread.

    outcomes: as of SplitPolicy
    """

    def __init__(
        self, library: ctypes.CDLL, layer: LayerSlots, reaches: tuple[int, ...], graph: ReplicaGraph | None = None
    ):
        """reaches: ranks that share their slots, ascending, see in_turn.py;  graph: for the exact split, else None"""
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
        scratch_size = 3 * layer.num_logical + layer.num_slots + 6 * num_ranks + 2 * (sizes[1] + num_replicas)
        self._arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in arrays]
        self._arrays += [np.zeros(scratch_size, dtype=np.int64), self._totals, self._total_rows, self.outcomes]
        numbers = [num_ranks, layer.num_logical, layer.num_slots, layer.layer_row, graph is not None, len(reaches)]
        addresses = [array.ctypes.data for array in self._arrays]
        self._layer = np.array([*numbers, *sizes, *addresses, 0, 0, 0, 0, 0], dtype=np.int64)
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
