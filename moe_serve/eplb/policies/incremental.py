"""Edits the placement in use with as few moves as it can until the load is balanced well enough, for live systems.

Cheap edits come first: overwriting a redundant replica takes one move, a swap two. With two slots per rank single edits
get stuck, so some ranks are paired anew (`pairs.py`). With one slot per rank the fewest moves are known
(`edit_one_slot`). Where the exact split serves the plan, edits are judged by it (`link_edits.py`).

Policy `series` edits for several windows, not for their sum: days and nights, one domain and another. Two loads that
take turns can each be uneven on a placement that suits their sum. So every edit is chosen by what it gains on average
over the windows: the mean of their smooth maxima over ranks, each in mean rank loads of its window (`edits.py`). The
steps of its search are those of `single_edits.py`, in numpy, one layer after the other.

Shape words: W = windows, L = layers, R = ranks that take part, K = slots per rank, E = experts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.anew import ROUNDING, greedy_table, relabelled
from moe_serve.eplb.policies.edits import Bools, EditState, all_overwrites, all_swaps, apply_edits, best_overwrites
from moe_serve.eplb.policies.hierarchy import has_single_homes, plan_by_node, read_homes
from moe_serve.eplb.policies.legal import HomeRule, LegalStart, make_legal, unkept_homes
from moe_serve.eplb.policies.link_edits import LINK_MIN_GAIN, LINK_TARGET, deviating_batches, edit_links
from moe_serve.eplb.policies.objectives import spread_over_nodes
from moe_serve.eplb.policies.one_slot import edit_one_slot
from moe_serve.eplb.policies.packing import Deadline, balancedness_bound
from moe_serve.eplb.policies.pairs import PairRules, edit_pairs
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, finish, holds, part_of, problem_of, unkept_limits
from moe_serve.eplb.policies.refined import RefinedPolicy
from moe_serve.eplb.policies.single_edits import (
    MIN_GAIN,
    NUM_HEAVY,
    SMALL_SLACK,
    STEEPNESS,
    EditGoal,
    EditLog,
    balance_reached,
    edit_layers,
    edits_within,
    replay_edits,
)
from moe_serve.errors import PlacementError

Ints = NDArray[np.int64]
# A layer of a hierarchy that edits leave this far behind a plan anew becomes that plan, where nothing limits the moves;
# one with a foreign start (`legal.LegalStart`) already where it is behind by the slack.
FAR = 0.08
REPAIRED = "experts without a slot, or on too few ranks, got one whatever that moves"
# Of a move with two slots per rank, see `pairs.PairRules`; within `max_moves`, those end the edits.
PAIR_PRICE, PAIR_PRICE_WITHIN_MOVES = 0.2, 0.01
PAIR_STEEPNESS = 20.0
# Few moves do not pay for new pairs where the load has changed a lot: single edits that are this share more even serve.
SINGLES_LEAD = 0.01


@dataclass(frozen=True)
class IncrementalPolicy:
    """The fewest moves from the placement in use to a good one.

    With two slots per rank and a limit of moves, layers that single edits level better keep those.

    slack:     a layer is done when its balancedness is within this share of what a fresh greedy plan reaches. None =
               0 with one slot per rank (`edit_one_slot`, the exact minimum), 0.003 where `max_moves` is given; else
               0.05 with two slots per rank, 0.01 with three or four, else 0.013
    steepness: of the smooth maximum, per mean rank load (two slots per rank: per load of the heaviest rank of a fresh
               plan); about 1 / the relative drift of a rank until the next plan. None = 20 with two slots, else 30
    risk:      see `pairs.PairRules`; used with two slots per rank only
    max_edits: effort, per layer
    Edits for the exact split (`link_edits.py`) end by their own target and gain per move; slack, steepness and risk do
    not concern them. Without a placement in use the plan is that of `refined`.
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
        first, which may take more moves. Under a hierarchy, missing experts come home and load off home beyond the
        budget is lowered within these limits; the plan says what they left undone. No layer is less even than before
        under the planned split, but where the repair or the hierarchy asks for it.
        """
        if request.current is None:
            return RefinedPolicy().plan(request)
        asked = request
        if request.max_rank_moves == 0:
            request = replace(request, max_moves=0)
        problem = problem_of(request)
        if request.max_total_moves is not None and problem.slots_per_rank <= 2 and problem.is_global:
            each = request.max_total_moves // len(problem.weight)  # these searches know no price across layers
            if request.max_moves is not None:
                each = min(each, request.max_moves)
            problem = problem_of(replace(request, max_moves=each, max_total_moves=None))
        if problem.slots_per_rank == 1 and problem.is_global:
            table = spread_over_nodes(problem, edit_one_slot(problem, problem.request.max_moves, self.slack or 0.0))
            return finish(problem, table, unkept=unkept_limits(asked, problem, table, REPAIRED))
        start = make_legal(problem)
        links = start.rule is None and _wants_links(problem)
        table, truncated = self._linked(problem, start.table) if links else self._edited(problem, start)
        if start.rule is None:
            table = spread_over_nodes(problem, table)
            return finish(problem, table, truncated, unkept=unkept_limits(asked, problem, table, REPAIRED))
        homes = start.rule.homes
        if not problem.limits_moves:
            truncated |= self._plan_far_layers_anew(problem, table, homes, start.foreign)
        if start.rule.singles:
            homes = read_homes(problem, table)
        unkept = unkept_limits(asked, problem, table, REPAIRED) + unkept_homes(problem, table, homes)
        return finish(problem, table, truncated, homes, unkept=unkept)

    def _plan_far_layers_anew(self, problem: Problem, table: Ids, homes: Ints, foreign: Bools) -> bool:
        """Replaces, in place, the layers whose homes suit the load so badly that edits leave them far behind a plan
        with other homes. Returns whether the deadline passed."""
        reached = balance_of(problem, table)
        bound = balancedness_bound(problem.weight, problem.num_ranks, problem.slots_per_rank)
        near = 1 - np.where(foreign, self._slack(problem), FAR)
        rows = np.flatnonzero(reached < bound * near)
        if not len(rows):
            return False
        part = part_of(problem, rows)
        fresh, fresh_homes = relabelled(part, *plan_by_node(part, sweeps=0)[:2])
        far = np.flatnonzero(reached[rows] < balance_of(part, fresh) * near[rows])
        if not len(far):
            return False
        rule = HomeRule(fresh_homes[far], problem.node_of, problem.request.off_home, has_single_homes(problem))
        edited, truncated = self._edited(part_of(part, far), LegalStart(fresh[far], rule, foreign[rows[far]]))
        table[rows[far]], homes[rows[far]] = edited, rule.homes
        return truncated

    def _edited(self, problem: Problem, start: LegalStart) -> tuple[Ids, bool]:
        """Returns the edited table, and whether the deadline passed."""
        table, rule = start.table.copy(), start.rule
        pairs = problem.slots_per_rank == 2 and problem.num_ranks > 2 and rule is None
        state = self._state(problem, table)
        target = self._target(problem)
        before = balance_reached(state)
        most = problem.request.max_moves
        budget = _budget(problem)
        todo = np.flatnonzero((before < target) & (state.num_moved < budget))
        if len(todo) == 0:
            return table, False
        least = MIN_GAIN if problem.request.min_gain is None else problem.request.min_gain
        goal = EditGoal(target[todo], budget[todo], least, self.max_edits)
        if pairs:
            paired = table.copy()
            price = PAIR_PRICE if most is None else PAIR_PRICE_WITHIN_MOVES
            rules = PairRules(budget - state.num_moved, self.steepness or PAIR_STEEPNESS, self.risk, price)
            truncated = edit_pairs(problem, paired, todo, rules)
            if most is None:
                return paired, truncated
            single, cut = _edited_singly(problem, rule, state, todo, goal)
            better = balance_of(problem, single) > balance_of(problem, paired) * (1 + SINGLES_LEAD)
            return np.where(better[:, None, None], single, paired), truncated | cut
        return _edited_singly(problem, rule, state, todo, goal)

    def _linked(self, problem: Problem, table: Ids) -> tuple[Ids, bool]:
        """Returns the table [L, R, K] after edits for the exact split, and whether the deadline passed."""
        state, budget = self._state(problem, table.copy()), _budget(problem)
        todo = np.flatnonzero((state.num_moved < budget) & problem.weight.any(axis=1))
        if len(todo) == 0:
            return state.table, False
        least = LINK_MIN_GAIN if problem.request.min_gain is None else problem.request.min_gain
        goal = EditGoal(np.full(len(todo), LINK_TARGET), budget[todo], least, self.max_edits)
        batches = deviating_batches(problem.weight, problem.num_ranks, problem.request.seed)[todo]
        work = state.rows(todo)
        moved = work.num_moved
        log, truncated = edit_links(work, batches, goal, problem.deadline)
        _keep_within_total(problem, state, todo, work, log, moved)
        state.table[todo] = work.table
        return state.table, truncated

    def _state(self, problem: Problem, table: Ids) -> EditState:
        """Returns a table [L, R, K] to edit in place."""
        assert problem.current is not None
        mean = problem.weight.sum(axis=1, keepdims=True) / problem.num_ranks
        mean = np.where(mean > 0, mean, 1.0)
        return EditState(
            problem.weight / mean,
            table,
            holds(problem.current, problem.weight.shape[1]),
            self.steepness or STEEPNESS,
            None if problem.fixed is None else problem.fixed / mean,
            problem.min_replicas,
            problem.request.max_rank_moves,
        )

    def _slack(self, problem: Problem) -> float:
        """Returns the share of the balancedness that a layer may lack."""
        if self.slack is not None:
            return self.slack
        if (problem.request.max_moves, problem.request.max_total_moves) != (None, None):
            return SMALL_SLACK  # the budget ends the edits
        return 0.05 if problem.slots_per_rank <= 2 else 0.01 if problem.slots_per_rank <= 4 else 0.013

    def _target(self, problem: Problem) -> Floats:
        """Returns the balancedness [L] at which a layer needs no edits."""
        slack = self._slack(problem)
        if not problem.is_global:
            bound = balancedness_bound(problem.weight, problem.num_ranks, problem.slots_per_rank)
            return bound * (1 - slack)
        return balance_of(problem, greedy_table(problem)) * (1 - slack)


def _edited_singly(
    problem: Problem, rule: HomeRule | None, state: EditState, todo: Ints, goal: EditGoal
) -> tuple[Ids, bool]:
    """Returns the table after single edits of these layers, and whether the deadline passed."""
    table, before = state.table.copy(), balance_reached(state)[todo]
    work = state.rows(todo)
    if rule is None and problem.request.max_total_moves is None:
        _fill_empty_slots(work, goal.target, goal.budget)
    moved = work.num_moved
    log, truncated = edit_layers(work, goal, None if rule is None else rule.rows(todo), problem.deadline)
    _keep_within_total(problem, state, todo, work, log, moved)
    # A lower smooth maximum over ranks is nearly always a lower maximum; where it is not, nothing is gained.
    better = balance_reached(work) > before * (1 + ROUNDING)
    table[todo[better]] = work.table[better]
    return table, truncated


def _keep_within_total(
    problem: Problem, state: EditState, todo: Ints, work: EditState, log: EditLog, moved: Ints
) -> None:
    """Takes edits of `work`, the layers `todo` of a state, back until all layers keep `max_total_moves`, in place.

    moved: [len(todo)] moves before the edits
    """
    total = problem.request.max_total_moves
    if total is None:
        return
    total -= int(state.num_moved.sum() - moved.sum())
    work.table = state.table[todo]
    mean = problem.weight[todo].sum(axis=1) / problem.num_ranks
    replay_edits(work.table, log, edits_within(log, moved, np.where(mean > 0, mean, 1.0), total))
    work.refresh()


def _wants_links(problem: Problem) -> bool:
    """Whether the exact split serves the plan, and edits for it are better than those for the even one.

    A replica links two ranks. With fewer spare ones than half the ranks most ranks stay apart, and the split has little
    to shift.
    """
    exact = problem.request.planned_split == "exact" and problem.fixed is None
    return exact and 2 * problem.num_spare > problem.num_ranks


def _budget(problem: Problem) -> Ints:
    """Returns the moves of each layer, [L]."""
    most = problem.request.max_moves
    return np.full(len(problem.weight), problem.num_slots if most is None else most)


def balance_of(problem: Problem, table: Ids) -> Floats:
    """Returns the balancedness [L] of a table [L, R, K] under the objective."""
    return balance_reached(EditState(problem.weight, table, holds(table, problem.weight.shape[1]), 0.0, problem.fixed))


def _fill_empty_slots(state: EditState, target: Floats, budget: Ints) -> None:
    """Puts replicas into empty slots, in place, while that helps: after a rank rejoined, or a start was repaired."""
    for _ in range(int((state.table < 0).sum(axis=(1, 2)).max(initial=0))):
        edit = best_overwrites(state, budget - state.num_moved, must_stay=state.table >= 0)
        which = (edit.gain > 1e-9) & (balance_reached(state) < target)
        if not which.any():
            return
        apply_edits(state, edit, which)


@dataclass(frozen=True)
class SeriesPolicy:
    """The placement in use, edited for the windows of `PlanRequest.series`.

    steepness: of the smooth maximum, per mean rank load
    max_edits: effort, per layer
    Without at least two windows the plan is that of `incremental`. Without a placement in use, the first one is that of
    `refined` for the sum.
    """

    steepness: float = 30.0
    max_edits: int = 400
    name: str = "series"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the edited placement; `max_total_moves` is shared out evenly over layers.

        Raises PlacementError for a series with a node hierarchy, or with another objective than tokens.
        """
        if request.series is None or len(request.series) < 2:
            return IncrementalPolicy().plan(request)
        if request.off_home < 1 or request.objective_weights.keys() != {"tokens"}:
            raise PlacementError(
                f"policy series plans the tokens of several windows without a hierarchy, and the request has objective "
                f"{request.objective!r} and off_home {request.off_home}; use objective 'tokens' and off_home 1, or "
                "policy incremental"
            )
        most = request.num_slots
        if request.current is None:
            request = replace(request, current=RefinedPolicy().plan(request).placement)
        elif request.max_moves is not None:
            most = request.max_moves
        problem = problem_of(request)
        assert problem.current is not None
        assert request.series is not None
        if request.max_total_moves is not None:
            most = min(most, request.max_total_moves // len(problem.weight))
        table = make_legal(problem).table
        was_here = holds(problem.current, problem.weight.shape[1])
        least = MIN_GAIN if request.min_gain is None else request.min_gain
        mean = request.series.sum(axis=2, keepdims=True) / problem.num_ranks
        unit = request.series / np.where(mean > 0, mean, 1.0)
        weights = request.series_weights
        share = np.full(len(unit), 1.0) if weights is None else np.asarray(weights)
        share = share / share.sum()
        some = share > 0
        truncated = False
        for row in range(len(table)):
            state = state_of(
                unit[some, row], table[row], was_here[row], self.steepness, problem.min_replicas, request.max_rank_moves
            )
            truncated |= self._edit(state, share[some], most, least, problem.deadline)
            table[row] = state.table[0]
        table = spread_over_nodes(problem, table)
        return finish(problem, table, truncated, unkept=unkept_limits(request, problem, table, REPAIRED))

    def _edit(self, state: EditState, share: Floats, most: int, least: float, deadline: Deadline) -> bool:
        """Edits the table of a layer in place; returns whether the deadline ended it."""
        for _ in range(self.max_edits):
            if deadline.passed:
                return True
            after = best_edit(state, share, most - int(state.num_moved[0]), least)
            if after is None:
                break
            state.table[:] = after
            state.refresh()
        return False


def state_of(
    unit: Floats,
    table: Ids,
    was_here: NDArray[np.bool_],
    steepness: float,
    min_replicas: int,
    max_rank_moves: int | None = None,
) -> EditState:
    """Returns one layer as an `EditState` with W rows of the same table: unit [W, E], table [R, K], was_here [R, E]."""
    num = len(unit)
    return EditState(
        unit,
        np.repeat(table[None], num, axis=0),
        np.broadcast_to(was_here, (num, *was_here.shape)),
        steepness,
        min_replicas=min_replicas,
        max_rank_moves=max_rank_moves,
    )


def best_edit(state: EditState, share: Floats, room: int, least: float) -> Ids | None:
    """Returns the table [R, K] after the edit with the most mean gain per move; None where none gains `least` a move.

    share: [W] weights of the windows, summing to 1;  room: moves left;  least: in mean rank loads
    """
    num_slots = state.table.shape[2]
    by_window = share / (state.steep * state.peak.sum(axis=1))  # to mean rank loads of each window
    flat = state.table[0].reshape(-1).copy()
    options = all_overwrites(state)
    gain, cost = _mean(options.gain, by_window), options.cost[0].astype(np.int64)
    rate = _rates(gain, cost, room)
    heavy = np.argsort(-(by_window @ state.peak), kind="stable")[:NUM_HEAVY]
    swap_gain, swap_cost = all_swaps(state, np.repeat(heavy[None], len(share), axis=0))
    swap_rate = _rates(_mean(swap_gain, by_window), swap_cost[0].astype(np.int64), room)
    if max(rate.max(initial=-np.inf), swap_rate.max(initial=-np.inf)) <= max(least, 1e-9):
        return None
    if swap_rate.max(initial=-np.inf) >= rate.max(initial=-np.inf):
        first, other = divmod(int(swap_rate.argmax()), len(flat))
        slot = heavy[first // num_slots] * num_slots + first % num_slots
        flat[[slot, other]] = flat[[other, slot]]
    else:
        place, expert = np.unravel_index(int(rate.argmax()), rate.shape)
        flat[options.slot[0, place]] = expert
    after: Ids = flat.reshape(state.table.shape[1:])
    return after


def _mean(gain: Floats, by_window: Floats) -> Floats:
    """Returns the gain over the windows; -inf where it is illegal, which it is in all windows or none."""
    return np.asarray(np.einsum("w,w...->...", by_window, gain))


def _rates(gain: Floats, cost: NDArray[np.int64], room: int) -> Floats:
    """Returns the gain per move; an edit that costs nothing counts as a quarter of a move."""
    return np.where((cost <= room) & (gain > 0), gain / np.maximum(cost, 0.25), -np.inf)
