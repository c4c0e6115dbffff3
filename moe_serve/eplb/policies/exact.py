"""The exact placement of small cases, as a mixed-integer program: pulp builds it, HiGHS solves it.

A policy for a dozen experts, and the reference in tests. Per layer it minimises the heaviest rank's load:
- take[e, c]: expert e has c replicas, exactly one c each
- on[e, r, c]: one of the c replicas of e sits on rank r; c of them where take[e, c], none elsewhere
- every rank holds at most K replicas and carries at most the maximum
Under a hierarchy home nodes are chosen first, as for every policy; the program is exact given those.
"""

import time
from dataclasses import dataclass

import numpy as np

from moe_serve.eplb.policies.anew import finish_anew
from moe_serve.eplb.policies.hierarchy import choose_homes
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Ids, Problem, finish, holds, problem_of
from moe_serve.eplb.policies.refined import RefinedPolicy
from moe_serve.errors import PlacementError

MAX_VARIABLES = 20_000


@dataclass(frozen=True)
class MilpPolicy:
    """The optimum, layer by layer.

    limit_s: longest solve of one layer; without a proof by then, the best placement found is used and the plan is
             marked truncated. `time_budget_s` of the request bounds the sum.
    """

    limit_s: float = 60.0
    name: str = "milp"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the optimal plan; with `max_moves`, the best within that many moves per layer, and with
        `max_rank_moves`, within that many to each rank.

        Raises PlacementError when a layer needs more than 20,000 binary variables, and when these are too few for any
        legal placement.
        """
        problem = problem_of(request)
        num_layers, num_experts = problem.weight.shape
        most = min(problem.num_ranks, problem.num_slots - (num_experts - 1) * problem.min_replicas)
        if num_experts * problem.num_ranks * most > MAX_VARIABLES:
            raise PlacementError(
                f"policy milp: {num_experts} experts x {problem.num_ranks} ranks x up to {most} replicas is more than "
                f"{MAX_VARIABLES} choices per layer; use policy 'refined'"
            )
        homes = None
        if not problem.is_global:
            homes = choose_homes(problem, request.num_groups)
        table = np.full((num_layers, problem.num_ranks, problem.slots_per_rank), -1, dtype=np.int32)
        truncated = False
        for layer in range(num_layers):
            limit = self.limit_s
            if problem.deadline.at is not None:
                limit = min(limit, max(0.01, problem.deadline.at - time.perf_counter()))
            solved, proved = _solve(problem, layer, most, limit, homes)
            table[layer] = solved
            truncated |= not proved
        return (finish if problem.limits_moves else finish_anew)(problem, table, truncated, homes)


def _solve(problem: Problem, layer: int, most: int, limit_s: float, homes: np.ndarray | None) -> tuple[Ids, bool]:
    """Returns the table [R, K] of one layer, and whether it was proved optimal."""
    import pulp

    weight = problem.weight[layer]
    num_experts, num_ranks, slots = len(weight), problem.num_ranks, problem.slots_per_rank
    fixed = np.zeros(num_experts) if problem.fixed is None else problem.fixed[layer]
    mean = weight.sum() / num_ranks + fixed.sum() / num_ranks
    scale = mean if mean > 0 else 1.0  # a well-scaled program: the mean rank has load about 1
    model = pulp.LpProblem("placement", pulp.LpMinimize)
    top = pulp.LpVariable("top", lowBound=weight.sum() / num_ranks / scale)
    experts, ranks, replicas = range(num_experts), range(num_ranks), range(problem.min_replicas, most + 1)
    take = {(e, c): pulp.LpVariable(f"take_{e}_{c}", cat="Binary") for e in experts for c in replicas}
    on = {
        (e, r, c): pulp.LpVariable(f"on_{e}_{r}_{c}", cat="Binary") for e in experts for r in ranks for c in replicas
    }  # fmt: skip
    model += top
    for e in experts:
        model += pulp.lpSum(take[e, c] for c in replicas) == 1
        for c in replicas:
            model += pulp.lpSum(on[e, r, c] for r in ranks) == c * take[e, c]
            for r in ranks:
                model += on[e, r, c] <= take[e, c]
    load = {(e, c): float((weight[e] / c + fixed[e]) / scale) for e in experts for c in replicas}
    for r in ranks:
        model += pulp.lpSum(on[e, r, c] for e in experts for c in replicas) <= slots
        model += pulp.lpSum(load[e, c] * on[e, r, c] for e in experts for c in replicas) <= top
    if homes is not None:
        node, home = problem.node_of, homes[layer]
        away = [(e, r) for e in experts for r in ranks if node[r] != home[e]]
        share = pulp.lpSum(float(weight[e] / c / scale) * on[e, r, c] for e, r in away for c in replicas)
        model += share <= problem.request.off_home * float(weight.sum()) / scale
        for e in experts:
            model += pulp.lpSum(on[e, r, c] for r in ranks if node[r] == home[e] for c in replicas) >= 1
    limits = {name: getattr(problem.request, name) for name in ("max_moves", "max_rank_moves")}
    limits = {name: most for name, most in limits.items() if most is not None}
    if limits:
        assert problem.current is not None
        here = holds(problem.current[layer][None], num_experts)[0]
        arriving = [pulp.lpSum(on[e, r, c] for e in experts if not here[r, e] for c in replicas) for r in ranks]
        if "max_moves" in limits:
            model += pulp.lpSum(arriving) <= limits["max_moves"]
        for r in ranks if "max_rank_moves" in limits else ():
            model += arriving[r] <= limits["max_rank_moves"]
    status = model.solve(pulp.HiGHS(msg=False, timeLimit=limit_s, gapRel=1e-9, threads=1))
    table = np.full((num_ranks, slots), -1, dtype=np.int32)
    if top.value() is None or any(on[key].value() is None for key in on):
        if limits:
            given = " and ".join(f"{name}={most}" for name, most in limits.items())
            raise PlacementError(
                f"policy milp: no legal placement of row {layer} was found within {given}; raise {' or '.join(limits)}"
            )
        return RefinedPolicy().plan(problem.request).placement.physical_to_logical[layer].reshape(
            problem.request.topology.num_ranks, slots
        )[problem.ranks], False
    for r in ranks:
        held = [e for e in experts for c in replicas if on[e, r, c].value() > 0.5]
        table[r, : len(held)] = held
    proved = status == pulp.LpStatusOptimal and model.sol_status == pulp.LpSolutionOptimal
    return table, proved
