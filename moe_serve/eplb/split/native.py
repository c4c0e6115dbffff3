"""exact.c, built at first use with the machine's C compiler and called through ctypes.

Never required: without a compiler the Python twin gives the same answer, some thirty times slower.
"""

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import load_c_library
from moe_serve.eplb.split.exact import ExactSplit
from moe_serve.eplb.split.replica_graph import ReplicaGraph

Int64s = NDArray[np.int64]
_SOURCE = Path(__file__).with_name("exact.c")
_ARRAYS = ("home_expert", "home_slot", "home_rank", "experts", "copy_start", "copy_rank", "copy_slot", "owner",
           "holder_start", "holder_copy", "live")  # fmt: skip


class _Graph(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_ranks", "num_slots", "num_homes", "num_replicated", "num_live")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    ]


def build_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """Returns exact.c, built where no earlier build is found; see c_library.py for where, and what it raises."""
    library, _ = load_c_library(_SOURCE, {"moe_serve_split_exact": 9}, folder=cache_dir)
    library.moe_serve_split_exact.argtypes = [ctypes.c_void_p] * 9
    return library


class NativeSplit:
    """The compiled exact split of one graph. Keeps its buffers, so use one per thread."""

    def __init__(self, library: ctypes.CDLL, graph: ReplicaGraph) -> None:
        self.graph = graph
        self._call = library.moe_serve_split_exact
        homes = np.flatnonzero(graph.home_slot >= 0)
        home_slot = graph.home_slot[homes]
        home_rank = home_slot // graph.slots_per_rank
        live = np.unique(np.concatenate([home_rank, np.array(graph.copy_rank, dtype=np.int64)]))
        if not live.size:
            live = np.arange(graph.num_ranks)
        owner = np.repeat(np.arange(len(graph.experts)), np.diff(graph.copy_start))
        values = (homes, home_slot, home_rank, graph.experts, graph.copy_start, graph.copy_rank, graph.copy_slot, owner,
                  graph.holder_start, graph.holder_copy, live)  # fmt: skip
        self._arrays = [np.ascontiguousarray(value, dtype=np.int64) for value in values]
        self._struct = _Graph(graph.num_ranks, graph.num_slots, len(homes), len(graph.experts), len(live),
                              *(a.ctypes.data for a in self._arrays))  # fmt: skip
        self._given = np.zeros(graph.num_copies, dtype=np.int64)
        self._load = np.zeros(graph.num_ranks, dtype=np.int64)
        self._cut = np.zeros(graph.num_ranks + 1, dtype=np.int64)  # the last entry is how many count
        self._scratch = np.zeros(2 * len(graph.experts) + graph.num_copies + 4 * graph.num_ranks, dtype=np.int64)
        self._graph_at = ctypes.addressof(self._struct)
        self._given_at, self._load_at, self._cut_at, self._scratch_at = (
            a.ctypes.data for a in (self._given, self._load, self._cut, self._scratch)
        )
        self._num_cut_at = self._cut_at + 8 * graph.num_ranks

    def slot_tokens(self, counts: Int64s) -> Int64s:
        """Returns tokens per slot [P] int64 of the optimal split. counts: [E] int64, contiguous."""
        out = np.empty(self.graph.num_slots, dtype=np.int64)
        self._call(self._graph_at, counts.ctypes.data, None, self._given_at, self._load_at, out.ctypes.data,
                   self._cut_at, self._num_cut_at, self._scratch_at)  # fmt: skip
        return out

    def split(self, counts: Int64s, start: Int64s | None = None) -> ExactSplit:
        """Returns what `split_exact` returns. counts: [E], start: [C] or None; int64, contiguous."""
        start_at = None if start is None else start.ctypes.data
        max_load = self._call(self._graph_at, counts.ctypes.data, start_at, self._given_at, self._load_at, None,
                              self._cut_at, self._num_cut_at, self._scratch_at)  # fmt: skip
        cut = tuple(sorted(self._cut[: self._cut[-1]].tolist()))
        return ExactSplit(self._given.copy(), self._load.copy(), int(max_load), cut)
