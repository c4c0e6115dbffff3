"""The rebalancer: its states, its requests and rounds, and what it refuses."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.load import LoadRecord, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.rebalance.events import (
    MigrationFailed,
    PlaceAt,
    PlanFailed,
    PlanReady,
    RequestPlan,
    RoundActivated,
    StartRound,
    WindowClosed,
)
from moe_serve.eplb.rebalance.rebalancer import MOST_WITHOUT_WHOLE, Rebalancer, WindowWatch, make_rebalancer
from moe_serve.eplb.rebalance.settings import BalancerSettings, RebalanceSettings, SystemFacts
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology

STEPS = 100


@dataclass
class LinearPrices(GateCost):
    """Seconds follow the tokens of the most loaded rank; moves cost so much each."""

    token_s: float = 1e-6
    transfer_s: float = 1e-4

    def layer_seconds(self, tokens, activations, placement):
        return rank_load(tokens, placement).max(axis=1) * self.token_s

    def migration_seconds(self, plan, topology):
        return plan.num_transfers * self.transfer_s


TOPOLOGY = Topology(2, 2)
START = Placement.trivial(3, 8, 4, 4)
SKEWED = np.array([[50, 50, 1, 1, 1, 1, 1, 1], [10] * 8, [1, 1, 1, 1, 1, 1, 80, 80]]) * 100


def settings(**changes):
    return replace(RebalanceSettings(warmup_windows=1, max_regret=0.2), **changes)


def window(index, tokens=SKEWED, steps=STEPS):
    record = LoadRecord(index * STEPS, steps, "decode", np.asarray(tokens) * max(steps, 1))
    return WindowClosed((index + 1) * STEPS, record)


def plan_for(request: RequestPlan):
    return make_policy("greedy").plan(request.request)


def asked(rebalancer):
    """Feeds windows until the rebalancer asks for a plan."""
    for index in range(5):
        actions = rebalancer.handle(window(index))
        if actions:
            return actions[0]
    raise AssertionError(rebalancer.decisions)


@pytest.mark.parametrize(("node_moves", "busiest"), [(None, 2), (1, 1)])
def test_no_round_of_a_made_rebalancer_exceeds_the_limits_that_a_person_set(node_moves, busiest):
    facts = SystemFacts(2, 10, 1e-6, 1e-9, survives_loss=False, split="even")
    rebalancer = make_rebalancer(START, BalancerSettings(node_moves=node_moves), facts)
    to_the_other_node = np.roll(START.physical_to_logical, START.num_slots // 2, axis=1)
    rounds = run_rounds(rebalancer, rebalancer.handle(PlaceAt(0, to_the_other_node)))
    into_nodes = [
        Counter(m.dst_rank // 2 for m in one.round.moves if m.src_rank // 2 != m.dst_rank // 2) for one in rounds
    ]
    assert max(max(counts.values(), default=0) for counts in into_nodes) == busiest


@pytest.mark.parametrize(
    ("split", "planned"), [("even", "even"), ("nearest", "even"), ("exact", "exact"), ("time", "exact")]
)
def test_plans_are_for_the_split_that_serves_and_loads_count_as_shared_evenly(split, planned):
    """Expert 0 is on both ranks, which have 40 and 60 tokens by the even split, and 50 each by the exact one."""
    linked = Placement(np.array([[0, 1, 0, 2]], dtype=np.int32), 3, 2)
    tokens = 10**6 * np.array([[40, 20, 40]])
    rebalancer = make_rebalancer(linked, BalancerSettings(), SystemFacts(1, 10, 1e-6, 1e-9, False, split=split))
    assert rebalancer.cost.layer_seconds(tokens, None, linked) == pytest.approx(rebalancer.cost.skew_s * 60e6)
    for index in range(2):
        actions = rebalancer.handle(WindowClosed(10 * index + 10, LoadRecord(10 * index, 10, "decode", tokens)))
    assert actions[0].request.planned_split == planned


def run_rounds(rebalancer, actions):
    """Activates rounds until none is left; returns them."""
    rounds = []
    while actions:
        (action,) = actions
        assert isinstance(action, StartRound)
        rounds.append(action)
        actions = rebalancer.handle(RoundActivated(action.step + 1, action.version))
    return rounds


def test_a_skewed_load_is_planned_moved_and_done():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices())
    assert rebalancer.handle(window(0)) == ()  # warm-up
    (request,) = rebalancer.handle(window(1))
    assert isinstance(request, RequestPlan)
    assert request.layer_rows == (0, 2)  # the even layer is left alone
    assert request.request.current is not None
    assert np.array_equal(request.request.current.physical_to_logical, START.physical_to_logical[[0, 2]])
    assert rebalancer.state == "planning"
    assert rebalancer.handle(window(2)) == ()  # one question at a time
    rounds = run_rounds(rebalancer, rebalancer.handle(PlanReady(300, request.request_id, plan_for(request))))
    assert [r.version for r in rounds] == list(range(1, len(rounds) + 1))
    assert rebalancer.placement.version == len(rounds) > 0
    assert rebalancer.state == "watching"
    before, after = (LinearPrices().layer_seconds(SKEWED, None, p) for p in (START, rebalancer.placement))
    assert (after[[0, 2]] < 0.7 * before[[0, 2]]).all()
    assert after[1] == before[1]
    assert [d.kind for d in rebalancer.decisions] == ["plan", "move", "done"]


@pytest.mark.parametrize("shifts", [True, False])
def test_the_window_in_which_a_move_ends_judges_it_and_the_next_plan_waits_no_longer(shifts):
    rebalancer = Rebalancer(START, TOPOLOGY, settings(warmup_windows=4), LinearPrices())
    for index in range(4):
        assert rebalancer.handle(window(index)) == ()
    (request,) = rebalancer.handle(window(4, SKEWED[:, ::-1]))
    run_rounds(rebalancer, rebalancer.handle(PlanReady(501, request.request_id, plan_for(request))))
    assert rebalancer.decisions[-1].kind == "done"
    # Its plan knew nothing of this window's load.
    actions = rebalancer.handle(window(5, np.roll(SKEWED, 3, axis=1) if shifts else SKEWED[:, ::-1]))
    assert [d.kind for d in rebalancer.decisions][3:] == ["watch", "plan"]
    assert [type(action) for action in actions] == [RequestPlan]


def test_the_same_events_give_the_same_actions():
    def actions():
        rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices())
        request = asked(rebalancer)
        return run_rounds(rebalancer, rebalancer.handle(PlanReady(300, 0, plan_for(request)))), rebalancer.decisions

    assert actions() == actions()


def test_balanced_layers_are_not_planned_and_hysteresis_takes_near_ones_along():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(warmup_windows=0), LinearPrices())
    for index in range(3):
        assert rebalancer.handle(window(index, np.full((3, 8), 100))) == ()
    near = np.full((3, 8), 100)
    near[0, :2] = 106  # balancedness 0.97: above the trigger, below the release
    assert rebalancer.handle(window(3, near)) == ()
    both = near.copy()
    both[2, :2] = 900
    for index in range(4, 8):
        actions = rebalancer.handle(window(index, both))
        if actions:
            break
    assert actions[0].layer_rows == (0, 2)


def test_idle_windows_teach_nothing():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices())
    for index in range(4):
        assert rebalancer.handle(window(index, np.zeros((3, 8), dtype=int))) == ()
        assert rebalancer.handle(window(index, steps=0)) == ()
    assert rebalancer.decisions == ()


def test_a_move_that_costs_more_than_it_gains_is_not_made():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices(transfer_s=1e3))
    request = asked(rebalancer)
    assert rebalancer.handle(PlanReady(300, request.request_id, plan_for(request))) == ()
    assert rebalancer.decisions[-1].kind == "keep"
    assert "worth" in rebalancer.decisions[-1].reason
    assert rebalancer.placement is START


def test_answers_to_older_questions_are_dropped():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices())
    request = asked(rebalancer)
    assert rebalancer.handle(PlanReady(300, request.request_id + 1, plan_for(request))) == ()
    assert rebalancer.handle(PlanFailed(300, request.request_id + 1, "old")) == ()
    assert rebalancer.state == "planning"


def test_a_failed_planner_is_asked_again_only_after_a_while():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(max_failures=9), LinearPrices())
    waits = []
    index = 0
    for _ in range(3):
        start = index
        actions = ()
        while not actions:
            actions = rebalancer.handle(window(index))
            index += 1
        waits.append(index - start)
        rebalancer.handle(PlanFailed(index * STEPS, actions[0].request_id, "killed"))
        assert rebalancer.decisions[-1].kind == "failed"
        assert "killed" in rebalancer.decisions[-1].reason
    assert waits[2] > waits[1] > 1


def test_an_illegal_plan_ends_as_a_decision():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices())
    request = asked(rebalancer)
    plan = plan_for(request)
    whole = replace(plan, placement=START)
    assert rebalancer.handle(PlanReady(300, request.request_id, whole)) == ()
    assert rebalancer.decisions[-1].kind == "failed"
    assert rebalancer.state == "watching"


def test_a_migration_that_fails_leaves_the_last_legal_placement():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices())
    request = asked(rebalancer)
    (first,) = rebalancer.handle(PlanReady(300, request.request_id, plan_for(request)))
    (second,) = rebalancer.handle(RoundActivated(301, first.version))
    kept = rebalancer.placement
    assert rebalancer.state == "moving"
    assert rebalancer.handle(MigrationFailed(302, "rank 3 is slow")) == ()
    assert rebalancer.placement is kept
    assert kept.version == first.version == second.version - 1
    assert rebalancer.state == "watching"
    assert "rank 3 is slow" in rebalancer.decisions[-1].reason


def test_what_does_not_fit_is_refused():
    rebalancer = Rebalancer(START, TOPOLOGY, settings(), LinearPrices())
    with pytest.raises(PlacementError, match="shape"):
        rebalancer.handle(window(0, np.ones((3, 9), dtype=int)))
    with pytest.raises(PlacementError, match="no round is running"):
        rebalancer.handle(RoundActivated(1, 1))
    request = asked(rebalancer)
    rebalancer.handle(PlanReady(300, request.request_id, plan_for(request)))
    with pytest.raises(PlacementError, match="version 1 is the running one"):
        rebalancer.handle(RoundActivated(301, 2))
    with pytest.raises(PlacementError, match="3 ranks"):
        Rebalancer(START, Topology(1, 3), settings(), LinearPrices())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trigger": 0.99, "release": 0.9}, "trigger <= release"),
        ({"decay": 0}, "decay"),
        ({"history_windows": 0}, "history_windows"),
        ({"gain_margin": 0.5}, "gain_margin"),
        ({"max_regret": 1.0}, "max_regret"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        RebalanceSettings(**change)


def test_ranks_without_experts_stay_without():
    rows = np.tile(np.concatenate([np.arange(8), np.arange(4), [-1] * 4]), (1, 1))
    placement = Placement(rows, 8, 4)
    rebalancer = Rebalancer(placement, TOPOLOGY, settings(), LinearPrices())
    request = asked_one(rebalancer)
    assert request.request.excluded_ranks == (3,)
    run_rounds(rebalancer, rebalancer.handle(PlanReady(300, request.request_id, plan_for(request))))
    assert (rebalancer.placement.physical_to_logical[:, 12:] == -1).all()


def asked_one(rebalancer):
    for index in range(5):
        actions = rebalancer.handle(window(index, SKEWED[:1]))
        if actions:
            return actions[0]
    raise AssertionError(rebalancer.decisions)


def test_sources_and_activations_reach_the_planner_when_they_are_recorded():
    rules = PlanRules(objective={"tokens": 1.0, "activated": 1.0})
    rebalancer = Rebalancer(START, TOPOLOGY, settings(rules=rules), LinearPrices())
    by_source = np.repeat(SKEWED[:, None] * STEPS // 4, 4, axis=1)
    activations = np.full((3, 8), STEPS // 2)
    for index in range(3):
        record = LoadRecord(
            index * STEPS, STEPS, "decode", by_source.sum(axis=1), by_source=by_source, activations=activations
        )
        actions = rebalancer.handle(WindowClosed((index + 1) * STEPS, record))
        if actions:
            break
    request = actions[0].request
    assert request.by_source == pytest.approx(by_source[[0, 2]] / STEPS)
    assert request.activations == pytest.approx(np.full((2, 8), 0.5))


OLD, NEW = (Placement.trivial(1, 4, 2, 0) for _ in range(2))


def record(first_step, num_steps=100, tokens=9):
    return LoadRecord(first_step, num_steps, "decode", np.full((1, 4), tokens))


def test_the_window_in_which_a_move_ends_measures_it_but_teaches_no_prices():
    watch = WindowWatch(OLD, 1, learns=False)
    assert watch.close(record(0), OLD, is_moving=False).whole
    watch.plan_asked(100)
    watch.complete(130)
    closed = watch.close(record(100), NEW, is_moving=False)
    assert (closed.first, closed.last, closed.whole, closed.unseen) == (OLD, NEW, False, True)
    closed = watch.close(record(200), NEW, is_moving=False)
    assert (closed.first, closed.last, closed.whole, closed.unseen) == (NEW, NEW, True, True)


def test_a_window_that_the_plan_knew_in_part_or_in_which_experts_still_move_measures_nothing():
    watch = WindowWatch(OLD, 1, learns=False)
    watch.plan_asked(50)  # by hand, inside the window
    watch.complete(70)
    assert not watch.close(record(0), NEW, is_moving=False).unseen
    watch.plan_asked(100)
    closed = watch.close(record(100), NEW, is_moving=True)
    assert not closed.unseen
    assert not closed.whole


def test_windows_without_load_say_nothing():
    watch = WindowWatch(OLD, 1, learns=False)
    assert watch.close(record(0, tokens=0), OLD, is_moving=False) is None
    assert watch.num_windows == 0


def test_the_cooldown_counts_unseen_windows():
    watch = WindowWatch(OLD, 3, learns=False)
    watch.rest()
    assert [watch.is_due() for _ in range(4)] == [False, False, True, True]


def test_where_prices_are_learned_a_window_without_a_move_is_waited_for_once_in_a_while():
    for learns in (False, True):
        watch = WindowWatch(OLD, 1, learns)
        due = []
        for index in range(2 * MOST_WITHOUT_WHOLE + 2):
            watch.close(record(100 * index), OLD, is_moving=False)
            due.append(watch.is_due())
            if due[-1]:  # a plan, and a move that ends within the next window
                watch.plan_asked(100 * (index + 1))
                watch.complete(100 * (index + 1) + 30)
        one_cycle = [True] * MOST_WITHOUT_WHOLE + [False]
        assert due == (one_cycle * 2 if learns else [True] * len(due))
