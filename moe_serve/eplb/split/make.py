"""Makes splits by name: for one layer, or for a whole placement."""

import ctypes
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.exact import ExactSplit, FewestActivatedSplit
from moe_serve.eplb.split.layer import Int64s, LayerSlots
from moe_serve.eplb.split.policy import SplitPolicy, TurnSplit, find_library
from moe_serve.eplb.split.time import ExpertTime, TimeSplit
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology

ServedSplit = Literal["even", "nearest", "exact", "time"]
SPLITS = ("even", "nearest", "exact", "time", "fewest_activated")
SEARCHED_SPLITS = ("exact", "time")  # they take time of their own, so a server compares them with the even one
MAX_TOKENS = 2**53


class BatchSplit:
    """Splits batch after batch of one layer exactly: the smallest possible largest rank load.

    It keeps what it knows of the layer, so a call takes microseconds where a C compiler is found. One per thread.
    """

    def __init__(
        self,
        physical_to_logical: ArrayLike,
        num_ranks: int,
        num_logical: int | None = None,
        topology: Topology | None = None,
    ) -> None:
        """Takes one layer of a placement.

        physical_to_logical: [num_slots] int, -1 = empty slot
        num_logical:         None = highest id + 1
        topology:            nodes, for counts by rank; None = all ranks on one node
        Raises PlacementError when shapes or ids do not fit.
        """
        layer = LayerSlots.of(physical_to_logical, topology or Topology(1, num_ranks), num_logical)
        self._policy = make_split("exact", layer, find_library())
        self._num_ranks = num_ranks
        self._small = MAX_TOKENS // max(layer.num_logical * num_ranks, 1)  # counts up to it cannot sum to too many

    def split(self, counts: ArrayLike) -> Int64s:
        """Returns the tokens of each slot, [num_slots] int64, or what each rank sends to each, [num_ranks, num_slots].

        counts: [num_logical] int, tokens of each expert in the batch, or [num_ranks, num_logical] by the rank they come
                from; then they take the shortest routes
        Raises PlacementError when an expert with tokens has no slot, or shapes do not fit.
        """
        array = np.asarray(counts)
        plain = array.dtype == np.int64 and array.ndim in (1, 2) and array.size and array.flags.c_contiguous
        if not plain or array.view(np.uint64).max() > self._small:  # a negative one is a large one there
            array = _checked(counts, self._num_ranks)
        return self._policy.split(array)


def make_split(
    name: str, layer: LayerSlots, library: ctypes.CDLL | None = None, time: ExpertTime | None = None
) -> SplitPolicy:
    """Returns the split policy of this name for one layer.

    even:             all slots of an expert get the same number of tokens, to within one
    nearest:          every source uses the slots on its own rank, else those on its node, else all, evenly; needs
                      counts by source
    exact:            the smallest possible largest rank load; by source: over the shortest routes at that load
    time:             a largest rank time near the smallest possible one, where reading the weights of an expert takes
                      time whatever its tokens
    fewest_activated: all tokens of an expert on one replica, so that the rank with most active experts has as few as
                      possible
    library: of policy.py, for the same integers in C; None = plain
    time:    what the split by time balances; others do not ask
    Raises ConfigError for another name, and for the split by time without times.
    """
    reaches = (1, layer.topology.ranks_per_node, layer.topology.num_ranks)
    match name:
        case "even":
            return TurnSplit(name, layer, reaches[2:], library)
        case "nearest":
            return TurnSplit(name, layer, reaches, library)
        case "exact":
            return ExactSplit(layer, reaches, library)
        case "time":
            if time is None:
                raise ConfigError(
                    "the time split needs the times of experts; give --model and --hardware, or use exact"
                )
            return TimeSplit(layer, reaches, time, library)
        case "fewest_activated":
            return FewestActivatedSplit(layer)
    raise ConfigError(f"split {name!r} is unknown; use one of {', '.join(SPLITS)}")


def make_splits(
    name: str,
    placement: Placement,
    topology: Topology | None = None,
    library: ctypes.CDLL | None = None,
    time: ExpertTime | None = None,
) -> list[SplitPolicy]:
    """Returns the split policy of every layer of a placement; topology None = all ranks on one node."""
    return [make_split(name, layer, library, time) for layer in layers_of(placement, topology)]


def layers_of(
    placement: Placement, topology: Topology | None = None, rows: Iterable[int] | None = None
) -> list[LayerSlots]:
    """Returns the slots of these rows of a placement, None = of all layers.

    Raises PlacementError when the topology has another number of ranks.
    """
    topology = topology or Topology(1, placement.num_ranks)
    if topology.num_ranks != placement.num_ranks:
        raise PlacementError(
            f"the topology has {topology.num_ranks} ranks, the placement {placement.num_ranks}; give those of one "
            "cluster"
        )
    table = placement.physical_to_logical
    rows = range(len(table)) if rows is None else rows
    return [LayerSlots.of(table[row], topology, placement.num_logical, row) for row in rows]


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


def assign_tokens(layer: LayerSlots, topk_ids: Int64s, own_rows: Int64s) -> Int64s:
    """Returns physical ids: an expert's tokens of one rank, in order, fill its slots in slot order, each to its share.

    topk_ids: [T, K] int64, logical experts of this rank's tokens, -1 = none
    own_rows: [P] int64, the rows of this rank for every slot, which sum to those of topk_ids for every expert
    returns:  [T, K] int64; -1 stays -1
    """
    flat = topk_ids.reshape(-1)
    order = np.argsort(np.where(flat < 0, layer.num_logical, flat), kind="stable")
    slots = np.repeat(layer.by_expert, own_rows[layer.by_expert])
    physical = np.full(flat.shape, -1, dtype=np.int64)
    physical[order[: len(slots)]] = slots
    return physical.reshape(topk_ids.shape)
