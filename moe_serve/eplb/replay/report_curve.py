"""The redundancy curve of a replay: how balanced a plan on its mean load would be with more or fewer slots."""

from dataclasses import replace

import numpy as np

from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.replay.redundancy import plan_redundancy
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.topology import Topology

_POINTS = 9


def with_redundancy_curve(report: ReplayReport, topology: Topology, rules: PlanRules | None = None) -> ReplayReport:
    """Returns the report with `redundancy` filled: from the fewest slots to twice as many, and the number in use."""
    tokens = np.rint(report.load).astype(np.int64)
    # Without the searches over replica counts: a curve wants many plans that are nearly best, not one that is.
    policy = make_policy("refined", iterations=0, rounds=0)
    slots = curve_slots(tokens.shape[1], topology.num_ranks, report.num_slots)
    found = plan_redundancy(tokens, topology, 1.0, slots, policy, rules=rules)
    rows = ((point.num_slots, point.balancedness, point.worst) for point in found.points)
    return replace(report, redundancy=tuple(rows))


def curve_slots(num_logical: int, num_ranks: int, in_use: int) -> list[int]:
    """Returns the numbers of slots to try, ascending."""
    least = -(-num_logical // num_ranks)
    most = max(2 * least, least + 2, in_use // num_ranks)
    step = max(1, round((most - least) / (_POINTS - 1)))
    return sorted({per_rank * num_ranks for per_rank in range(least, most + 1, step)} | {in_use})
