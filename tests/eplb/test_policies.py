"""The contract that every policy keeps, on awkward small sizes."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.names import POLICIES
from moe_serve.eplb.policies.policy import Plan, PlanRequest, RankCost
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology
from tests.eplb.loads import lognormal, same_slots, small_cases

FAST = {"refined": {"rounds": 4, "sweeps": 12}, "milp": {"limit_s": 0.5}}
OURS = [name for name in POLICIES if name != "milp"]  # the program is slow; it has its own tests
NO_DUPLICATES = [name for name in OURS if name not in ("deepseek", "static")]
RELAXED = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(name: str, request: PlanRequest) -> Plan:
    return make_policy(name, **FAST.get(name, {})).plan(request)


def check(plan: Plan, request: PlanRequest) -> None:
    placement = plan.placement
    num_layers, num_experts = request.tokens.shape
    assert placement.physical_to_logical.shape == (num_layers, request.num_slots)
    assert placement.num_logical == num_experts
    assert (placement.replica_count >= 1).all()
    by_rank = placement.physical_to_logical.reshape(num_layers, request.topology.num_ranks, -1)
    assert (by_rank[:, list(request.excluded_ranks)] == -1).all()
    measured = balancedness(rank_load(request.tokens, placement), request.live_ranks)
    np.testing.assert_allclose(plan.balancedness, measured)
    assert (plan.balancedness <= plan.bound + 1e-9).all()
    np.testing.assert_allclose(plan.gap, plan.bound - plan.balancedness)


@pytest.mark.parametrize("name", OURS)
@given(case=small_cases())
@RELAXED
def test_every_plan_is_legal_and_says_its_true_balance(name, case):
    tokens, nodes, ranks, slots = case
    request = PlanRequest(tokens, Topology(nodes, ranks), slots)
    plan = run(name, request)
    check(plan, request)
    if name in NO_DUPLICATES:
        assert plan.placement.num_duplicates.sum() == 0


@pytest.mark.parametrize("name", OURS)
@given(case=small_cases(), off_home=st.sampled_from([0.0, 0.1, 0.5]), groups=st.booleans())
@RELAXED
def test_under_a_hierarchy_the_load_away_from_home_stays_in_budget(name, case, off_home, groups):
    tokens, nodes, ranks, slots = case
    num_groups = next(g for g in (4, 3, 2, 1) if tokens.shape[1] % g == 0) if groups else None
    request = PlanRequest(tokens, Topology(nodes, ranks), slots, off_home=off_home, num_groups=num_groups)
    plan = run(name, request)
    check(plan, request)
    if name in NO_DUPLICATES:
        assert plan.placement.num_duplicates.sum() == 0
        assert (plan.off_home <= off_home + 1e-6).all()


@pytest.mark.parametrize("name", OURS)
@given(case=small_cases(), data=st.data())
@RELAXED
def test_excluded_ranks_get_nothing_and_the_rest_serves_all_experts(name, case, data):
    tokens, nodes, ranks, slots = case
    num_ranks = nodes * ranks
    excluded = data.draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    slots_needed = -(-tokens.shape[1] // (num_ranks - len(excluded))) * num_ranks
    request = PlanRequest(tokens, Topology(nodes, ranks), max(slots, slots_needed), excluded_ranks=tuple(excluded))
    plan = run(name, request)
    check(plan, request)


@pytest.mark.parametrize("name", OURS)
@given(case=small_cases(), seed=st.integers(0, 99), off_home=st.sampled_from([1.0, 0.2]))
@RELAXED
def test_a_placement_in_use_is_accepted_and_moves_are_counted(name, case, seed, off_home):
    tokens, nodes, ranks, slots = case
    top = Topology(nodes, ranks)
    old = np.random.default_rng(seed).permutation(tokens, axis=1)
    current = run("greedy", PlanRequest(old, top, slots)).placement
    request = PlanRequest(tokens, top, slots, current=current, off_home=off_home)
    plan = run(name, request)
    check(plan, request)
    shape = (len(tokens), top.num_ranks, -1)
    before = current.physical_to_logical.reshape(shape)
    after = plan.placement.physical_to_logical.reshape(shape)
    arrived = ~(after[..., :, None] == before[..., None, :]).any(axis=3) & (after >= 0)
    assert plan.num_moves == arrived.sum()
    if name not in ("deepseek", "static"):  # an expert that stays on its rank stays in its slot
        stays = (after[..., :, None] == before[..., None, :]).any(axis=3) & (after >= 0)
        assert (after == before)[stays].all()


@pytest.mark.parametrize("name", OURS)
@given(
    case=small_cases(), least=st.integers(1, 3), more=st.integers(0, 2), off_home=st.sampled_from([1.0, 0.3, 0.0]),
    has_current=st.booleans(), split=st.sampled_from(["even", "exact"]),
    excluded=st.sets(st.integers(0, 11), max_size=2),
)  # fmt: skip
@settings(RELAXED, max_examples=25)
def test_every_expert_is_on_min_replicas_ranks(name, case, least, more, off_home, has_current, split, excluded):
    tokens, nodes, ranks, _ = case
    top = Topology(nodes, ranks)
    excluded = tuple(rank for rank in excluded if rank < top.num_ranks)
    num_live = top.num_ranks - len(excluded)
    assume(num_live > 0)
    least = min(least, num_live)
    slots = (-(-tokens.shape[1] * least // num_live) + more) * top.num_ranks
    current = run("greedy", PlanRequest(tokens[:, ::-1], top, slots)).placement if has_current else None
    request = PlanRequest(tokens, top, slots, current=current, min_replicas=least, off_home=off_home,
                          planned_split=split, excluded_ranks=excluded)  # fmt: skip
    if off_home < 1.0 or (name == "static" and has_current):
        with suppress(PlacementError):  # refused by name: see below
            check_replicas(run(name, request), request)
    else:
        check_replicas(run(name, request), request)


def check_replicas(plan: Plan, request: PlanRequest) -> None:
    check(plan, request)
    table = plan.placement.physical_to_logical.reshape(len(request.tokens), request.topology.num_ranks, -1)
    ranks_of = (table[:, :, :, None] == np.arange(request.tokens.shape[1])).any(axis=2).sum(axis=1)
    assert (ranks_of >= request.min_replicas).all()


def test_one_expert_is_planned_for_the_exact_split():
    request = PlanRequest(np.array([[7]]), Topology(1, 3), 6, planned_split="exact")
    assert run("refined", request).placement.replica_count.tolist() == [[3]]


def test_replicas_that_a_policy_cannot_give_are_refused_by_name():
    tokens = lognormal(1, 8, 0.8)
    alone = PlanRequest(tokens, Topology(4, 1), 16, min_replicas=2, off_home=0.0)
    with pytest.raises(PlacementError, match="are on the 1 ranks of one node"):
        run("deepseek", alone)
    with pytest.raises(PlacementError, match="have 1, 1, 1, 1 ranks of 4 slots and cannot be home to 2 replicas"):
        run("greedy", alone)
    current = Placement.trivial(1, 8, 4, 8 - 1)
    with pytest.raises(PlacementError, match="is on 1 of the ranks that take part and min_replicas is 2"):
        run("static", PlanRequest(tokens, Topology(1, 4), 16, current=current, min_replicas=2))


@pytest.mark.parametrize("name", OURS)
def test_the_same_request_gives_the_same_plan(name):
    tokens = lognormal(3, 24, 0.8)
    top = Topology(2, 6)
    current = run("greedy", PlanRequest(lognormal(3, 24, 0.8, seed=1), top, 36)).placement
    for given_current in (None, current):
        request = PlanRequest(tokens, top, 36, current=given_current, seed=5)
        first, second = run(name, request), run(name, request)
        assert same_slots(first.placement, second.placement)


@pytest.mark.parametrize("name", ["greedy", "refined", "incremental"])
def test_counts_next_to_two_to_the_53_are_told_apart(name):
    big = 2**53
    tokens = np.array([[big, big - 1, 0, 0]])
    placement = run(name, PlanRequest(tokens, Topology(1, 2), 4)).placement
    load = [sum(int(tokens[0, e]) for e in rank) for rank in placement.physical_to_logical[0].reshape(2, 2)]
    assert sorted(load) == [big - 1, big]


@pytest.mark.parametrize("name", ["greedy", "refined", "incremental"])
@pytest.mark.parametrize("objective", ["activated", "step_time", {"tokens": 1.0, "activated": 0.5, "off_node": 0.2}])
def test_every_objective_gives_a_legal_plan(name, objective):
    tokens = lognormal(2, 24, 1.0)
    by_source = np.random.default_rng(0).multinomial(1000, np.full(12, 1 / 12), size=(2, 24)).transpose(0, 2, 1)
    request = PlanRequest(
        tokens,
        Topology(3, 4),
        36,
        objective=objective,
        activations=np.clip(tokens / tokens.max(), 0, 1),
        cost=RankCost(token_s=1e-8, activated_s=1e-5, off_node_token_s=1e-9),
        by_source=by_source,
    )
    plan = run(name, request)
    check(plan, request)
    assert plan.placement.num_duplicates.sum() == 0


@pytest.mark.parametrize("name", ["refined", "incremental"])
def test_a_deadline_that_is_over_gives_a_legal_truncated_plan(name):
    tokens = lognormal(4, 48, 1.2)
    top = Topology(1, 24)
    current = Placement.trivial(4, 48, 24, 24)
    plan = run(name, PlanRequest(tokens, top, 72, current=current, time_budget_s=1e-9))
    assert plan.truncated
    assert (plan.placement.replica_count >= 1).all()


def test_an_unknown_policy_or_option_names_the_known_ones():
    with pytest.raises(ConfigError, match="refined"):
        make_policy("eplb")
    with pytest.raises(ConfigError, match="does not take"):
        make_policy("greedy", sweeps=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_slots": 30}, "use 24 or 32"),
        ({"num_slots": 8}, "at least 16"),
        ({"min_replicas": 2}, "experts, each with 2 replicas at least; use at least 32 slots"),
        ({"min_replicas": 8, "excluded_ranks": (0,)}, "from 1 to 7"),
        ({"off_home": 1.5}, "off_home"),
        ({"num_groups": 5}, "num_groups"),
        ({"max_moves": 3}, "current is None"),
        ({"max_total_moves": 3}, "max_total_moves is set but current is None"),
        ({"max_total_moves": -1}, "max_total_moves is -1"),
        ({"min_gain": -0.1}, "min_gain is -0.1"),
        ({"min_gain": float("nan")}, "min_gain is nan"),
        ({"objective": "speed"}, "objective"),
        ({"objective": "step_time"}, "cost"),
        ({"excluded_ranks": (9,)}, "excluded_ranks"),
        ({"time_budget_s": 0}, "time_budget_s"),
        ({"tokens": np.full((2, 16), -1)}, "between 0 and 2"),
        ({"tokens": np.full((2, 16), np.nan)}, "NaN"),
        ({"tokens": np.ones(16)}, "2 dimensions"),
        ({"current": Placement.trivial(1, 16, 8)}, "current has"),
        ({"activations": np.full((2, 16), 2.0)}, "at most 1"),
    ],
)
def test_a_wrong_request_says_the_argument_and_the_fix(change, words):
    arguments = {"tokens": np.ones((2, 16), dtype=np.int64), "topology": Topology(1, 8), "num_slots": 16} | change
    with pytest.raises(PlacementError, match=words):
        PlanRequest(**arguments)
