"""The policies that balancers are compared with: the placement in use, DeepSeek's EPLB, and the optimum of small cases.

DeepSeek's EPLB gives the same output as the original on inputs without ties, all layers at once. As published: with a
node hierarchy, expert groups are packed onto nodes, and every node replicates its own experts and packs the replicas
onto its ranks; without one, the whole cluster counts as a single node. Packing puts each item, heaviest first, into the
lightest pack with room; replication gives the next replica to the heaviest one. It computes in float32 as the original
does, so counts above 2^24 lose digits, and it may put two replicas of an expert on one rank. No other policy does
either.

The optimum is a mixed-integer program per layer, built by pulp and solved by HiGHS, that minimises the heaviest rank:
- take[e, c]: expert e has c replicas, exactly one c each
- on[e, r, c]: one of the c replicas of e sits on rank r; c of them where take[e, c], none elsewhere
- every rank holds at most K replicas and carries at most the maximum
Under a hierarchy home nodes are chosen first, as for every policy; the program is exact given those.

Shape words: X = rows planned at once, n = items of a row.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.anew import PLANS_ANEW, finish_anew
from moe_serve.eplb.policies.hierarchy import choose_homes
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Ids, Problem, as_table, finish, holds, problem_of, unkept_limits
from moe_serve.eplb.policies.refined import RefinedPolicy
from moe_serve.eplb.repair import give_ranks
from moe_serve.errors import PlacementError

Singles = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StaticPolicy:
    """Keeps the current placement, or experts in order where there is none."""

    name: str = "static"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the current placement; without one, the trivial placement over the ranks that take part.

        With min_replicas above 1, slots of the trivial placement are changed where an expert is on too few ranks.
        Raises PlacementError when the current placement uses an excluded rank for an expert's only slot, or has an
        expert on fewer than min_replicas ranks.
        """
        problem = problem_of(request)
        if problem.current is not None:
            if request.current is not None and request.excluded_ranks:
                lost = request.current.without_ranks(request.excluded_ranks)[1]
                if lost:
                    raise PlacementError(
                        f"the static policy keeps the current placement, but without ranks {request.excluded_ranks} "
                        f"expert {lost[0][1]} of row {lost[0][0]} (and {len(lost) - 1} more) has no slot; use another "
                        "policy"
                    )
            _check_ranks(problem, problem.current)
            return finish(problem, problem.current, keep_slots=False)
        num_layers, num_logical = problem.weight.shape
        trivial = Placement.trivial(num_layers, num_logical, problem.num_ranks, problem.num_slots - num_logical)
        table = as_table(trivial, problem.ranks * 0 + range(problem.num_ranks))
        if problem.min_replicas > 1:
            for ranks in table:
                give_ranks(ranks, range(problem.num_ranks), problem.min_replicas)
        return finish(problem, table)


def _check_ranks(problem: Problem, table: Ids) -> None:
    """Raises PlacementError when an expert of the table [L, R, K] is on fewer than min_replicas ranks."""
    least = problem.min_replicas
    num_ranks = holds(table, problem.weight.shape[1]).sum(axis=1)
    if least > 1 and (num_ranks < least).any():
        row, expert = np.argwhere(num_ranks < least)[0]
        raise PlacementError(
            f"the static policy keeps the current placement, in which expert {expert} of row {row} is on "
            f"{num_ranks[row, expert]} of the ranks that take part and min_replicas is {least}; use another policy"
        )


