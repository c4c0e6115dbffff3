"""The redundancy curve: how balanced a plan on one load is with more or fewer slots."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.topology import Topology

_POINTS = 9


def with_redundancy_curve(report: ReplayReport, topology: Topology, rules: PlanRules | None = None) -> ReplayReport:
    """Returns the report with the curve of its mean load, from the fewest slots to twice as many."""
    tokens = np.rint(report.load).astype(np.int64)
    slots = curve_slots(tokens.shape[1], topology.num_ranks, report.num_slots)
    return replace(report, redundancy=redundancy_curve(tokens, topology, slots, rules or PlanRules()))


def redundancy_curve(
    tokens: NDArray[np.int64], topology: Topology, slots: Iterable[int], rules: PlanRules
) -> tuple[tuple[int, float, float], ...]:
    """Returns (slots, mean, worst) for each number of slots, ascending: balancedness of a plan, over layers.

    More slots never hurt: a layer whose plan is worse than one with fewer slots takes that one's value, since it could
    leave its additional slots empty.
    """
    # Without the searches over replica counts: a curve needs many good plans rather than one optimal plan.
    policy = make_policy("refined", iterations=0, rounds=0)
    best = np.zeros(len(tokens))
    rows = []
    for num_slots in sorted(set(slots)):
        best = np.maximum(best, policy.plan(rules.request(tokens, topology, num_slots)).balancedness)
        rows.append((num_slots, float(best.mean()), float(best.min())))
    return tuple(rows)


def curve_slots(num_logical: int, num_ranks: int, in_use: int) -> list[int]:
    """Returns the numbers of slots to try, ascending; the number in use is one of them."""
    least = -(-num_logical // num_ranks)
    most = max(2 * least, least + 2, in_use // num_ranks)
    step = max(1, round((most - least) / (_POINTS - 1)))
    return sorted({per_rank * num_ranks for per_rank in range(least, most + 1, step)} | {in_use})
