"""Plans for a series of windows: each edit against all edits, limits kept, and what the sum of windows cannot see."""

import itertools

import numpy as np
import pytest

from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness, rank_load
from moe_serve.eplb.migration.moves import RoundLimits
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planner_process import Ask, MessageReader, pieces
from moe_serve.eplb.policies.incremental import best_edit, state_of
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.errors import ConfigError, PlacementError, TraceError
from moe_serve.topology import Topology

STEEP = 6.0


def peaks(unit: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns exp(steepness x load) of each rank: [W, R]."""
    count = np.bincount(table[table >= 0], minlength=unit.shape[1])
    share = np.append(unit / np.maximum(count, 1), np.zeros((len(unit), 1)), axis=1)
    return np.exp(STEEP * share[:, table].sum(axis=2))


def all_edits(table: np.ndarray, num_logical: int):
    """Yields every table one overwrite of a redundant replica (or empty slot) or one swap away."""
    num_ranks, num_slots = table.shape
    places = list(itertools.product(range(num_ranks), range(num_slots)))
    count = np.bincount(table[table >= 0], minlength=num_logical)
    for place in places:
        if table[place] < 0 or count[table[place]] > 1:
            for expert in set(range(num_logical)) - set(table[place[0]].tolist()):
                after = table.copy()
                after[place] = expert
                yield after
    for one, other in itertools.combinations(places, 2):
        after = table.copy()
        after[one], after[other] = table[other], table[one]
        if one[0] != other[0] and all(len(set(row[row >= 0])) == (row >= 0).sum() for row in after):
            yield after


def cost(table: np.ndarray, was: np.ndarray) -> int:
    return sum(len(set(row[row >= 0]) - set(old[old >= 0])) for row, old in zip(table, was, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_an_edit_is_the_best_of_all_edits_by_the_mean_over_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_windows, num_logical, num_ranks, num_slots = int(rng.integers(1, 4)), 5, 3, int(rng.integers(2, 4))
    table = Placement.trivial(1, num_logical, num_ranks, num_ranks * num_slots - num_logical).physical_to_logical
    table = table[0].reshape(num_ranks, num_slots)
    load = rng.exponential(size=(num_windows, num_logical))
    unit = load / load.sum(axis=1, keepdims=True) * num_ranks
    share = rng.dirichlet(np.ones(num_windows))
    held = np.array([[expert in row for expert in range(num_logical)] for row in table])
    state = state_of(unit, table, held, STEEP, 1)
    after = best_edit(state, share, room=2, least=0.0)

    before = peaks(unit, table).sum(axis=1)

    def rate(new: np.ndarray) -> float:
        return float(share @ (1 - peaks(unit, new).sum(axis=1) / before)) / STEEP / max(cost(new, table), 0.25)

    best = max((rate(new) for new in all_edits(table, num_logical)), default=0.0)
    if after is None:
        assert best <= 1e-9
    else:
        assert rate(after) == pytest.approx(best)


# Experts 0 and 1 are busy by day, 2 and 3 by night: their sum is even on every placement.
DAY, NIGHT = np.array([[6, 6, 1, 1]]), np.array([[1, 1, 6, 6]])
APART = Placement(np.array([[0, 1, 2, 3]]), 4, 2)


def served(placement: Placement) -> float:
    return min(float(balancedness(rank_load(load, placement))[0]) for load in (DAY, NIGHT))


def test_loads_that_take_turns_are_both_even_after_a_swap_that_the_sum_does_not_ask_for() -> None:
    request = PlanRequest(DAY + NIGHT, Topology(1, 2), 4, current=APART, series=np.array([DAY, NIGHT]))
    plan = make_policy("series").plan(request)
    assert served(APART) == pytest.approx(7 / 12)
    assert served(make_policy("incremental").plan(request).placement) == pytest.approx(7 / 12)
    assert served(plan.placement) == 1.0
    assert plan.num_moves == 2


@pytest.mark.parametrize("limit", [{"max_moves": 1}, {"max_total_moves": 1}, {"min_gain": 10.0}])
def test_limits_of_moves_and_the_least_gain_hold(limit) -> None:
    series = np.array([DAY, NIGHT])
    request = PlanRequest(DAY + NIGHT, Topology(1, 2), 4, current=APART, series=series, **limit)
    assert make_policy("series").plan(request).num_moves == 0  # a swap takes two moves


def test_windows_without_weight_or_load_do_not_count() -> None:
    nothing = np.zeros((1, 4), dtype=np.int64)
    request = PlanRequest(DAY, Topology(1, 2), 4, current=APART, series=np.array([NIGHT, nothing, DAY]))
    only_day = PlanRequest(
        DAY, Topology(1, 2), 4, current=APART, series=np.array([DAY, NIGHT]), series_weights=(1.0, 0.0)
    )
    for each in (request, only_day):
        placement = make_policy("series").plan(each).placement
        assert balancedness(rank_load(DAY, placement))[0] == 1.0
    empty = PlanRequest(nothing, Topology(1, 2), 4, current=APART, series=np.array([nothing, nothing]))
    assert make_policy("series").plan(empty).num_moves == 0


def test_ranks_that_take_no_part_stay_empty_and_a_first_plan_needs_no_placement() -> None:
    rng = np.random.default_rng(1)
    series = rng.integers(0, 100, size=(3, 2, 6))
    request = PlanRequest(series.sum(axis=0), Topology(1, 4), 12, series=series, excluded_ranks=(2,), min_replicas=1)
    plan = make_policy("series").plan(request)
    assert (plan.placement.physical_to_logical.reshape(2, 4, 3)[:, 2] == -1).all()
    assert plan.placement.num_duplicates.sum() == 0
    fresh = make_policy("refined").plan(request).placement

    def mean(placement: Placement) -> float:
        return float(np.mean([balancedness(rank_load(load, placement), request.live_ranks) for load in series]))

    assert mean(plan.placement) >= mean(fresh) - 1e-9


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"series": np.ones((2, 1, 3))}, "series has shape"),
        ({"series": np.ones((0, 1, 4))}, "at least one window"),
        ({"series": np.full((2, 1, 4), np.nan)}, "NaN"),
        ({"series_weights": (1.0,)}, "for 0 windows"),
        ({"series": np.ones((2, 1, 4)), "series_weights": (0.0, 0.0)}, "not all 0"),
        ({"series": np.ones((2, 1, 4)), "series_weights": (1.0, -1.0)}, "at least 0"),
    ],
)
def test_a_wrong_series_is_refused(wrong, says) -> None:
    with pytest.raises(PlacementError, match=says):
        PlanRequest(DAY, Topology(1, 2), 4, **wrong)


def test_a_hierarchy_or_another_objective_is_refused_by_name() -> None:
    series = np.array([DAY, NIGHT])
    for more in ({"off_home": 0.0}, {"objective": "activated"}):
        with pytest.raises(PlacementError, match="policy series"):
            make_policy("series").plan(PlanRequest(DAY + NIGHT, Topology(2, 1), 4, series=series, **more))


def test_a_request_with_a_series_crosses_to_the_planner_process() -> None:
    request = PlanRequest(
        DAY + NIGHT, Topology(1, 2), 4, current=APART, series=np.array([DAY, NIGHT]), series_weights=(0.5, 1.0)
    )
    reader = MessageReader(Ask)
    (arrived,) = [
        ask for part in pieces(Ask(1, "series", request, RoundLimits(), "none")) if (ask := reader.feed(part))
    ]
    assert arrived.request.series is not None
    assert arrived.request.series.tolist() == [DAY.tolist(), NIGHT.tolist()]
    assert arrived.request.series_weights == (0.5, 1.0)


def test_a_replay_of_days_and_nights_serves_both() -> None:
    trace = LoadTrace.of([LoadRecord(i, 1, "decode", 100 * (NIGHT if i % 2 else DAY)) for i in range(8)])
    settings = ReplaySettings(Topology(1, 2), 4, start=APART, history=2)
    summed, over_series = replay(trace, ["incremental", "series"], settings).policies
    assert summed.served.mean() == pytest.approx(7 / 12)
    assert over_series.served.mean() == 1.0
    assert over_series.moves.sum() == 2


def test_series_behind_the_gate_is_refused_because_a_gate_plans_for_one_load() -> None:
    trace = LoadTrace.of([LoadRecord(i, 1, "decode", DAY) for i in range(3)])
    with pytest.raises(ConfigError, match="use series without the gate"):
        replay(trace, ["gate:series"], ReplaySettings(Topology(1, 2), 4, start=APART, history=2))
    with pytest.raises(ConfigError, match="--history 2 or more"):
        replay(trace, ["series"], ReplaySettings(Topology(1, 2), 4, start=APART))


def test_one_placement_for_days_and_nights_is_planned_from_the_last_windows_of_a_trace() -> None:
    trace = LoadTrace.of([LoadRecord(i, 1, "decode", NIGHT if i % 2 else DAY) for i in range(4)])
    made = plan_from_trace(trace, TracePlanSettings(Topology(1, 2), 4, "series", current=APART, last=2))
    assert made.num_windows == 2
    assert served(made.plan.placement) == 1.0
    for last in (0, 1, 65):
        with pytest.raises(ConfigError, match="from 2 to 64"):
            plan_from_trace(trace, TracePlanSettings(Topology(1, 2), 4, "series", last=last))
    one = LoadTrace.of([LoadRecord(0, 1, "decode", DAY)])
    with pytest.raises(TraceError, match="has 1 windows"):
        plan_from_trace(one, TracePlanSettings(Topology(1, 2), 4, "series", last=2))
