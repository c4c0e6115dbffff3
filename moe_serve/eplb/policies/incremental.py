"""Edits the placement in use with as few moves as it can until the load is balanced well enough, for live systems.

Cheap edits come first: overwriting a redundant replica takes one move, a swap two. With two slots per rank single edits
get stuck, so some ranks are paired anew (`pairs.py`). With one slot per rank the fewest moves are known
(`one_slot.py`).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.bounds import balancedness_bound
from moe_serve.eplb.policies.edits import EditState, apply_edits, best_overwrites
from moe_serve.eplb.policies.greedy import greedy_table
from moe_serve.eplb.policies.legal import make_legal
from moe_serve.eplb.policies.one_slot import edit_one_slot
from moe_serve.eplb.policies.pairs import PairRules, edit_pairs
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, finish, holds, problem_of
from moe_serve.eplb.policies.refined import RefinedPolicy
from moe_serve.eplb.policies.shared_price import edits_within, replay_edits
from moe_serve.eplb.policies.single_edits import EditGoal, balance_reached, edit_layers

Ints = NDArray[np.int64]
MIN_GAIN = 3e-4  # per move, in mean rank loads; less is lost in the drift until the next plan
# Of a move with two slots per rank, see `pairs.PairRules`; within `max_moves`, those end the edits.
PAIR_PRICE, PAIR_PRICE_WITHIN_MOVES = 0.2, 0.01


@dataclass(frozen=True)
class IncrementalPolicy:
    """The fewest moves from the placement in use to a good one.

    slack:     a layer is done when its balancedness is within this share of what a fresh greedy plan reaches. None =
               0 with one slot per rank (`one_slot.py`, the exact minimum), 0.003 where `max_moves` is given; else 0.05
               with two slots per rank, 0.01 with three or four, else 0.013
    steepness: of the smooth maximum, per mean rank load (two slots per rank: per load of the heaviest rank of a fresh
               plan); about 1 / the relative drift of a rank until the next plan. None = 20 with two slots, else 30
    risk:      see `pairs.PairRules`; used with two slots per rank only
    max_edits: effort, per layer
    Without a placement in use the plan is that of `refined`.
    """

    slack: float | None = None
    steepness: float | None = None
    risk: float = 0.25
    max_edits: int = 400
    name: str = "incremental"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the edited placement, with at most `max_moves` moves per layer where that is given, and at most
        `max_rank_moves` of them to any one rank.

        `max_total_moves` goes to the layers where a move gains most, at one price for all of them; with one or two
        slots per rank every layer gets an equal part.

        An illegal start (an expert without a slot, on fewer than min_replicas ranks, or twice on one) is repaired
        first, which may take more moves.
        """
        if request.current is None:
            return RefinedPolicy().plan(request)
        if request.max_rank_moves == 0:
            request = replace(request, max_moves=0)
        problem = problem_of(request)
        if request.max_total_moves is not None and problem.slots_per_rank <= 2 and problem.is_global:
            each = request.max_total_moves // len(problem.weight)  # these searches know no price across layers
            if request.max_moves is not None:
                each = min(each, request.max_moves)
            problem = problem_of(replace(request, max_moves=each, max_total_moves=None))
        assert problem.current is not None
        table, truncated, homes = self._edit(problem)
        return finish(problem, table, truncated, homes)

    def _edit(self, problem: Problem) -> tuple[Ids, bool, Ints | None]:
        """Returns the table, whether the deadline passed, and the homes of the hierarchy, if there is one."""
        assert problem.current is not None
        if problem.slots_per_rank == 1 and problem.is_global:
            return edit_one_slot(problem, self.slack or 0.0), False, None
        table, rule = make_legal(problem)
        homes = None if rule is None else rule.homes
        mean = problem.weight.sum(axis=1, keepdims=True) / problem.num_ranks
        mean = np.where(mean > 0, mean, 1.0)
        unit = problem.weight / mean
        pairs = problem.slots_per_rank == 2 and problem.num_ranks > 2 and rule is None
        state = EditState(
            unit,
            table,
            holds(problem.current, unit.shape[1]),
            self.steepness or (20.0 if pairs else 30.0),
            None if problem.fixed is None else problem.fixed / mean,
            problem.min_replicas,
            problem.request.max_rank_moves,
        )
        target = self._target(problem)
        most, total = problem.request.max_moves, problem.request.max_total_moves
        budget = np.full(len(table), problem.num_slots if most is None else most)
        todo = np.flatnonzero((balance_reached(state) < target) & (state.num_moved < budget))
        if len(todo) == 0:
            return table, False, homes
        if pairs:
            price = PAIR_PRICE if most is None else PAIR_PRICE_WITHIN_MOVES
            rules = PairRules(budget - state.num_moved, state.steepness, self.risk, price)
            return table, edit_pairs(problem, table, todo, rules), homes
        work = state.rows(todo)
        if rule is None and total is None:
            _fill_empty_slots(work, target[todo], budget[todo])
        some = None if rule is None else rule.rows(todo)
        least = MIN_GAIN if problem.request.min_gain is None else problem.request.min_gain
        goal = EditGoal(target[todo], budget[todo], least, self.max_edits)
        moved = work.num_moved
        log, truncated = edit_layers(work, goal, some, problem.deadline)
        if total is not None:
            total -= int(state.num_moved.sum() - moved.sum())
            work.table = table[todo]
            replay_edits(work.table, log, edits_within(log, moved, mean[todo, 0], total))
        table[todo] = work.table
        return table, truncated, homes

    def _target(self, problem: Problem) -> Floats:
        """Returns the balancedness [L] at which a layer needs no edits."""
        slack = self.slack
        limits = problem.request.max_moves, problem.request.max_total_moves
        if slack is None and limits != (None, None):
            slack = 0.003  # the budget ends the edits
        if slack is None:
            slack = 0.05 if problem.slots_per_rank <= 2 else 0.01 if problem.slots_per_rank <= 4 else 0.013
        if not problem.is_global:
            bound = balancedness_bound(problem.weight, problem.num_ranks, problem.slots_per_rank)
            return bound * (1 - slack)
        fresh = greedy_table(problem)
        state = EditState(problem.weight, fresh, holds(fresh, problem.weight.shape[1]), 0.0, fixed=problem.fixed)
        return balance_reached(state) * (1 - slack)


def _fill_empty_slots(state: EditState, target: Floats, budget: Ints) -> None:
    """Puts replicas into empty slots, in place, while that helps: after a rank rejoined, or a start was repaired."""
    for _ in range(int((state.table < 0).sum(axis=(1, 2)).max(initial=0))):
        edit = best_overwrites(state, budget - state.num_moved, must_stay=state.table >= 0)
        which = (edit.gain > 1e-9) & (balance_reached(state) < target)
        if not which.any():
            return
        apply_edits(state, edit, which)
