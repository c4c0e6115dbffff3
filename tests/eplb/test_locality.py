"""Objectives that look at where tokens come from, and placements made for the exact split."""

import numpy as np

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.objectives import tokens_by_node
from moe_serve.eplb.policies.packing import replicas_in
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.policies.problem import problem_of
from moe_serve.topology import Topology
from tests.eplb.loads import lognormal
from tests.eplb.split_cases import split_batch

TOP = Topology(4, 4)


def tokens_with_favourites(seed=0):
    """Every expert's tokens come mostly from one node; [L, R, E]."""
    draw = np.random.default_rng(seed)
    tokens = lognormal(3, 64, 0.5, seed)
    node = draw.integers(0, 4, (3, 64))
    share = np.where(np.arange(16)[None, :, None] // 4 == node[:, None, :], 0.2, 0.2 / 12)
    return np.round(tokens[:, None, :] * share).astype(np.int64)


def crossing(plan, request):
    """The share of tokens that cross nodes under an even split."""
    problem = problem_of(request)
    table = plan.placement.physical_to_logical.reshape(3, 16, -1)
    counts = replicas_in(table, 64)
    kept = np.zeros(3)
    for node in range(problem.num_nodes):
        here = replicas_in(table[:, problem.node_of == node], 64)
        kept += (tokens_by_node(problem)[:, node] * here / counts).sum(axis=1)
    return (1.0 - kept).mean()


def test_off_node_traffic_falls_and_balance_does_not_without_a_price_on_it():
    by_source = tokens_with_favourites()
    tokens = by_source.sum(axis=1)
    shares = {}
    for objective in ("tokens", "off_node", "mix"):
        weights = {"tokens": 1.0, "off_node": 2.0} if objective == "mix" else objective
        request = PlanRequest(tokens, TOP, 80, objective=weights, by_source=by_source)
        plan = make_policy("refined").plan(request)
        assert plan.placement.num_duplicates.sum() == 0
        shares[objective] = (crossing(plan, request), plan.balancedness.mean())
    assert shares["off_node"][0] < shares["tokens"][0] - 0.05
    assert shares["off_node"][1] >= shares["tokens"][1] - 1e-9
    assert shares["mix"][0] <= shares["off_node"][0] + 0.02


def test_activated_experts_are_balanced_when_asked():
    draw = np.random.default_rng(1)
    active = draw.random((3, 64)) ** 2
    tokens = lognormal(3, 64, 1.0)
    plan = make_policy("refined").plan(PlanRequest(tokens, TOP, 80, objective="activated", activations=active))
    reached = balancedness(rank_load(active, plan.placement))
    assert reached.min() > 0.98
    assert plan.balancedness.mean() < reached.mean()  # tokens were not what it balanced


def test_a_placement_for_the_exact_split_beats_one_for_the_even_split_under_it():
    tokens = lognormal(3, 64, 0.6)
    worst = {}
    for split in ("even", "exact"):
        plan = make_policy("refined").plan(PlanRequest(tokens, Topology(1, 8), 72, planned_split=split))
        assert plan.placement.num_duplicates.sum() == 0
        draw, ratios = np.random.default_rng(7), []
        for layer in range(3):
            for _ in range(12):
                batch = draw.multinomial(8 * 8 * 16, tokens[layer] / tokens[layer].sum())
                load = split_batch(batch, plan.placement.physical_to_logical[layer], 8).reshape(8, -1).sum(axis=1)
                ratios.append(load.max() / load.mean())
        worst[split] = np.mean(ratios)
    assert worst["exact"] < worst["even"]
