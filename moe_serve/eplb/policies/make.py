"""Plans by the name of a policy: `plan` is the entry point for scripts. A policy is imported when it is chosen."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.names import POLICIES
from moe_serve.eplb.policies.policy import PlacementPolicy, Plan, PlanRequest
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology


def plan(
    tokens: ArrayLike,
    topology: Topology,
    num_slots: int,
    policy: str = "refined",
    current: Placement | None = None,
    num_groups: int | None = None,
    off_home: float = 1.0,
    max_moves: int | None = None,
    time_budget_s: float | None = None,
    seed: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Plan:
    """Returns where the experts of all layers should live for this load.

    tokens:    [num_layers, num_logical] tokens routed to each expert
    topology:  Topology(num_nodes, ranks_per_node)
    num_slots: physical experts per layer, a multiple of the ranks
    policy:    "refined", "greedy", "incremental", "series", "deepseek", "milp" or "static"
    current .. seed: as in PlanRequest, which also documents what `more` may hold (objective, by_source, activations,
               cost, excluded_ranks, planned_split, moe_layer_ids, max_total_moves, max_rank_moves,
               min_gain, series, series_weights)
    options:   of the policy, e.g. {"sweeps": 200} for refined

    plan.placement.physical_to_logical is [num_layers, num_slots] int32; slot s lives on rank s // slots_per_rank.
    Raises PlacementError naming the argument and the fix, ConfigError for an unknown policy or option.
    """
    request = PlanRequest(
        np.asarray(tokens), topology, num_slots, current, num_groups=num_groups, off_home=off_home,
        max_moves=max_moves, time_budget_s=time_budget_s, seed=seed, **more,
    )  # fmt: skip
    return make_policy(policy, **(options or {})).plan(request)


def plan_counts(counts: NDArray[np.int64], num_ranks: int) -> NDArray[np.int32]:
    """Returns the slots of a placement for counts alone, as few as the ranks allow: counts [L, E] -> [L, P] int32.

    This is how `files.placements.read_placement` reads a file that holds counts instead of a placement.
    """
    num_slots = -(-counts.shape[1] // num_ranks) * num_ranks
    return plan(counts, Topology(1, num_ranks), num_slots).placement.physical_to_logical


def make_policy(name: str, **options: Any) -> PlacementPolicy:
    """Returns the policy of this name; options are the fields of its class.

    Raises ConfigError for an unknown name or option.
    """
    try:
        match name:
            case "deepseek":
                from moe_serve.eplb.policies.baselines import DeepSeekPolicy

                return DeepSeekPolicy(**options)
            case "greedy":
                from moe_serve.eplb.policies.anew import GreedyPolicy

                return GreedyPolicy(**options)
            case "refined":
                from moe_serve.eplb.policies.refined import RefinedPolicy

                return RefinedPolicy(**options)
            case "incremental":
                from moe_serve.eplb.policies.incremental import IncrementalPolicy

                return IncrementalPolicy(**options)
            case "series":
                from moe_serve.eplb.policies.incremental import SeriesPolicy

                return SeriesPolicy(**options)
            case "milp":
                from moe_serve.eplb.policies.baselines import MilpPolicy

                return MilpPolicy(**options)
            case "static":
                from moe_serve.eplb.policies.baselines import StaticPolicy

                return StaticPolicy(**options)
    except TypeError as error:
        raise ConfigError(f"policy {name!r} does not take these options ({error}); see its class") from None
    raise ConfigError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}")
