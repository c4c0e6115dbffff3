"""How the tokens of one batch are shared over the replicas of an expert, for one layer.

`split_batch` is the exact answer in one call. The policies do the same for whoever serves batch after batch: they take
a ReplicaGraph that was built once per placement. Whole numbers in, whole numbers out: every rank that knows the
all-gathered counts derives the same table.

Shape words: E = num_logical, R = num_ranks, P = num_slots.
"""

from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_serve.eplb.split.exact import split_exact
from moe_serve.eplb.split.native import NativeSplit, build_library
from moe_serve.eplb.split.replica_graph import ReplicaGraph
from moe_serve.eplb.split.sources import CopyWays, send_nearest, send_short, start_near, take_turns
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology

Int64s = NDArray[np.int64]
SPLITS = ("even", "nearest", "exact", "fewest_activated")
MAX_TOKENS = 2**53


def split_batch(
    counts: ArrayLike, physical_to_logical: ArrayLike, num_ranks: int, topology: Topology | None = None
) -> Int64s:
    """Returns the exact split of one batch: tokens per slot, with the smallest possible largest rank load.

    counts:              [num_logical] int, tokens of each expert in the batch, or [num_ranks, num_logical] by the rank
                         they come from
    physical_to_logical: [num_slots] int, one layer of a placement, -1 = empty slot
    topology:            nodes, for counts by rank; None = all ranks on one node
    returns:             [num_slots] int64, or [num_ranks, num_slots]: what each rank sends to each slot, local and
                         same-node slots first
    Raises PlacementError when an expert with tokens has no slot, or shapes do not fit.
    """
    checked = _checked(counts, num_ranks)
    graph = ReplicaGraph.of(physical_to_logical, num_ranks, checked.shape[-1])
    return ExactPolicy(graph, topology).split(checked)


class SplitPolicy(Protocol):
    """Shares the tokens of batch after batch over the slots of one layer."""

    name: str

    def split(self, counts: Int64s) -> Int64s:
        """Returns tokens per slot: [E] -> [P], or by source rank [R, E] -> [R, P]; int64."""
        ...


def make_split(
    name: str,
    graph: ReplicaGraph,
    topology: Topology | None = None,
    compiled: Literal["auto", "always", "never"] = "auto",
) -> SplitPolicy:
    """Returns the split policy of this name for one layer of a placement.

    even:             every copy gets the same number of tokens, to within one
    nearest:          every source uses its own copy, else its node's, else all copies in turn; needs counts by source
    exact:            the smallest possible largest rank load; by source: over the shortest ways at that load
    fewest_activated: all tokens of an expert on one copy, so that the rank with most active experts has as few as
                      possible: decode at small batches is bound by streaming the weights of active experts (METRO)
    topology: None = all ranks on one node
    compiled: of exact: always = the C twin or ConfigError, auto = where a C compiler is found; results are equal
    """
    match name:
        case "even":
            return EvenPolicy(graph, topology)
        case "nearest":
            return NearestPolicy(graph, topology)
        case "exact":
            return ExactPolicy(graph, topology, compiled)
        case "fewest_activated":
            return FewestActivatedPolicy(graph)
    raise ConfigError(f"split {name!r} is unknown; use one of {', '.join(SPLITS)}")


class EvenPolicy:
    """Copies of an expert take its tokens in turn."""

    name = "even"

    def __init__(self, graph: ReplicaGraph, topology: Topology | None = None) -> None:
        self._graph = graph
        self._ways = CopyWays.of(graph, topology or Topology(1, graph.num_ranks))

    def split(self, counts: Int64s) -> Int64s:
        table = _by_source(self._graph, counts)
        copy_tokens = take_turns(table[:, self._graph.experts].T[self._ways.owner], self._ways.in_expert).T
        return _to_slots(self._graph, counts, table, copy_tokens)


class NearestPolicy:
    """Short ways at any load."""

    name = "nearest"

    def __init__(self, graph: ReplicaGraph, topology: Topology | None = None) -> None:
        self._graph = graph
        self._ways = CopyWays.of(graph, topology or Topology(1, graph.num_ranks))

    def split(self, counts: Int64s) -> Int64s:
        if counts.ndim != 2:
            raise PlacementError(f"the nearest split needs counts by source rank [num_ranks, num_logical], not shape "
                                 f"{counts.shape}; give them, or use even or exact")  # fmt: skip
        table = _by_source(self._graph, counts)
        return _to_slots(self._graph, counts, table, send_nearest(self._ways, table[:, self._graph.experts]))


