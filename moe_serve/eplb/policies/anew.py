"""Plans made anew: the greedy policy, and how any such plan is fitted to the placement in use.

Ranks, and often nodes, can be exchanged without a change of any rank's load. So the new placement is dealt out to ranks
such that they receive few experts, and a layer that is no better than the one in use keeps that.

Shape words: L = layers, R = ranks that take part, K = slots per rank, E = experts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import count_moves
from moe_serve.eplb.policies.edits import Bools
from moe_serve.eplb.policies.hierarchy import is_over_budget, num_homeless, plan_by_node, read_homes
from moe_serve.eplb.policies.objectives import (
    improve_locality,
    off_node_share,
    price_of_locality,
    sample_batches,
    split_balance,
    spread_over_nodes,
)
from moe_serve.eplb.policies.one_slot import edit_one_slot
from moe_serve.eplb.policies.packing import (
    duplicate_slots,
    list_replicas,
    minimax_counts,
    pack_in_rounds,
    repair_duplicates,
    replica_load,
    replicas_in,
)
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import (
    Floats,
    Ids,
    Problem,
    finish,
    holds,
    problem_of,
    unkept_limits,
)
from moe_serve.eplb.relabel import Relabel, cheapest_parts

Ints = NDArray[np.int64]
ROUNDING = 1e-9  # two loads this close, relatively, are the same
PLANS_ANEW = "the policy plans anew and keeps to no limit; use incremental"


@dataclass(frozen=True)
class GreedyPolicy:
    """Replicates the heaviest experts, then assigns replicas to ranks round by round: milliseconds for 58 layers."""

    name: str = "greedy"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the greedy plan. It ignores all limits of moves; use `incremental` for that."""
        problem = problem_of(request)
        if problem.is_global:
            table, packed = first_packing(problem)
            known = packed.max(axis=(1, 2)) if request.objective == "tokens" else None
            return finish_anew(problem, improve_locality(problem, table, 40), heaviest_replica=known)
        table, homes, _ = plan_by_node(problem, sweeps=0)
        return finish_anew(problem, table, homes=homes)


def greedy_table(problem: Problem) -> Ids:
    """Returns the table [L, R, K] of the greedy method, without node hierarchy."""
    return first_packing(problem)[0]


