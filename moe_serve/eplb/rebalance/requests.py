"""A rebalancer's question to a policy, about some layers of its placement, and the answer as a whole placement.

Shape words: L = MoE layers, E = experts, P = slots.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan, PlanRequest, PlanRules
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]


def request_for(
    current: Placement,
    rows: NDArray[np.int64],
    load: tuple[Floats, Floats | None, Floats | None],
    topology: Topology,
    rules: PlanRules,
) -> PlanRequest:
    """Returns the request for these rows of the placement. load: of all layers, as from `Gate.planning_load`."""
    tokens, by_source, activations = load
    part = replace(
        current,
        physical_to_logical=current.physical_to_logical[rows],
        moe_layer_ids=tuple(current.moe_layer_ids[row] for row in rows),
    )
    return rules.request(
        tokens[rows],
        topology,
        current.num_slots,
        current=part,
        by_source=None if by_source is None else by_source[rows],
        activations=None if activations is None else activations[rows],
        excluded_ranks=tuple(ranks_without_experts(current).tolist()),
    )


def with_plan(current: Placement, plan: Plan, rows: tuple[int, ...]) -> Placement:
    """Returns the placement with the plan's layers in these rows. Raises PlacementError where the plan does not fit."""
    have = (plan.placement.num_layers, plan.placement.num_logical, plan.placement.num_slots)
    need = (len(rows), current.num_logical, current.num_slots)
    if have != need:
        raise PlacementError(f"the plan has (layers, experts, slots) = {have}, the request {need}")
    table = current.physical_to_logical.copy()
    table[list(rows)] = plan.placement.physical_to_logical
    return replace(current, physical_to_logical=table)


def ranks_without_experts(placement: Placement) -> NDArray[np.int64]:
    """Returns the ranks that hold no expert, such as lost ones; plans leave them empty."""
    used = (placement.physical_to_logical >= 0).reshape(-1, placement.num_ranks, placement.slots_per_rank)
    return np.flatnonzero(~used.any(axis=(0, 2)))


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
