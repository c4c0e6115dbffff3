"""The default policy: minimax replication, packing, swaps; with few slots per rank, a search over counts too."""

from dataclasses import dataclass

import numpy as np

from moe_serve.eplb.policies.anew import finish_anew
from moe_serve.eplb.policies.anneal import anneal_counts
from moe_serve.eplb.policies.bounds import balancedness_bound
from moe_serve.eplb.policies.count_search import pack_pairs, search_pair_counts, try_apportionments
from moe_serve.eplb.policies.edits import EditState
from moe_serve.eplb.policies.greedy import first_packing
from moe_serve.eplb.policies.hierarchy import has_single_homes, plan_by_node, read_homes
from moe_serve.eplb.policies.legal import HomeRule, Ints
from moe_serve.eplb.policies.locality import improve_locality
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, problem_of
from moe_serve.eplb.policies.single_edits import (
    MIN_GAIN,
    SMALL_SLACK,
    STEEPNESS,
    EditGoal,
    balance_reached,
    edit_layers,
)
from moe_serve.eplb.policies.swapping import swap_until_even

MOST_EDITS = 1000  # of a layer under a hierarchy


@dataclass(frozen=True)
class RefinedPolicy:
    """The best placement for a load; the one in use matters only for which rank gets what (`anew.py`).

    sweeps:      rounds of swaps, at most
    tolerance:   swaps end when the heaviest rank is this share above the mean
    iterations:  of the search over counts with two slots per rank; 0 = no search there
    rounds:      of annealing, for problems of up to 128 slots
    good_enough: layers within this share of their bound are left as they are
    prove:       compute the tight bound too, 0.1 s per layer; worth it with two to four slots per rank
    """

    sweeps: int = 90
    tolerance: float = 7e-4
    iterations: int = 160
    rounds: int = 50
    good_enough: float = 0.995
    prove: bool = False
    name: str = "refined"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the refined plan. It ignores all limits of moves; use `incremental` for that."""
        problem = problem_of(request)
        if not problem.is_global:
            table, homes, truncated = plan_by_node(problem, self.sweeps // 2)
            if not truncated:
                table, homes, truncated = _edited_to_the_end(problem, table, homes)
            return finish_anew(problem, table, truncated, homes)
        table, truncated = self.table(problem)
        if request.planned_split == "exact" and problem.fixed is None and not truncated:
            from moe_serve.eplb.policies.split_aware import best_for_exact_split

            table = best_for_exact_split(problem, table, self.sweeps)
        table = improve_locality(problem, table, 200)
        return finish_anew(problem, table, truncated, tight=self.prove, for_split=True)

    def table(self, problem: Problem) -> tuple[Ids, bool]:
        """Returns the table [L, R, K] without node hierarchy, and whether the deadline cut the search short."""
        table, packed = first_packing(problem)
        if problem.slots_per_rank == 1:
            return table, False  # nothing to pack: minimax replication is the optimum
        if problem.slots_per_rank == 2 and problem.num_spare == 0 and problem.min_replicas == 1:
            return table, False  # nothing to choose: the lightest expert beside the heaviest is the optimum
        truncated = problem.slots_per_rank > 2 and swap_until_even(
            table, packed, self.sweeps, self.tolerance, problem.deadline
        )
        if problem.slots_per_rank <= 4 and not truncated:
            truncated = self._search_counts(problem, table, packed)
        if problem.num_slots <= 128 and not truncated:
            truncated = anneal_counts(
                problem.weight,
                table,
                self.rounds,
                problem.request.seed,
                problem.fixed,
                good_enough=0.999,
                deadline=problem.deadline,
                min_replicas=problem.min_replicas,
            )
        return table, truncated

    def _search_counts(self, problem: Problem, table: Ids, packed: Floats) -> bool:
        """Replaces, in place, layers for which other counts are better. Returns whether the deadline passed."""
        reached = _mean_over_max(packed)
        bound = balancedness_bound(problem.weight, problem.num_ranks, problem.slots_per_rank)
        rows = np.flatnonzero(reached < self.good_enough * bound)
        if len(rows) == 0:
            return False
        weight = problem.weight[rows]
        fixed = None if problem.fixed is None else problem.fixed[rows]
        truncated = False
        top = packed[rows].sum(axis=2).max(axis=1)
        if problem.slots_per_rank == 2:
            counts, truncated = search_pair_counts(
                weight,
                problem.num_ranks,
                self.iterations,
                problem.request.seed,
                fixed,
                deadline=problem.deadline,
                min_replicas=problem.min_replicas,
            )
            candidates = iter([(*pack_pairs(weight, counts, problem.num_ranks, fixed), truncated)])
        elif fixed is None:
            candidates = try_apportionments(
                weight, problem.num_ranks, problem.slots_per_rank, self.sweeps, problem.deadline, problem.min_replicas
            )
        else:
            return False
        for other, other_load, cut in candidates:
            truncated |= cut
            other_top = other_load.sum(axis=2).max(axis=1)
            better = other_top < top
            table[rows[better]], packed[rows[better]] = other[better], other_load[better]
            top = np.minimum(top, other_top)
        return truncated


def _edited_to_the_end(problem: Problem, table: Ids, homes: Ints) -> tuple[Ids, Ints, bool]:
    """Returns the table and homes after all edits that gain anything, and whether the deadline ended them.

    Replicas of other nodes' experts, and single experts that change nodes, even out what packing node by node cannot.
    With the same load, `incremental` then finds nothing left to do.
    """
    mean = problem.weight.sum(axis=1, keepdims=True) / problem.num_ranks
    mean = np.where(mean > 0, mean, 1.0)
    fixed = None if problem.fixed is None else problem.fixed / mean
    nowhere = np.zeros((len(table), problem.num_ranks, problem.weight.shape[1]), dtype=bool)  # so no edit is a move
    state = EditState(problem.weight / mean, table.copy(), nowhere, STEEPNESS, fixed, problem.min_replicas)
    rule = HomeRule(homes.copy(), problem.node_of, problem.request.off_home, has_single_homes(problem))
    bound = balancedness_bound(problem.weight, problem.num_ranks, problem.slots_per_rank)
    everything = np.full(len(table), problem.num_slots)
    before = balance_reached(state)
    goal = EditGoal(bound * (1 - SMALL_SLACK), everything + 1, MIN_GAIN, MOST_EDITS)
    _, truncated = edit_layers(state, goal, rule, problem.deadline)
    better = balance_reached(state) >= before
    table, homes = np.where(better[:, None, None], state.table, table), np.where(better[:, None], rule.homes, homes)
    return table, read_homes(problem, table) if rule.singles else homes, truncated


def _mean_over_max(packed: Floats) -> Floats:
    load = packed.sum(axis=2)
    top = load.max(axis=1)
    return np.where(top > 0, load.mean(axis=1) / np.where(top > 0, top, 1.0), 1.0)
