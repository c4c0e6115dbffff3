"""Edits the placement in use for a series of windows, not for their sum: days and nights, one domain and another.

Two loads that take turns can each be uneven on a placement that suits their sum. So every edit is chosen by what it
gains on average over the windows: the mean of their smooth maxima over ranks, each in mean rank loads of its window
(`edits.py`). Steps of the search are those of `single_edits.py`, in numpy, one layer after the other.

Shape words: W = windows, L = layers, E = experts, R = ranks, K = slots per rank, P = R x K.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.edits import EditState, all_overwrites, all_swaps
from moe_serve.eplb.policies.incremental import REPAIRED, IncrementalPolicy
from moe_serve.eplb.policies.legal import make_legal
from moe_serve.eplb.policies.packing import Deadline
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import finish, holds, problem_of, unkept_limits
from moe_serve.eplb.policies.refined import RefinedPolicy
from moe_serve.eplb.policies.single_edits import MIN_GAIN
from moe_serve.eplb.policies.spread import spread_over_nodes
from moe_serve.errors import PlacementError

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]
NUM_HEAVY = 6  # of the heaviest ranks, at which swaps begin


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
