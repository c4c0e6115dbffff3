"""Prices learned from step times: they find the true ones of a linear world, and the gate decides rightly by them."""

from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.cost.measured import MeasuredCost, PriorPrices
from moe_serve.eplb.load import LoadRecord, rank_load
from moe_serve.eplb.migration.moves import MigrationRound, SlotMove
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.rebalance.events import PlanReady, RequestPlan, RoundActivated, StartRound, WindowClosed
from moe_serve.eplb.rebalance.rebalancer import make_rebalancer
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts
from moe_serve.topology import Topology

START = Placement.trivial(4, 16, 4, 8)
STEPS = 50
BASE_S, TOKEN_S, SKEW_S = 0.004, 3e-6, 2e-6  # of the true world
TWO_EACH = MigrationRound((SlotMove(0, 0, 0, 1, 6), SlotMove(0, 0, 1, 1, 7), SlotMove(0, 0, 2, 0, 3)))


def world(load, placement, rng=None, noise=0.0, skew_s=SKEW_S):
    """Returns the record of a window in which steps took what the true prices say."""
    ranks = rank_load(load, placement)[:, placement.live_ranks]
    mean, busiest = ranks.mean(axis=1).sum(), ranks.max(axis=1).sum()
    seconds = BASE_S + TOKEN_S * mean + skew_s * (busiest - mean)
    if rng is not None:
        seconds *= rng.lognormal(0.0, noise)
    return LoadRecord(0, STEPS, "mixed", np.round(load * STEPS).astype(np.int64), step_time_s=float(seconds))


def draw(rng):
    """A load whose size and skew vary."""
    popularity = np.exp(rng.uniform(0.1, 1.0) * rng.standard_normal((4, 16)))
    return popularity / popularity.sum(axis=1, keepdims=True) * rng.uniform(100, 2000)


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 10.0, 100.0])
def test_prices_converge_to_the_true_ones_from_any_start(factor):
    rng = np.random.default_rng(1)
    cost = MeasuredCost(PriorPrices(TOKEN_S * factor, 1e-3), 0.05)
    assert cost.learns, "so that windows without a move are waited for"
    for _ in range(60):
        assert cost.learn_window(world(draw(rng), START, rng, 0.02), START)
    assert cost.base_s == pytest.approx(BASE_S, rel=0.05)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert cost.skew_s == pytest.approx(SKEW_S, rel=0.15)


def test_slow_windows_now_and_then_do_not_count_much():
    rng = np.random.default_rng(2)
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    for index in range(80):
        record = world(draw(rng), START, rng, 0.02)
        if index % 7 == 3:
            record = replace(record, step_time_s=record.step_time_s * 8)
        cost.learn_window(record, START)
    assert cost.base_s == pytest.approx(BASE_S, rel=0.25)
    assert cost.skew_s == pytest.approx(SKEW_S, rel=0.3)


def test_a_changed_world_is_learned_anew():
    rng = np.random.default_rng(3)
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    for skew_s in (SKEW_S, 5 * SKEW_S):
        for _ in range(150):
            cost.learn_window(world(draw(rng), START, rng, 0.02, skew_s), START)
        assert cost.skew_s == pytest.approx(skew_s, rel=0.2)


def test_a_constant_load_leaves_the_assumed_share_and_nothing_below_zero():
    rng = np.random.default_rng(4)
    load = draw(rng)
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    for _ in range(50):
        cost.learn_window(world(load, START, rng, 0.05), START)
    assert 0.2 * cost.token_s <= cost.skew_s <= 2 * cost.token_s
    predicted = cost.layer_seconds(load, START).sum() + cost.other_seconds(load, START)
    assert predicted == pytest.approx(world(load, START).step_time_s, rel=0.05)
    for _ in range(100):  # ranks that share a core: the busiest one does not matter
        cost.learn_window(world(draw(rng), START, rng, 0.02, -SKEW_S), START)
    assert cost.skew_s == 0.0


def test_idle_steps_of_a_window_change_no_price():
    costs = [MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05) for _ in range(2)]
    rng = np.random.default_rng(5)
    for _ in range(30):
        record = world(draw(rng), START, rng, 0.02)
        idle = int(rng.integers(0, 500))
        for cost, steps in zip(costs, (STEPS, STEPS + idle), strict=True):
            assert cost.learn_window(replace(record, num_steps=steps, num_forwards=STEPS), START)
    assert (costs[0].base_s, costs[0].token_s, costs[0].skew_s) == (costs[1].base_s, costs[1].token_s, costs[1].skew_s)
    assert costs[0].token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_windows_without_a_time_teach_nothing():
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    record = replace(world(draw(np.random.default_rng(0)), START), step_time_s=None)
    assert not cost.learn_window(record, START)
    assert cost.token_s == TOKEN_S


def test_the_price_of_a_moved_expert_is_the_median_of_measured_rounds():
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1.0), 0.05)
    for move_s in (0.2, 0.2, 30.0, 0.2, 0.2):
        cost.learn_round(TWO_EACH, move_s, 0.01)
    assert cost.expert_s == pytest.approx((0.01 + 0.05 * 0.2) / 2)
    wanted = Placement(np.roll(START.physical_to_logical, 1, axis=1), 16, 4)
    plan = plan_migration(START, wanted, Topology(1, 4))
    assert cost.migration_seconds(plan, Topology(1, 4)) == pytest.approx(cost.expert_s * len(plan.rounds))


def moves_made(skew_s, move_s, num_windows=90):
    """Returns the windows in which a rebalancer begins to move in a world with these prices.

    The load is skewed, and changes every 30 windows.
    """
    facts = SystemFacts(1, 1000, TOKEN_S, 1e-3, survives_loss=False)
    rebalancer = make_rebalancer(START, BalancerSettings(policy="greedy"), facts)
    rng = np.random.default_rng(5)
    policy = make_policy("greedy")
    for index in range(num_windows):
        if index % 30 == 0:
            steady = np.exp(0.9 * rng.standard_normal((4, 16)))
            steady = steady / steady.sum(axis=1, keepdims=True)
        load = steady * rng.uniform(200, 2000)
        record = replace(world(load, rebalancer.placement, rng, 0.01, skew_s), first_step=index * STEPS)
        actions = rebalancer.handle(WindowClosed((index + 1) * STEPS, record))
        while actions:
            (action,) = actions
            match action:
                case RequestPlan():
                    actions = rebalancer.handle(PlanReady(action.step, action.request_id, policy.plan(action.request)))
                case StartRound():
                    actions = rebalancer.handle(RoundActivated(action.step + 1, action.version, move_s, 0.0))
    return [decision.step // STEPS for decision in rebalancer.decisions if decision.kind == "move"]


def test_the_gate_moves_where_skew_costs_time_and_not_where_it_does_not():
    pays = moves_made(skew_s=2 * TOKEN_S, move_s=0.05)
    assert any(30 < window <= 60 for window in pays)
    assert any(window > 60 for window in pays)
    # The first move is made on an assumption, and shows that nothing is gained; a dear one shows what moves cost.
    assert [window for window in moves_made(skew_s=0.0, move_s=0.05) if window > 20] == []
    assert [window for window in moves_made(skew_s=2 * TOKEN_S, move_s=500.0) if window > 20] == []
