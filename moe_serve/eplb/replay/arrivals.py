"""Counts the experts that ranks must receive to get from one placement to another."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Experts that ranks receive, over all layers.

    from_node, off_node: [R] int64, experts whose nearest replica was on the same node, or on another one
    by_expert:           [L, E] int64, ranks that receive the expert
    """

    from_node: NDArray[np.int64]
    off_node: NDArray[np.int64]
    by_expert: NDArray[np.int64]

    @property
    def num_moves(self) -> int:
        return int(self.from_node.sum() + self.off_node.sum())


def arrivals(old: Placement, new: Placement, topology: Topology) -> Arrivals:
    """Returns how many experts each rank must receive; the slots of a rank are interchangeable."""
    before, after = _holds(old), _holds(new)
    received = after & ~before
    nodes = before.reshape(old.num_layers, topology.num_nodes, topology.ranks_per_node, -1).any(axis=2)
    near = received & np.repeat(nodes, topology.ranks_per_node, axis=1)
    from_node = near.sum(axis=(0, 2))
    return Arrivals(from_node, received.sum(axis=(0, 2)) - from_node, received.sum(axis=1))


def _holds(placement: Placement) -> NDArray[np.bool_]:
    """Returns [L, R, E], whether a rank holds an expert."""
    table = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1)
    out = np.zeros((placement.num_layers, placement.num_ranks, placement.num_logical + 1), dtype=bool)
    np.put_along_axis(out, table.astype(np.int64) % (placement.num_logical + 1), True, axis=2)
    return out[:, :, :-1]
