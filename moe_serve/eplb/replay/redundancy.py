"""Balancedness and memory as functions of the number of slots."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlacementPolicy, PlanRules
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology


@dataclass(frozen=True)
class RedundancyPoint:
    """The balancedness and memory of one number of slots.

    num_slots:        per layer, a multiple of the ranks
    num_redundant:    of these, beyond one per expert
    balancedness:     mean over layers;  worst: of the worst layer;  bound: mean of the proved bounds
    extra_bytes:      memory per rank, over all layers, beyond that of the fewest slots; None = unknown
    """

    num_slots: int
    num_redundant: int
    balancedness: float
    worst: float
    bound: float
    extra_bytes: int | None


@dataclass(frozen=True)
class RedundancyPlan:
    """The curve, and the fewest slots that reach the target (None = none of them does)."""

    points: tuple[RedundancyPoint, ...]
    target: float
    chosen: RedundancyPoint | None


def plan_redundancy(
    tokens: ArrayLike,
    topology: Topology,
    target: float = 0.95,
    slots: Iterable[int] | None = None,
    policy: str | PlacementPolicy = "refined",
    bytes_per_expert: int | None = None,
    rules: PlanRules | None = None,
) -> RedundancyPlan:
    """Returns balancedness over the number of slots, and the fewest that reach `target`.

    tokens:   [L, E] as for `plan`
    slots:    numbers of slots to try; None = from the fewest possible, one slot per rank more at a time, up to
              twice the experts or four more per rank, whichever is less
    bytes_per_expert: weights of one expert in one layer, e.g. ModelSpec.expert_bytes; gives extra_bytes
    rules:    fields of every request
    Raises PlacementError for a target that is not in (0, 1] or slots that do not fit the ranks.

    More slots never hurt: a point whose plan is worse than one with fewer slots takes that one's value, since it could
    leave its additional slots empty.
    """
    load = np.asarray(tokens)
    if not 0 < target <= 1:
        raise PlacementError(f"target is {target!r}; give a balancedness above 0 and at most 1")
    if load.ndim != 2:
        raise PlacementError(f"tokens has shape {load.shape}; give [num_layers, num_logical]")
    num_layers, num_experts = load.shape
    num_ranks = topology.num_ranks
    fewest = -(-num_experts // num_ranks)
    if slots is None:
        most = min(fewest + 4, max(fewest + 1, 2 * num_experts // num_ranks))
        slots = range(fewest * num_ranks, most * num_ranks + 1, num_ranks)
    planner = make_policy(policy) if isinstance(policy, str) else policy
    points: list[RedundancyPoint] = []
    best = np.zeros(num_layers)
    for num_slots in sorted(set(slots)):
        plan = planner.plan((rules or PlanRules()).request(load, topology, num_slots))
        best = np.maximum(best, plan.balancedness)
        extra = num_slots // num_ranks - fewest
        points.append(
            RedundancyPoint(
                num_slots=num_slots,
                num_redundant=num_slots - num_experts,
                balancedness=float(best.mean()) if num_layers else 1.0,
                worst=float(best.min(initial=1.0)),
                bound=float(plan.bound.mean()) if num_layers else 1.0,
                extra_bytes=None if bytes_per_expert is None else extra * bytes_per_expert * num_layers,
            )
        )
    reaches = [p for p in points if p.balancedness >= target]
    return RedundancyPlan(tuple(points), target, reaches[0] if reaches else None)