def first_packing(problem: Problem) -> tuple[Ids, Floats]:
    """Returns minimax replicas packed in rounds, without duplicates: table and loads [L, R, K]. With one slot per rank,
    those nearest to the placement in use.

    Where each replica has a cost of its own, it tries all redundant slots, half of them and none: a replica that saves
    less than it costs is better left out.
    """
    if problem.slots_per_rank == 1 and problem.current is not None:
        table = edit_one_slot(problem)  # as light, with the fewest moves
        counts = np.maximum(replicas_in(table, problem.weight.shape[1]), 1)
        return table, replica_load(problem.weight, counts, table, problem.fixed)
    least = problem.weight.shape[1] * problem.min_replicas
    totals = [problem.num_slots]
    if problem.fixed is not None:
        totals += [(problem.num_slots + least) // 2, least]
    best: tuple[Ids, Floats] | None = None
    for total in dict.fromkeys(totals):
        counts = minimax_counts(problem.weight, total, problem.num_ranks, problem.fixed, problem.min_replicas)
        replicas = list_replicas(counts, problem.num_slots)
        load = replica_load(problem.weight, counts, replicas, problem.fixed)
        table, packed = pack_in_rounds(replicas, load, problem.num_ranks)
        repair_duplicates(table, packed)
        if best is None:
            best = table, packed
            continue
        better = packed.sum(axis=2).max(axis=1) < best[1].sum(axis=2).max(axis=1)
        best[0][better], best[1][better] = table[better], packed[better]
    assert best is not None
    return best


def finish_anew(
    problem: Problem,
    table: Ids,
    truncated: bool = False,
    homes: Ints | None = None,
    heaviest_replica: Floats | None = None,
    for_split: bool = False,
) -> Plan:
    """Returns the plan that a table [L, R, K] made anew is; arguments as in `finish`.

    for_split: it was made for the request's planned split, and is compared with the placement in use by that
    """
    if problem.current is not None:
        if homes is None:
            dealt = _dealt_out(table, _parts(problem, table))
            fewer = count_moves(problem.current, dealt) < count_moves(problem.current, table)
            table = np.where(fewer[:, None, None], dealt, table)
        else:
            table, homes = relabelled(problem, table, homes)
        legal = _is_legal(problem, problem.current)
        old = np.where(legal[:, None, None], problem.current, table)
        kept = legal & ~_is_better(problem, table, old, for_split)
        table = np.where(kept[:, None, None], old, table)
        if homes is not None and kept.any():
            homes = np.where(kept[:, None], read_homes(problem, problem.current), homes)
    table = spread_over_nodes(problem, table)
    unkept = unkept_limits(problem.request, problem, table, PLANS_ANEW)
    return finish(problem, table, truncated, homes, heaviest_replica=heaviest_replica, unkept=unkept)


def relabelled(problem: Problem, table: Ids, homes: Ints) -> tuple[Ids, Ints]:
    """Returns the table [L, R, K] with ranks exchanged so that these receive few experts, fewest over slow links, and
    the home nodes [L, E] that follow."""
    part = _parts(problem, table)
    node = np.empty((len(table), problem.num_nodes), dtype=np.int64)  # where each node of the plan went
    np.put_along_axis(node, problem.node_of[part], problem.node_of[None].repeat(len(part), axis=0), axis=1)
    return _dealt_out(table, part), np.take_along_axis(node, homes, axis=1)


def _parts(problem: Problem, table: Ids) -> Ints:
    """Returns which rank's part of the table each rank takes, [L, R].

    Nodes are exchanged as wholes where experts have homes, and stay where the sources of tokens matter.
    """
    assert problem.current is not None
    what: Relabel = "ranks" if problem.is_global else "nodes"
    if price_of_locality(problem) > 0:
        what = "inside"
    return cheapest_parts(problem.current, table, problem.node_of, what)


def _dealt_out(table: Ids, part: Ints) -> Ids:
    return np.take_along_axis(table, part[:, :, None], axis=1)


def _is_legal(problem: Problem, table: Ids) -> Bools:
    """Returns whether a table [L, R, K] keeps all that the request asks for, [L]."""
    num_ranks = holds(table, problem.weight.shape[1]).sum(axis=1)
    legal: Bools = (num_ranks >= problem.min_replicas).all(axis=1) & ~duplicate_slots(table).any(axis=(1, 2))
    if not problem.is_global:
        homes = read_homes(problem, table)
        legal &= (num_homeless(problem, table, homes) == 0) & ~is_over_budget(problem, table, homes)
    return legal


def _is_better(problem: Problem, new: Ids, old: Ids, for_split: bool) -> Bools:
    """Returns whether a table is better than another by the objective, and by more than rounding, [L]."""
    if for_split and problem.request.planned_split == "exact" and problem.fixed is None:
        batches = sample_batches(problem.weight, problem.num_ranks, problem.request.seed)
        return np.asarray(split_balance(problem, new, batches) > split_balance(problem, old, batches) * (1 + ROUNDING))
    top, old_top = (_heaviest(problem, table) for table in (new, old))
    better = top < old_top * (1 - ROUNDING)
    price = price_of_locality(problem)
    if price == 0:
        return np.asarray(better)
    saved = off_node_share(problem, old) - off_node_share(problem, new)
    if np.isinf(price):
        return np.asarray(better | ((top <= old_top * (1 + ROUNDING)) & (saved > ROUNDING)))
    mean = problem.weight.sum(axis=1) / problem.num_ranks
    return np.asarray(top - old_top < (saved * price - ROUNDING) * mean)


def _heaviest(problem: Problem, table: Ids) -> Floats:
    """Returns the load of the heaviest rank of each layer, [L]."""
    num_experts = problem.weight.shape[1]
    count = np.maximum(holds(table, num_experts).sum(axis=1), 1)
    return np.asarray(replica_load(problem.weight, count, table, problem.fixed).sum(axis=2).max(axis=1))
