"""Decides which rank takes which part of a new placement: an assignment problem per layer.

Ranks of a node are interchangeable, and so are nodes, so a placement that only renames them should move nothing. The
price of giving part j to rank r is what r would have to receive; experts that r's node lacks come over the slow link
and weigh more than all others together.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology

Relabel = Literal["ranks", "nodes", "none", "exact"]


def relabel_ranks(old: Placement, new: Placement, topology: Topology, relabel: Relabel) -> NDArray[np.int64]:
    """Returns [L, P] int64: slot s should take what slot out[l, s] of new holds (slots of a rank stay together)."""
    num_layers, slots_per_rank, num_ranks = old.num_layers, old.slots_per_rank, old.num_ranks
    part = np.tile(np.arange(num_ranks), (num_layers, 1))
    if relabel in ("ranks", "nodes"):
        changed = np.flatnonzero((old.physical_to_logical != new.physical_to_logical).any(axis=1))
        for layer in changed.tolist():
            price = _price(old.physical_to_logical[layer], new.physical_to_logical[layer], old.num_logical, topology)
            part[layer] = _cheapest(price) if relabel == "ranks" else _cheapest_by_node(price, topology)
    slots = part[:, :, None] * slots_per_rank + np.arange(slots_per_rank)
    return slots.reshape(num_layers, -1).astype(np.int64)


def _price(old: NDArray[np.int32], new: NDArray[np.int32], num_logical: int, topology: Topology) -> NDArray[np.float64]:
    """Returns [R, R]: the price of giving part j of new to rank r."""
    held = _holds(old, num_logical, topology.num_ranks)
    held_near = held.reshape(topology.num_nodes, topology.ranks_per_node, -1).max(axis=1)
    held_near = np.repeat(held_near, topology.ranks_per_node, axis=0)
    wants = _holds(new, num_logical, topology.num_ranks)
    size = wants.sum(axis=1, keepdims=True)
    arriving, off_node = size - wants @ held.T, size - wants @ held_near.T
    # Keeping its part saves a rank half a move, so parts change only where that saves a move.
    keep = 0.5 / topology.num_ranks * np.eye(topology.num_ranks)
    return np.asarray((len(old) + 1) * off_node + arriving - keep)


def _holds(row: NDArray[np.int32], num_logical: int, num_ranks: int) -> NDArray[np.float64]:
    """Returns 1 where a rank holds an expert: [P] -> [R, E]."""
    out = np.zeros((num_ranks, num_logical + 1))
    out[np.repeat(np.arange(num_ranks), len(row) // num_ranks), row] = 1.0  # -1 lands in the last column
    return out[:, :-1]


def _cheapest(price: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the part of each rank, [R]."""
    if _is_cheapest_as_it_is(price):
        return np.arange(len(price))
    from scipy.optimize import linear_sum_assignment  # half a second to import; plans of few moves never do

    parts, ranks = linear_sum_assignment(price)
    out = np.empty(len(price), dtype=np.int64)
    out[ranks] = parts
    return out


def _is_cheapest_as_it_is(price: NDArray[np.float64]) -> bool:
    """Returns whether no part has a cheaper rank than its own, as after a plan of few moves."""
    return bool((price.diagonal() <= price.min(axis=1)).all())


def _cheapest_by_node(price: NDArray[np.float64], topology: Topology) -> NDArray[np.int64]:
    """Like `_cheapest`, but the parts of one node go to one node."""
    if _is_cheapest_as_it_is(price):
        return np.arange(len(price))
    nodes, per_node = topology.num_nodes, topology.ranks_per_node
    blocks = price.reshape(nodes, per_node, nodes, per_node).transpose(0, 2, 1, 3)
    inside = [[_cheapest(blocks[a, b]) for b in range(nodes)] for a in range(nodes)]
    total = np.array(
        [[blocks[a, b][inside[a][b], np.arange(per_node)].sum() for b in range(nodes)] for a in range(nodes)]
    )
    node_part = _cheapest(total)
    return np.concatenate([node_part[b] * per_node + inside[node_part[b]][b] for b in range(nodes)])