class ExactPolicy:
    """The optimal largest rank load."""

    name = "exact"

    def __init__(
        self,
        graph: ReplicaGraph,
        topology: Topology | None = None,
        compiled: Literal["auto", "always", "never"] = "never",
    ) -> None:
        self._graph = graph
        self._ways = CopyWays.of(graph, topology or Topology(1, graph.num_ranks))
        self._has_lost = int((graph.home_slot < 0).sum()) > len(graph.experts)
        self._native: NativeSplit | None = None
        if compiled != "never":
            try:
                self._native = NativeSplit(build_library(), graph)
            except ConfigError:
                if compiled == "always":
                    raise

    def split(self, counts: Int64s) -> Int64s:
        graph = self._graph
        # The short way for decode; experts without a slot take the long one, which names them.
        if self._native is not None and counts.shape == (graph.num_logical,) and not self._has_lost:
            return self._native.slot_tokens(np.ascontiguousarray(counts, dtype=np.int64))
        table = _by_source(graph, counts)
        totals = table.sum(axis=0)
        graph.check_served(totals)
        tokens = table[:, graph.experts]
        start = start_near(self._ways, tokens) if counts.ndim == 2 else None
        if self._native is not None:
            copy_tokens = self._native.split(totals, start).copy_tokens
        else:
            begin = None if start is None else start.tolist()
            copy_tokens = split_exact(graph, totals.tolist(), begin).copy_tokens
        sent = send_short(self._ways, tokens, copy_tokens) if counts.ndim == 2 else copy_tokens[None]
        return _to_slots(graph, counts, table, sent)


class FewestActivatedPolicy:
    """Each active expert on one copy; the exact split of one token per active expert says which."""

    name = "fewest_activated"

    def __init__(self, graph: ReplicaGraph) -> None:
        self._graph = graph

    def split(self, counts: Int64s) -> Int64s:
        graph = self._graph
        table = _by_source(graph, counts)
        totals = table.sum(axis=0)
        graph.check_served(totals)
        active = (totals > 0).astype(np.int64).tolist()
        chosen = split_exact(graph, active, self._start(totals.tolist())).copy_tokens
        owner = np.repeat(np.arange(len(graph.experts)), np.diff(graph.copy_start))
        return _to_slots(graph, counts, table, table[:, graph.experts][:, owner] * chosen)

    def _start(self, totals: list[int]) -> list[int]:
        """Picks, heaviest expert first, the rank with fewest active experts, then fewest tokens: among choices with
        the same number of active experts this leans to balanced tokens."""
        graph = self._graph
        load = [(0, 0)] * graph.num_ranks
        for slot, tokens in zip(graph.home_slot.tolist(), totals, strict=True):
            if slot >= 0 and tokens:
                rank = slot // graph.slots_per_rank
                load[rank] = (load[rank][0] + 1, load[rank][1] + tokens)
        start = [0] * graph.num_copies
        for i in sorted(range(len(graph.experts)), key=lambda i: -totals[graph.experts[i]]):
            tokens = totals[graph.experts[i]]
            if tokens:
                copies = range(graph.copy_start[i], graph.copy_start[i + 1])
                best = min(copies, key=lambda c: load[graph.copy_rank[c]])
                start[best] = 1
                rank = graph.copy_rank[best]
                load[rank] = (load[rank][0] + 1, load[rank][1] + tokens)
        return start


def _by_source(graph: ReplicaGraph, counts: Int64s) -> Int64s:
    """[E] or [R, E] -> [1, E] or [R, E]."""
    table = counts if counts.ndim == 2 else counts[None]
    if table.shape[1] != graph.num_logical:
        raise PlacementError(
            f"counts has {table.shape[1]} experts, the placement {graph.num_logical}; give one of each"
        )
    return table


def _to_slots(graph: ReplicaGraph, counts: Int64s, table: Int64s, copy_tokens: Int64s) -> Int64s:
    """table [S, E], copy_tokens [S, C] -> [S, P], without the first dimension where counts has none."""
    graph.check_served(table.sum(axis=0))
    out = np.zeros((len(table), graph.num_slots), dtype=np.int64)
    homes = np.flatnonzero(graph.home_slot >= 0)
    out[:, graph.home_slot[homes]] = table[:, homes]
    out[:, graph.copy_slot] = copy_tokens
    return out if counts.ndim == 2 else out[0]


def _checked(counts: ArrayLike, num_ranks: int) -> Int64s:
    array = np.asarray(counts)
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu" or (array.ndim == 2 and len(array) != num_ranks):
        raise PlacementError(
            f"counts has shape {array.shape} and dtype {array.dtype}; give whole numbers, [num_logical] or "
            f"[{num_ranks} ranks, num_logical]"
        )
    if array.size and (array.min() < 0 or sum(array.ravel().tolist()) > MAX_TOKENS):
        raise PlacementError(
            f"counts ranges from {array.min()} to {array.max()}; tokens of a batch are >= 0 and sum to at most 2^53"
        )
    return array.astype(np.int64)