@dataclass(frozen=True)
class DeepSeekPolicy:
    """EPLB as DeepSeek published it.

    `num_groups` chooses the method: hierarchical where it is given and divides over the nodes, else global.
    Beyond the original: off_home = 0 without groups treats every expert as a group; 0 < off_home < 1 is our soft
    hierarchy with fast packing; with excluded ranks that leave unequal nodes the method is global. min_replicas above 1
    is met by changing slots of the finished placement, on the nodes that the experts are on.
    """

    name: str = "deepseek"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns EPLB's placement, which ignores `current`, limits of moves, `seed` and `time_budget_s`.

        Raises PlacementError where a node has too few ranks for min_replicas of its experts.
        """
        problem = problem_of(request)
        if not problem.is_global and request.off_home > 0:
            from moe_serve.eplb.policies.hierarchy import plan_by_node

            table, homes, _ = plan_by_node(problem, sweeps=0)
            return finish(problem, table, homes=homes, unkept=unkept_limits(request, problem, table, PLANS_ANEW))
        num_layers = len(problem.weight)
        num_groups, num_nodes = self._hierarchy(problem)
        flat = rebalance(problem.weight, problem.num_slots, num_groups, num_nodes, problem.num_ranks)
        table = flat.reshape(num_layers, problem.num_ranks, problem.slots_per_rank).astype(np.int32)
        if problem.min_replicas > 1:
            _spread_replicas(table, num_nodes, problem.min_replicas)
        return finish(problem, table, keep_slots=False, unkept=unkept_limits(request, problem, table, PLANS_ANEW))

    def _hierarchy(self, problem: Problem) -> tuple[int, int]:
        nodes = problem.num_nodes
        groups = problem.request.num_groups
        if groups is None and problem.request.off_home == 0:
            groups = problem.weight.shape[1]
        equal_nodes = len(set(np.bincount(problem.node_of).tolist())) == 1
        return (groups, nodes) if groups is not None and groups % nodes == 0 and equal_nodes else (1, 1)


def _spread_replicas(table: NDArray[np.int32], num_nodes: int, min_replicas: int) -> None:
    """Puts every expert on min_replicas ranks of its node, in place, with few changed slots: table [L, R, K]."""
    num_layers, num_ranks, slots = table.shape
    if num_ranks // num_nodes < min_replicas:
        raise PlacementError(
            f"policy deepseek: min_replicas is {min_replicas}, and all replicas of an expert are on the "
            f"{num_ranks // num_nodes} ranks of one node; use off_home 1 without num_groups, or another policy"
        )
    for ranks in table.reshape(num_layers * num_nodes, num_ranks // num_nodes, slots):
        give_ranks(ranks, range(len(ranks)), min_replicas)


def rebalance(weight: NDArray[np.number], num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> Ints:
    """Returns the expert of each slot: weight [L, E] -> [L, num_slots] int64. num_nodes = 1 is the global method.

    num_groups divides E and is a multiple of num_nodes; num_nodes divides num_ranks; num_ranks divides num_slots.
    """
    load = weight.astype(np.float32)
    num_layers, num_experts = load.shape
    group_size = num_experts // num_groups

    # Groups to nodes. `by_node` lists the experts in the order of their nodes.
    group_load = load.reshape(num_layers, num_groups, group_size).sum(axis=2)
    node, place = pack_balanced(group_load, num_nodes)
    new_group = node * (num_groups // num_nodes) + place
    group_at = np.empty_like(new_group)
    np.put_along_axis(group_at, new_group, np.arange(num_groups)[None, :], axis=1)
    by_node = (group_at[:, :, None] * group_size + np.arange(group_size)).reshape(num_layers, num_experts)

    # Replicas inside each node.
    per_node = num_experts // num_nodes
    local_load = np.take_along_axis(load, by_node, axis=1).reshape(-1, per_node)
    local_expert, count = replicate(local_load, num_slots // num_nodes)

    # Replicas to ranks.
    each: Singles = (local_load / count.astype(np.float32)).astype(np.float32)
    replica_load = np.take_along_axis(each, local_expert, axis=1)
    rank, place = pack_balanced(replica_load, num_ranks // num_nodes)
    slot = rank * (num_slots // num_ranks) + place
    at_slot = np.empty_like(local_expert)
    np.put_along_axis(at_slot, slot, local_expert, axis=1)

    at_slot = (
        at_slot.reshape(num_layers, num_nodes, num_slots // num_nodes)
        + (np.arange(num_nodes) * per_node)[None, :, None]
    )
    return np.take_along_axis(by_node, at_slot.reshape(num_layers, num_slots), axis=1)


def pack_balanced(load: Singles, num_packs: int) -> tuple[Ints, Ints]:
    """Returns the pack of each item and its position in it; each pack gets n / num_packs: load [X, n] -> 2 x [X, n].

    Heaviest first, to the lightest pack with room (the first of equals). One item per pack: item i goes to pack i.
    """
    num_rows, num_items = load.shape
    room = num_items // num_packs
    if room == 1:
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros(load.shape, dtype=np.int64)
    order = np.argsort(-load, axis=1, kind="stable")
    pack, place = np.empty(load.shape, dtype=np.int64), np.empty(load.shape, dtype=np.int64)
    key = np.zeros((num_rows, num_packs), dtype=np.float32)  # load of the pack, infinity once full
    filled = np.zeros((num_rows, num_packs), dtype=np.int64)
    rows = np.arange(num_rows)
    for i in range(num_items):
        item = order[:, i]
        to = key.argmin(axis=1)
        pack[rows, item], place[rows, item] = to, filled[rows, to]
        filled[rows, to] += 1
        key[rows, to] = np.where(filled[rows, to] == room, np.float32(np.inf), key[rows, to] + load[rows, item])
    return pack, place


def replicate(load: Singles, num_replicas: int) -> tuple[Ints, Ints]:
    """Returns the expert of each replica [X, num_replicas] and the replicas of each expert: load [X, n] -> ..., [X, n].

    The first n replicas are the experts themselves; each further one goes to the expert with the heaviest replicas.
    """
    num_rows, num_experts = load.shape
    expert = np.tile(np.arange(num_replicas), (num_rows, 1))
    count = np.ones((num_rows, num_experts), dtype=np.int64)
    each = load.copy()
    rows = np.arange(num_rows)
    for i in range(num_experts, num_replicas):
        heaviest = each.argmax(axis=1)
        expert[:, i] = heaviest
        count[rows, heaviest] += 1
        each[rows, heaviest] = load[rows, heaviest] / count[rows, heaviest].astype(np.float32)
    return expert, count


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
