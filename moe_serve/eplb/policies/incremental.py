"""Edits the placement in use with as few moves as it can until the load is balanced well enough, for live systems.

Cheap edits come first: overwriting a redundant replica takes one move, a swap two. With two slots per rank single edits
get stuck, so replica counts change first and chains of moves through many ranks follow, at a price per move that falls
until the target is met or the budget is spent.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.bounds import balancedness_bound
from moe_serve.eplb.policies.chains import change_counts, reassign
from moe_serve.eplb.policies.edits import Bools, EditState, apply_edits, best_overwrites, best_swaps
from moe_serve.eplb.policies.greedy import greedy_table
from moe_serve.eplb.policies.legal import make_legal
from moe_serve.eplb.policies.one_slot import edit_one_slot
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, finish, holds, problem_of
from moe_serve.eplb.policies.refined import RefinedPolicy
from moe_serve.eplb.policies.shared_price import edits_within, replay_edits
from moe_serve.eplb.policies.single_edits import EditGoal, balance_reached, better_of, edit_layers

Ints = NDArray[np.int64]
PRICE_STEPS = 11
MIN_GAIN = 3e-4  # per move, in mean rank loads; less is lost in the drift until the next plan


@dataclass(frozen=True)
class IncrementalPolicy:
    """The fewest moves from the placement in use to a good one.

    slack:     a layer is done when its balancedness is within this share of what a fresh greedy plan reaches. None =
               0 with one slot per rank (`one_slot.py`, the exact minimum), 0.003 where `max_moves` is given; else 0.05
               with two slots per rank, 0.01 with three or four, else 0.013
    steepness: of the smooth maximum, per mean rank load; about 1 / the relative drift of a rank until the next plan.
               None = 20 with two slots per rank, else 30
    risk:      see `edits.EditState`; used with two slots per rank only
    max_edits: effort, per layer
    Without a placement in use the plan is that of `refined`.
    """

    slack: float | None = None
    steepness: float | None = None
    risk: float = 0.1
    max_edits: int = 400
    name: str = "incremental"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the edited placement, with at most `max_moves` moves per layer where that is given.

        `max_total_moves` goes to the layers where a move gains most, at one price for all of them; with one or two
        slots per rank every layer gets an equal part.

        An illegal start (an expert without a slot, on fewer than min_replicas ranks, or twice on one) is repaired
        first, which may take more moves.
        """
        if request.current is None:
            return RefinedPolicy().plan(request)
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
            self.risk if pairs else 0.0,
            None if problem.fixed is None else problem.fixed / mean,
            problem.min_replicas,
        )
        target = self._target(problem)
        most, total = problem.request.max_moves, problem.request.max_total_moves
        budget = np.full(len(table), problem.num_slots if most is None else most)
        todo = np.flatnonzero((balance_reached(state) < target) & (state.num_moved < budget))
        if len(todo) == 0:
            return table, False, homes
        work = state.rows(todo)
        if rule is None and total is None:
            _fill_empty_slots(work, target[todo], budget[todo])
        if pairs:
            truncated = _chain(work, target[todo], budget[todo], problem)
        else:
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


def _chain(state: EditState, target: Floats, budget: Ints, problem: Problem) -> bool:
    """Changes counts, then moves in chains at a price per move; two slots per rank. Returns whether it was cut short.

    The price is found by bisection so that its moves just fit the budget. Each layer keeps the first table that meets
    its target, else the one with the lowest smooth maximum within the budget, never one less balanced than the start.
    """
    num_layers, num_ranks, slots = state.table.shape
    best = state.table.copy()
    started = balance_reached(state)
    best_value = _smooth(state)
    change_counts(state, min(6, num_ranks), problem.request.seed)
    draw = np.random.default_rng(problem.request.seed)
    price, too_low, enough = np.full(num_layers, 2.0), np.zeros(num_layers), np.full(num_layers, np.inf)
    done = np.zeros(num_layers, dtype=bool)
    for _ in range(PRICE_STEPS):
        for attempt in range(3):
            if problem.deadline.passed:
                state.table[:] = best
                return True
            _swap_at_price(state, price, ~done)
            absolute = _absolute(state, price)
            for layer in np.flatnonzero(~done).tolist():
                load = state.load[layer]
                choices = (load.argmin(axis=1), load.argmax(axis=1), draw.integers(0, slots, num_ranks))
                slot_of: Ints = np.asarray(choices[attempt])
                state.table[layer] = reassign(state, layer, slot_of, float(absolute[layer]))
            state.refresh()
            reached, within, value = balance_reached(state), state.num_moved <= budget, _smooth(state)
            met = within & (reached >= target)
            better = within & ~done & (reached >= started) & (met | (value < best_value))
            best[better], best_value[better] = state.table[better], value[better]
            done |= met
        if done.all():
            break
        enough = np.where(within, np.minimum(enough, price), enough)
        too_low = np.where(within, too_low, np.maximum(too_low, price))
        price = np.where(
            too_low == 0, enough * 0.75, np.where(np.isinf(enough), too_low * 2, np.sqrt(too_low * enough))
        )
    state.table[:] = best
    state.refresh()
    for _ in range(12):  # spend what the last price left of the budget
        edit, rate = better_of(
            best_overwrites(state, budget - state.num_moved), best_swaps(state, budget - state.num_moved, 12)
        )
        going = (balance_reached(state) < target) & (rate > 1e-9)
        if not going.any():
            break
        apply_edits(state, edit, going)
    return False


def _swap_at_price(state: EditState, price: Floats, which: Bools) -> None:
    """Makes a few swaps that gain more than the price of their moves."""
    everything = np.full(len(price), state.table[0].size)
    for _ in range(2):
        absolute = _absolute(state, price)
        swap = best_swaps(state, everything, 12, price=absolute)
        going = (swap.gain - absolute * swap.cost > 1e-9) & which
        if not going.any():
            return
        apply_edits(state, swap, going)


def _smooth(state: EditState) -> Floats:
    """Returns the smooth maximum of each layer on a scale that is independent of the heaviest rank."""
    value: Floats = state.peak.sum(axis=1) * np.exp(np.minimum(state.steepness * (state.peak_load - 1.12), 200.0))
    return value


def _absolute(state: EditState, price: Floats) -> Floats:
    """Returns the price per move on the scale of each layer's smooth maximum, where 1 is a rank at 1.12 of the mean."""
    scaled: Floats = price * np.exp(np.minimum(-state.steepness * (state.peak_load - 1.12), 200.0))
    return scaled
