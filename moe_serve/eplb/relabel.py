"""Decides which rank takes which part of a new placement: an assignment problem per layer.

Ranks of a node are interchangeable, and so are nodes, so a placement that only renames them should move nothing. The
price of giving part j to rank r is what r would have to receive; experts that r's node lacks come over the slow link
and weigh more than all others together.

Shape words: L = layers, E = experts, R = ranks, K = slots per rank, N = nodes.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import find_c_library
from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
Relabel = Literal["ranks", "nodes", "inside", "none", "exact"]
WHAT = ("ranks", "nodes", "inside")  # numbered as in assignment.c
FORBIDDEN = 1 << 40  # above every price of a layer, and small enough for sums
_SOURCE = Path(__file__).with_name("assignment.c")
_NEVER = np.iinfo(np.int64).max


def relabel_ranks(old: Placement, new: Placement, topology: Topology, relabel: Relabel) -> Ints:
    """Returns [L, P] int64: slot s should take what slot out[l, s] of new holds (slots of a rank stay together)."""
    node_of = np.arange(topology.num_ranks) // topology.ranks_per_node
    part = cheapest_parts(old.by_rank, new.by_rank, node_of, relabel)
    slots = part[:, :, None] * old.slots_per_rank + np.arange(old.slots_per_rank)
    return slots.reshape(old.num_layers, -1)


def cheapest_parts(old: Ids, new: Ids, node_of: Ints, relabel: Relabel) -> Ints:
    """Returns which rank's part of `new` each rank takes, [L, R] int64: old, new [L, R, K]; node_of [R], ascending.

    relabel: what may be exchanged: "ranks" any two ranks, "nodes" nodes of as many ranks, and ranks inside a node,
             "inside" ranks inside a node; else nothing
    A rank without experts keeps its empty part: it may be one that is lost.
    """
    library = find_library()
    if library is None:
        return cheapest_parts_reference(old, new, node_of, relabel)
    part = _as_they_are(old)
    if relabel in WHAT:
        old, new = (np.ascontiguousarray(table, dtype=np.int32) for table in (old, new))
        node_of = np.ascontiguousarray(node_of, dtype=np.int64)
        width = int(max(old.max(initial=0), new.max(initial=0))) + 1
        numbers = [*old.shape, width, int(node_of[-1]) + 1, WHAT.index(relabel), FORBIDDEN]
        task = np.array([*numbers, *(array.ctypes.data for array in (old, new, node_of, part))], dtype=np.int64)
        if library.cheapest_parts(task.ctypes.data):
            raise MemoryError("no memory to relabel a placement")
    return part


def cheapest_parts_reference(old: Ids, new: Ids, node_of: Ints, relabel: Relabel) -> Ints:
    """Same contract as `cheapest_parts`, in numpy."""
    part = _as_they_are(old)
    for layer in np.flatnonzero((old != new).any(axis=(1, 2))).tolist() if relabel in WHAT else ():
        price = _price(old[layer], new[layer], node_of)
        if relabel == "nodes":
            part[layer] = _by_node(price, node_of)
            continue
        if relabel == "inside":
            price[node_of[:, None] != node_of] = FORBIDDEN
        part[layer] = cheapest_columns_reference(price)
    return part


def _as_they_are(table: Ids) -> Ints:
    return np.tile(np.arange(table.shape[1], dtype=np.int64), (len(table), 1))


def _price(old: Ids, new: Ids, node_of: Ints) -> Ints:
    """Returns [R, R]: the price of giving part j of new to rank r; old, new [R, K]."""
    num_ranks, slots = old.shape
    rank = np.arange(num_ranks)
    size = _distinct(new).sum(axis=1)
    # Keeping its part saves a rank half a move over all ranks, so that parts change only where that saves moves.
    move, off_node = 2 * num_ranks, 2 * num_ranks * (num_ranks * slots + 1)
    near = np.zeros((int(node_of[-1]) + 1) * num_ranks, dtype=np.int64)
    np.add.at(near, _common(old, new, node_of), off_node)
    price: Ints = ((off_node + move) * size - near.reshape(-1, num_ranks))[node_of]
    np.subtract.at(price.reshape(-1), _common(old, new, rank), move)
    price[rank, rank] -= 1
    empty = size == 0
    if empty.any():
        price[empty] = price[:, empty] = FORBIDDEN
        price[rank[empty], rank[empty]] = 0
    return price


def _common(old: Ids, new: Ids, holder_of: Ints) -> Ints:
    """Returns holder x R + rank for each expert that a holder has in old and a rank in new: holder_of [R] of old."""
    num_ranks, slots = new.shape
    width = int(max(old.max(initial=0), new.max(initial=0))) + 1
    flat = old.reshape(-1)
    held = np.unique((np.repeat(holder_of, slots) * width + flat)[flat >= 0])
    holder, expert = held // width, held % width
    holder, count = holder[np.argsort(expert, kind="stable")], np.bincount(expert, minlength=width)
    first = np.cumsum(count) - count
    rank, slot = np.nonzero(_distinct(new))
    wanted = new[rank, slot]
    times = count[wanted]  # each wanted expert meets all of its holders
    place = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times) + np.repeat(first[wanted], times)
    pairs: Ints = holder[place] * num_ranks + np.repeat(rank, times)
    return pairs


def _distinct(table: Ids) -> NDArray[np.bool_]:
    """Returns which slots [R, K] hold an expert that no earlier slot of their rank holds."""
    same = (table[:, :, None] == table[:, None, :]) & (np.arange(table.shape[1])[:, None] > np.arange(table.shape[1]))
    return np.asarray((table >= 0) & ~same.any(axis=2))


def _by_node(price: Ints, node_of: Ints) -> Ints:
    """Returns the part of each rank, [R], where the parts of one node go to one node."""
    if (price.diagonal() <= price.min(axis=1)).all():
        return np.arange(len(price))  # as after a plan of few moves
    ranks = [np.flatnonzero(node_of == node) for node in range(int(node_of[-1]) + 1)]
    total = np.full((len(ranks), len(ranks)), len(node_of) * FORBIDDEN)
    inside: dict[tuple[int, int], Ints] = {}
    for a, mine in enumerate(ranks):
        for b, theirs in enumerate(ranks):
            if len(mine) == len(theirs):
                block = price[mine[0] : mine[-1] + 1, theirs[0] : theirs[-1] + 1]
                chosen = cheapest_columns_reference(block)
                inside[a, b] = theirs[chosen]
                total[a, b] = block[np.arange(len(mine)), chosen].sum()
    return np.concatenate([inside[a, int(b)] for a, b in enumerate(cheapest_columns_reference(total))])


def cheapest_columns(price: Ints) -> Ints:
    """Solves the assignment problem: price [n, n] int64, at most 2^60 in size -> column of each row, [n] int64.

    Rows whose cheapest column is free take it; each other one finds the cheapest chain of rows that would change theirs
    (Kuhn, Munkres; Jonker, Volgenant). Prices are whole numbers, so that every machine finds the same. assignment.c,
    built at first use, is about a hundred times faster.
    """
    library = find_library()
    if library is None:
        return cheapest_columns_reference(price)
    price = np.ascontiguousarray(price, dtype=np.int64)
    column = np.empty(len(price), dtype=np.int64)
    if library.cheapest_columns(len(price), price.ctypes.data, column.ctypes.data):
        raise MemoryError("no memory to relabel a placement")
    return column


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns assignment.c, or None where it cannot be built, which the log says once."""
    otherwise = "ranks are relabelled by numpy, about a hundred times slower"
    return find_c_library(_SOURCE, {"cheapest_columns": 3, "cheapest_parts": 1}, otherwise)


def cheapest_columns_reference(price: Ints) -> Ints:
    """Same contract as `cheapest_columns`, in numpy."""
    size = len(price)
    of_row, of_column = price.min(axis=1), np.zeros(size, dtype=np.int64)
    row, column = np.full(size, -1), np.full(size, -1)
    for i in range(size):
        free = np.flatnonzero((row < 0) & (price[i] == of_row[i]))
        if len(free):
            row[free[0]], column[i] = i, free[0]
    for start in np.flatnonzero(column < 0).tolist():
        least, before, reached = np.full(size, _NEVER), np.full(size, -1), np.zeros(size, dtype=bool)
        i, last = start, -1
        while i >= 0:
            rest = price[i] - of_row[i] - of_column
            nearer = ~reached & (rest < least)
            least[nearer], before[nearer] = rest[nearer], last
            last = int(np.where(reached, _NEVER, least).argmin())
            step = least[last]
            of_row[start] += step
            of_row[row[reached]] += step
            of_column[reached] -= step
            least[~reached] -= step
            reached[last] = True
            i = int(row[last])
        while last >= 0:
            previous = int(before[last])
            row[last] = start if previous < 0 else row[previous]
            column[row[last]] = last
            last = previous
    return column.astype(np.int64)
