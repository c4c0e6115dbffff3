"""The gate: on small replays, scored with other costs than the gate's own, moving loses at most the regret bound."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.cost.model import CostModel, PredictedCost
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.rebalance.events import PlanReady, RequestPlan, RoundActivated, WindowClosed
from moe_serve.eplb.rebalance.gate import ClosedWindow, Gate
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.eplb.replay.synthetic import FAMILIES, SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

NUM_LAYERS, NUM_LOGICAL, NUM_WINDOWS = 6, 64, 60
CLUSTER = Topology(2, 8)
MODEL = replace(load_model_profile("DeepSeek-V3"), num_logical=NUM_LOGICAL, num_layers=NUM_LAYERS + 3)


def costs(compute=1.0, links=1.0):
    hardware = load_hardware("H800").scaled(
        fp8_flops=compute,
        hbm_bytes_per_s=compute,
        link_bytes_per_s=links,
        nic_bytes_per_s=links,
        node_nic_bytes_per_s=links,
        dispatch_latency_s=1 / links,
        combine_latency_s=1 / links,
    )
    return PredictedCost(CostModel(hardware, MODEL, CLUSTER))


SCORES = [costs(compute, links) for compute in (0.7, 1.0, 1.3) for links in (0.7, 1.0, 1.3)]


def replay(records: Callable[[Rebalancer], Iterator[LoadRecord]]) -> list[float]:
    """Returns the time of the gated run over that of doing nothing, by each of SCORES.

    A plan is ready at once, a round takes a step, and a window runs on the placement of its first step.
    """
    start = Placement.trivial(NUM_LAYERS, NUM_LOGICAL, CLUSTER.num_ranks, CLUSTER.num_ranks)
    rebalancer = Rebalancer(start, CLUSTER, RebalanceSettings(bytes_per_expert=MODEL.expert_bytes), costs())
    policy = make_policy("greedy")
    gated, idle = np.zeros(len(SCORES)), np.zeros(len(SCORES))
    events, charged = [], None

    def handle(event):
        nonlocal charged
        for action in rebalancer.handle(event):
            if isinstance(action, RequestPlan):
                events.append(PlanReady(action.step, action.request_id, policy.plan(action.request)))
            else:
                events.append(RoundActivated(action.step + action.num_steps, action.version))
        if rebalancer.migration not in (None, charged):
            charged = rebalancer.migration
            gated[:] += [score.migration_seconds(charged, CLUSTER) for score in SCORES]

    for record in records(rebalancer):
        while events and events[0].step <= record.first_step:
            handle(events.pop(0))
        tokens = record.tokens / record.num_steps
        unmoved = [score.layer_seconds(tokens, start).sum() * record.num_steps for score in SCORES]
        idle += unmoved
        if rebalancer.placement is start:
            gated += unmoved
        else:
            placement = rebalancer.placement
            gated += [score.layer_seconds(tokens, placement).sum() * record.num_steps for score in SCORES]
        handle(WindowClosed(record.first_step + record.num_steps, record))
    return (gated / idle).tolist()


def synthetic(family, period, steps, seed):
    load = SyntheticLoad(
        family=family,
        num_windows=NUM_WINDOWS,
        num_layers=NUM_LAYERS,
        num_logical=NUM_LOGICAL,
        period=period,
        steps_per_window=steps,
        tokens_per_step=4096,
        seed=seed,
    )
    return lambda _: iter(synthetic_trace(load))


CHANGING = ("hot", "bursts", "jumps", "swing")
STEADY = [family for family in FAMILIES if family not in CHANGING]
CASES = [(family, 10, 20) for family in STEADY] + [(family, 3, steps) for family in CHANGING for steps in (20, 500)]
CASES += [pytest.param(family, 10, 500, marks=pytest.mark.slow) for family in STEADY]
CASES += [
    pytest.param(family, period, steps, marks=pytest.mark.slow)
    for family in CHANGING
    for period in (1, 10)
    for steps in (20, 500)
]


@pytest.mark.parametrize(("family", "period", "steps"), CASES)
def test_never_slower_than_doing_nothing_by_more_than_one_percent(family, period, steps):
    assert max(replay(synthetic(family, period, steps, seed=period))) <= 1.01


@pytest.mark.parametrize(("family", "at_most"), [("zipf", 0.7), ("lognormal", 0.93), ("hot", 0.6), ("swing", 0.93)])
def test_gains_where_there_is_something_to_gain(family, at_most):
    assert max(replay(synthetic(family, 10, 500, seed=1))) < at_most


def flipping(draw, steps, num_windows=NUM_WINDOWS, seed=0):
    """A load that changes as soon as the experts have moved; draw(rng, placement) gives its popularity [L, E]."""

    def records(rebalancer):
        rng = np.random.default_rng(seed)
        popularity, version = draw(rng, rebalancer.placement), 0
        for index in range(num_windows):
            if rebalancer.state != "moving" and rebalancer.placement.version != version:
                popularity, version = draw(rng, rebalancer.placement), rebalancer.placement.version
            share = popularity / popularity.sum(axis=1, keepdims=True)
            tokens = np.array([rng.multinomial(4096 * 8 * steps, row) for row in share])
            yield LoadRecord(index * steps, steps, "decode", tokens)

    return records


def two_in_turn():
    shape = (NUM_LAYERS, NUM_LOGICAL)
    pair = [np.exp(0.6 * np.random.default_rng(seed).standard_normal(shape)) for seed in (1, 2)]

    def draw(_rng, _placement):
        pair.reverse()
        return pair[0]

    return draw


def anything_new(rng, _placement):
    return np.exp(0.6 * rng.standard_normal((NUM_LAYERS, NUM_LOGICAL)))


def worst_for_it(rng, placement):
    """Gives all heavy experts to one rank of each layer of the placement in use: an adversary that knows it."""
    popularity = anything_new(rng, placement)
    for layer, row in enumerate(placement.physical_to_logical.reshape(NUM_LAYERS, placement.num_ranks, -1)):
        held = np.unique(row[rng.integers(placement.num_ranks)])
        held = held[held >= 0]
        heavy = np.argsort(-popularity[layer])[: len(held)]
        others = np.setdiff1d(heavy, held)
        wanting = np.setdiff1d(held, heavy)
        popularity[layer, wanting], popularity[layer, others] = popularity[layer, others], popularity[layer, wanting]
    return popularity


@pytest.mark.parametrize("steps", [20, 500])
@pytest.mark.parametrize("draw", [two_in_turn, lambda: anything_new, lambda: worst_for_it], ids=["two", "new", "worst"])
def test_a_load_that_flips_after_each_move_costs_one_percent_at_most(draw, steps):
    assert max(replay(flipping(draw(), steps))) <= 1.01


def test_idle_steps_of_a_window_change_no_gain() -> None:
    start = Placement.trivial(NUM_LAYERS, NUM_LOGICAL, CLUSTER.num_ranks, CLUSTER.num_ranks)
    other = Placement(np.roll(start.physical_to_logical, 3, axis=1), NUM_LOGICAL, CLUSTER.num_ranks)
    tokens = np.random.default_rng(0).integers(0, 9000, (NUM_LAYERS, NUM_LOGICAL))
    busy = LoadRecord(0, 20, "decode", tokens)
    gains = []
    for record in (busy, replace(busy, num_steps=300, num_forwards=20)):
        gate = Gate(start, costs(), RebalanceSettings())
        gate.close_window(record, ClosedWindow(start, start, whole=True, unseen=True))
        gains.append(gate.gains(start, other))
        assert gate.planning_load()[0] == pytest.approx(tokens / 20)
    assert gains[0].any()
    assert (gains[0] == gains[1]).all()
