"""What a migration costs each layer. Shape words: L = MoE layers."""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology

Floats = NDArray[np.float64]


def costs_by_layer(
    cost: GateCost, move: MigrationPlan, current: Placement, target: Placement, topology: Topology
) -> tuple[Floats, float]:
    """Returns the cost of a migration in seconds, shared out over layers by transfers [L], and that of one.

    move: from current to target; of all layers, or only of those that change
    """
    received = arrivals(current, target)
    price = cost.migration_seconds(move, topology) / max(float(received.sum()), 1.0)
    return price * received, price


def arrivals(old: Placement, new: Placement) -> Floats:
    """Returns [L], how many experts ranks of each layer must receive to get from old to new."""
    out = np.zeros(old.num_layers)
    changed = np.flatnonzero((old.physical_to_logical != new.physical_to_logical).any(axis=1))
    held, wanted = (
        p.physical_to_logical[changed].reshape(len(changed), p.num_ranks, p.slots_per_rank) for p in (old, new)
    )
    present = (wanted[:, :, :, None] == held[:, :, None, :]).any(axis=3)
    out[changed] = (~present & (wanted >= 0)).sum(axis=(1, 2))
    return out
