"""The edits of edits.c are those of the numpy form, to the bit, on awkward sizes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies import single_edits
from moe_serve.eplb.policies.edits import EditState, repeatable_exp, sum_in_order
from moe_serve.eplb.policies.legal import make_legal
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.packing import Deadline
from moe_serve.eplb.policies.policy import PlanRequest, RankCost
from moe_serve.eplb.policies.problem import holds, problem_of
from moe_serve.eplb.policies.single_edits import EditGoal, balance_reached, edit_layers, edit_layers_reference
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology
from tests.eplb.loads import grouped, lognormal, small_cases

RELAXED = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def states(request):
    """Returns two equal states of the edits of a request, and for each the rule of its hierarchy."""
    problem = problem_of(request)
    start = make_legal(problem)
    mean = np.maximum(problem.weight.sum(axis=1, keepdims=True) / problem.num_ranks, 1e-300)
    unit, was = problem.weight / mean, holds(problem.current, problem.weight.shape[1])
    fixed = None if problem.fixed is None else problem.fixed / mean
    rules = problem.min_replicas, request.max_rank_moves
    made = [EditState(unit, start.table.copy(), was, 30.0, fixed, *rules) for _ in range(2)]
    every = np.arange(len(unit))
    homes = [None if start.rule is None else start.rule.rows(every) for _ in range(2)]
    return made[0], made[1], *homes


def assert_same(request, budget=10**6, min_gain=0.0, max_edits=60, target=0.99):
    """Runs both forms and compares them; returns the number of edits."""
    ours, theirs, our_homes, their_homes = states(request)
    num_layers = len(ours.table)
    goal = EditGoal(np.full(num_layers, target), np.full(num_layers, budget), min_gain, max_edits)
    before = balance_reached(ours)
    found, _ = edit_layers(ours, goal, our_homes, Deadline())
    wanted, _ = edit_layers_reference(theirs, goal, their_homes, Deadline())
    np.testing.assert_array_equal(ours.table, theirs.table)
    if our_homes is not None:
        np.testing.assert_array_equal(our_homes.homes, their_homes.homes)
    for name in ("layer", "slot", "other", "expert", "moves", "gain"):
        in_order = [getattr(log, name)[np.argsort(log.layer, kind="stable")] for log in (found, wanted)]
        np.testing.assert_array_equal(*in_order, err_msg=name)
    assert np.isfinite(found.gain).all()
    assert (found.gain > 0).all()
    assert (found.moves <= budget).all()
    assert (balance_reached(ours) >= before * 0.9).all(), (
        "edits lower the smooth maximum, so the heaviest rank hardly rises"
    )
    return len(found.gain)


@pytest.fixture(autouse=True)
def compiled():
    if single_edits.find_library() is None:
        pytest.skip("no C compiler")


def in_order(tokens, topology, slots):
    return Placement.trivial(*tokens.shape, topology.num_ranks, slots - tokens.shape[1])


@given(
    case=small_cases(),
    budget=st.sampled_from([0, 1, 2, 1000]),
    min_gain=st.sampled_from([0.0, 0.01]),
    rank=st.sampled_from([None, 0, 1, 2]),
)
@RELAXED
def test_both_forms_make_the_same_edits_on_awkward_sizes(case, budget, min_gain, rank):
    tokens, nodes, ranks, slots = case
    top = Topology(nodes, ranks)
    current = in_order(tokens, top, slots)
    assert_same(PlanRequest(tokens, top, slots, current=current, max_rank_moves=rank), budget, min_gain)


@given(case=small_cases(), off_home=st.sampled_from([0.0, 0.1, 0.5]), least=st.integers(1, 2))
@RELAXED
def test_both_forms_make_the_same_edits_under_a_hierarchy_and_with_dead_ranks(case, off_home, least):
    tokens, nodes, ranks, slots = case
    top = Topology(nodes + 1, ranks + 1)
    slots = (slots // (nodes * ranks) + 1) * 2 * top.num_ranks
    current = in_order(tokens, top, slots)
    assert_same(PlanRequest(tokens, top, slots, current=current, off_home=off_home))
    assert_same(PlanRequest(tokens, top, slots, current=current, excluded_ranks=(1,), min_replicas=least))


@pytest.mark.parametrize("slots", [72, pytest.param(288, marks=pytest.mark.slow)])
def test_both_forms_make_the_same_edits_on_the_shapes_of_models(slots):
    top = Topology(4, slots // 36)
    tokens = [lognormal(3, slots * 8 // 9, 0.6, seed) for seed in (0, 1)]
    current = make_policy("greedy").plan(PlanRequest(tokens[0], top, slots)).placement
    assert assert_same(PlanRequest(tokens[1], top, slots, current=current)) > 40
    for most in (1, 2):
        assert assert_same(PlanRequest(tokens[1], top, slots, current=current, max_rank_moves=most)) > 10
    groups = grouped(3, slots * 8 // 9, 8)
    current = make_policy("greedy").plan(PlanRequest(groups, top, slots, off_home=0.1, num_groups=8)).placement
    request = PlanRequest(tokens[1], top, slots, current=current, off_home=0.1, num_groups=8)
    assert assert_same(request) > 10
    cost = RankCost(1e-6, 1e-4)
    assert assert_same(PlanRequest(tokens[1], top, slots, current=current, objective="step_time", cost=cost)) > 10


@pytest.mark.parametrize("share", [0.3, 0.97, 1.0])
def test_one_hot_expert_on_many_ranks_gives_finite_gains_and_gets_replicas(share):
    tokens = np.full((2, 90), 100)
    tokens[:, 7] = round(share * 10**6)
    tokens[:, :7] = 0 if share == 1 else 100
    top = Topology(1, 90)
    assert assert_same(PlanRequest(tokens, top, 270, current=in_order(tokens, top, 270)), max_edits=30) > 20


@pytest.mark.slow
def test_both_forms_make_the_same_edits_with_10_000_experts_on_1_000_ranks():
    tokens = lognormal(1, 10_000, 1.0)
    top = Topology(125, 8)
    assert assert_same(PlanRequest(tokens, top, 11_000, current=in_order(tokens, top, 11_000)), max_edits=4) == 4


def test_a_minimum_gain_leaves_out_the_edits_that_gain_less_for_their_moves():
    tokens = [lognormal(3, 64, 0.6, seed) for seed in (0, 1)]
    top = Topology(1, 8)
    request = PlanRequest(
        tokens[1], top, 72, current=make_policy("greedy").plan(PlanRequest(tokens[0], top, 72)).placement
    )
    few, many = (assert_same(request, min_gain=gain, target=1.0) for gain in (0.004, 0.0))
    assert 0 < few < many


def test_a_deadline_ends_the_edits_between_two_looks_at_the_clock():
    tokens = lognormal(4, 64, 0.6)
    top = Topology(1, 8)
    state, *_ = states(PlanRequest(tokens, top, 72, current=in_order(tokens, top, 72)))
    before = state.table.copy()
    goal = EditGoal(np.ones(4), np.full(4, 999), 0.0, 400)
    log, truncated = edit_layers(state, goal, None, Deadline.after(0.0))
    assert truncated
    assert len(log.gain) == 0
    np.testing.assert_array_equal(state.table, before)
    log, truncated = edit_layers(state, goal, None, Deadline.after(3600.0))
    unhurried, *_ = states(PlanRequest(tokens, top, 72, current=in_order(tokens, top, 72)))
    edit_layers(unhurried, goal, None, Deadline())
    assert not truncated
    np.testing.assert_array_equal(state.table, unhurried.table)


def test_without_a_compiler_numpy_makes_the_same_plan_and_says_so_once(monkeypatch, caplog):
    tokens, top = lognormal(2, 32, 0.8), Topology(1, 8)
    request = PlanRequest(tokens, top, 40, current=in_order(tokens, top, 40))
    compiled = make_policy("incremental").plan(request).placement

    def missing(*_):
        raise ConfigError("no C compiler for edits.c; install gcc")

    monkeypatch.setattr("moe_serve.c_library.load_c_library", missing)
    single_edits.find_library.cache_clear()
    try:
        for _ in range(2):
            made = make_policy("incremental").plan(request).placement
            np.testing.assert_array_equal(made.physical_to_logical, compiled.physical_to_logical)
    finally:
        single_edits.find_library.cache_clear()
    assert [record.message.count("install gcc") for record in caplog.records] == [1]


def test_the_exponential_is_exact_to_two_units_and_sums_are_added_in_order():
    x = np.concatenate([np.linspace(-690, 690, 10_001), np.linspace(-1, 1, 1001), [0.0]])
    np.testing.assert_allclose(repeatable_exp(x), np.exp(x), rtol=5e-16)
    assert np.isfinite(repeatable_exp(np.array([-1e300, 1e300]))).all()
    values = np.random.default_rng(0).standard_normal((3, 100)) * 1e10
    total = [0.0, 0.0, 0.0]
    for column in values.T.tolist():
        total = [a + b for a, b in zip(total, column, strict=True)]
    assert sum_in_order(values, axis=1).tolist() == total
