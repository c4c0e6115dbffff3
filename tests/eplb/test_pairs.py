"""Two slots per rank: the search in Python and in C, how its pool is placed, and the plans it makes."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.c_library import find_compiler
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement, count_moves
from moe_serve.eplb.policies import pairs
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.pairs import Effort, PairLayer, place_pairs, search_pairs
from moe_serve.eplb.policies.policy import PlanRequest, RankCost
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology
from tests.eplb.loads import drifting, lognormal, one_hot, same_slots


@pytest.fixture(scope="module")
def compiled():
    if find_compiler() is None:
        pytest.skip("this machine has no C compiler; the plain search is the one in use")
    found = pairs.find_library()
    assert found is not None, "the log says why pairs.c could not be built"
    return found


def random_table(draw, num_ranks, num_experts):
    """[R, 2]: every expert somewhere, none twice on a rank, the rest replicas and empty slots (id E)."""
    table = np.full((num_ranks, 2), num_experts)
    slots = draw.permutation(2 * num_ranks)
    table.ravel()[slots[:num_experts]] = draw.permutation(num_experts)
    for slot in slots[num_experts:]:
        expert = draw.integers(0, num_experts + 1)
        if table[slot // 2, 1 - slot % 2] != expert:
            table[slot // 2, slot % 2] = expert
    return table


def random_layer(seed):
    draw = np.random.default_rng(seed)
    num_ranks = int(draw.integers(1, 24))
    num_experts = int(draw.integers(1, 2 * num_ranks + 1))
    table = random_table(draw, num_ranks, num_experts)
    load = np.exp(draw.choice([0.3, 0.6, 2.0]) * draw.standard_normal(num_experts))
    if draw.random() < 0.3:
        load = draw.integers(0, 3, num_experts).astype(float)  # ties and zeros
    return layer_of(table, load / max(load.sum(), 1.0) * num_ranks, draw.integers(0, 4), draw.integers(1, 3))


def layer_of(table, unit, more=4, least=1):
    num_ranks, num_experts = len(table), len(unit)
    count = np.bincount(table.ravel(), minlength=num_experts + 1)[:num_experts]
    most = np.minimum(count + more, num_ranks)
    start = np.append(0, np.cumsum(most + 1))
    each = [np.exp(12 * np.minimum(unit[e] / np.maximum(np.arange(m + 1), 1), 1.5) - 6) for e, m in enumerate(most)]
    return PairLayer(table, start, np.concatenate([*each, [np.exp(-6)]]), np.minimum(count, least), most)


def objective(layer, table, num_broken, price):
    empty = len(layer.most)
    count = np.bincount(table.ravel(), minlength=empty + 1)
    value = np.append(layer.values[layer.start[:empty] + count[:empty]], layer.values[-1])
    return value[table].prod(axis=1).sum() + price * num_broken


def placed(layer, broken, pool):
    """The table [R, 2] with the pool on the broken ranks, heaviest beside lightest."""
    table = layer.table.copy()
    half = len(broken)
    table[broken] = np.stack([pool[:half], pool[::-1][:half]], axis=1)
    return table


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.5]), st.floats(0, 1), st.booleans())
def test_the_compiled_search_is_the_plain_one_to_the_bit(compiled, seed, price, share, all_broken):
    layer = random_layer(seed)
    most = len(layer.table) if all_broken else int(share * len(layer.table))
    effort = Effort(most, price, 640, seed * 2 + 1, all_broken)
    plain, fast = search_pairs(layer, effort), pairs.search_pairs_compiled(compiled, layer, effort)
    assert [a.tolist() for a in plain] == [a.tolist() for a in fast]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.05]), st.floats(0, 1), st.booleans())
def test_what_the_search_finds_is_legal_and_no_worse(seed, price, share, all_broken):
    layer = random_layer(seed)
    most = len(layer.table) if all_broken else int(share * len(layer.table))
    broken, pool = search_pairs(layer, Effort(most, price, 640, seed * 2 + 1, all_broken))
    assert len(broken) == most or not all_broken
    assert len(set(broken.tolist())) == len(broken) <= most
    assert len(pool) == 2 * len(broken)
    table = placed(layer, broken, pool)
    count = np.bincount(table.ravel(), minlength=len(layer.most) + 1)[: len(layer.most)]
    assert (count >= layer.least).all()
    assert (count <= layer.most).all()
    in_pool = np.bincount(pool, minlength=len(layer.most) + 1)[: len(layer.most)]
    assert (in_pool <= len(broken)).all(), "an expert needs a rank for each of its replicas"
    before = objective(layer, layer.table, len(layer.table) * all_broken, price)
    after = objective(layer, table, len(broken), price)
    assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("all_broken", [False, True])
def test_a_long_search_finds_the_best_of_all_small_placements(all_broken):
    for seed in range(4):
        draw = np.random.default_rng(seed)
        load = np.exp(0.8 * draw.standard_normal(6))
        table = np.array([[0, 1], [2, 3], [4, 5], [0, 2]])
        layer = layer_of(table, load / load.sum() * 4)
        broken, pool = search_pairs(layer, Effort(4, 0.0, 20_000, 7, all_broken, hottest=3.0))
        found = objective(layer, placed(layer, broken, pool), 0, 0.0)
        best = min(
            objective(layer, np.array(slots).reshape(4, 2), 0, 0.0)
            for more in np.ndindex(6, 6)
            for slots in {tuple(p) for p in _pairings([*range(6), *more])}
        )
        assert found <= best * (1 + 1e-9)


def _pairings(ids):
    """Every way to pair these ids."""
    if not ids:
        return [[]]
    return [[ids[0], ids[i], *rest] for i in range(1, len(ids)) for rest in _pairings(ids[1:i] + ids[i + 1 :])]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_pool_takes_the_fewest_moves_that_its_pairs_allow(seed):
    draw = np.random.default_rng(seed)
    num_ranks = int(draw.integers(1, 6))
    num_experts = int(draw.integers(2, 2 * num_ranks + 1))
    table = random_table(draw, num_ranks, num_experts)
    table[table == num_experts] = -1
    broken = draw.permutation(num_ranks)[: draw.integers(0, num_ranks + 1)]
    pool = draw.integers(-1, num_experts, 2 * len(broken))
    pool = np.where([np.sum(pool[:i] == e) >= len(broken) for i, e in enumerate(pool)], -1, pool)
    new = place_pairs(table, table, broken, pool)
    whole = np.setdiff1d(np.arange(num_ranks), broken)
    assert np.array_equal(new[whole], table[whole])
    assert np.array_equal(np.sort(new[broken].ravel()), np.sort(pool))
    assert ((new[:, 0] != new[:, 1]) | (new[:, 0] < 0)).all()

    def moves(on_ranks):
        return sum(len({*pair} - {-1} - {*table[rank]}) for rank, pair in zip(broken, on_ranks, strict=True))

    assert moves(new[broken].tolist()) == min(moves(p) for p in permutations(new[broken].tolist()))


def plan(tokens, ranks, current, **more):
    options = more.pop("options", {})
    request = PlanRequest(tokens, Topology(1, ranks), 2 * ranks, current=current, **more)
    return make_policy("incremental", **options).plan(request)


def test_a_budget_of_moves_is_kept_and_more_moves_bring_more():
    now, later = drifting(2, 4, 64, 0.9)
    current = plan(now, 36, None).placement
    before = balancedness(rank_load(later, current))
    reached = []
    for budget in (0, 3, 12, None):
        made = plan(later, 36, current, max_moves=budget)
        assert made.placement.num_duplicates.sum() == 0
        assert budget is None or made.num_moves <= 4 * budget
        assert (made.balancedness >= before - 1e-12).all()
        reached.append(made.balancedness.mean())
    assert reached == sorted(reached)
    assert reached[-1] > reached[0] + 0.05


def test_the_plan_is_the_same_with_and_without_a_compiler_for_equal_effort(monkeypatch):
    now, later = drifting(2, 2, 40, 0.9)
    current = plan(now, 24, None).placement
    monkeypatch.setattr(pairs, "PLAIN_STEPS", 640)
    monkeypatch.setattr(pairs, "MOST_STEPS", 640)
    compiled = plan(later, 24, current)
    monkeypatch.setattr(pairs, "find_library", lambda: None)
    assert same_slots(plan(later, 24, current).placement, compiled.placement)
    assert compiled.num_moves > 0


def test_a_plan_from_nothing_splits_light_experts_where_minimax_replication_does_not():
    tokens = lognormal(6, 64, 0.6)
    request = PlanRequest(tokens, Topology(1, 36), 72)
    minimax, searched = (make_policy(name).plan(request) for name in ("greedy", "refined"))
    assert searched.placement.num_duplicates.sum() == 0
    assert (searched.balancedness >= minimax.balancedness).all()
    assert searched.balancedness.mean() > minimax.balancedness.mean() + 0.01


def test_a_plan_from_nothing_is_the_same_with_and_without_a_compiler_for_equal_effort(monkeypatch):
    request = PlanRequest(lognormal(2, 40, 0.6), Topology(1, 24), 48)
    monkeypatch.setattr(pairs, "COUNT_STEPS", 640)
    monkeypatch.setattr(pairs, "PLAIN_COUNT_STEPS", 640)
    policy = make_policy("refined", rounds=0)
    compiled = policy.plan(request)
    monkeypatch.setattr(pairs, "find_library", lambda: None)
    assert same_slots(policy.plan(request).placement, compiled.placement)


def test_without_a_compiler_the_log_says_so_once(monkeypatch, caplog):
    def refuse(*_):
        raise ConfigError("no C compiler for pairs.c; install gcc")

    monkeypatch.setattr("moe_serve.c_library.load_c_library", refuse)
    monkeypatch.setattr(pairs, "PLAIN_STEPS", 640)
    pairs.find_library.cache_clear()
    try:
        now, later = drifting(2, 1, 12, 0.5)
        current = plan(now, 8, None).placement
        for _ in range(2):
            plan(later, 8, current)
    finally:
        pairs.find_library.cache_clear()
    assert sum("two slots per rank" in record.message for record in caplog.records) == 1


def test_a_lost_rank_second_replicas_and_a_rank_that_is_back():
    tokens = lognormal(3, 20, 0.8)
    current = plan(tokens, 24, None, min_replicas=2).placement
    made = plan(tokens, 24, current, min_replicas=2, excluded_ranks=(5,), max_moves=2)
    table = made.placement.physical_to_logical.reshape(3, 24, 2)
    assert (table[:, 5] == -1).all()
    assert (made.placement.replica_count >= 2).all()
    assert made.placement.num_duplicates.sum() == 0
    back = plan(tokens, 24, made.placement, min_replicas=2)
    assert (back.balancedness >= balancedness(rank_load(tokens, made.placement)) - 1e-12).all()
    assert (back.placement.physical_to_logical.reshape(3, 24, 2)[:, 5] >= 0).any()


@pytest.mark.parametrize(
    "tokens", [one_hot(2, 30, 0.6), np.eye(30, dtype=int)[:2] * 1000, np.zeros((2, 30), dtype=int)]
)
def test_hot_experts_and_no_load_at_all(tokens):
    table = np.tile(np.append(np.arange(30), np.arange(10)), (2, 1))
    made = plan(tokens, 20, Placement(table, 30, 20), options={"slack": 0.0})
    anew = make_policy("greedy").plan(PlanRequest(tokens, Topology(1, 20), 40))
    assert made.placement.num_duplicates.sum() == 0
    assert (made.balancedness >= 0.9 * anew.balancedness).all()


def test_costs_of_their_own_count():
    tokens = lognormal(2, 30, 0.8)
    table = np.tile(np.append(np.arange(30), np.arange(10)), (2, 1))
    more = {"objective": "step_time", "cost": RankCost(1e-6, 5e-2)}
    made = plan(tokens, 20, Placement(table, 30, 20), **more)
    assert made.placement.num_duplicates.sum() == 0
    assert made.num_moves > 0


def test_a_deadline_cuts_the_search_between_layers():
    now, later = drifting(2, 3, 40, 0.9)
    current = plan(now, 24, None).placement
    made = plan(later, 24, current, time_budget_s=1e-9)
    assert made.truncated
    assert same_slots(made.placement, replace(current, version=1))


@pytest.mark.parametrize("seed", range(8))
def test_one_move_brings_what_the_best_one_would_even_after_a_large_change(seed):
    """New pairs take more moves than one; a replica over another one, or two in exchange, need no more."""
    rng = np.random.default_rng(seed)
    first, then = (rng.lognormal(4, 0.8, (1, 8)).astype(np.int64) for _ in range(2))
    topology = Topology(1, 8)
    current = make_policy("greedy").plan(PlanRequest(first, topology, 16)).placement
    plan = make_policy("incremental").plan(PlanRequest(then, topology, 16, current=current, max_moves=1)).placement
    reached = []
    for slot, expert in product(range(16), range(8)):
        table = current.physical_to_logical.copy()
        table[0, slot] = expert
        legal = len(set(table[0].tolist())) == 8 and table[0, slot ^ 1] != expert
        if legal:
            reached.append(balancedness(rank_load(then, Placement(table, 8, 8)))[0])
    assert (count_moves(current.by_rank, plan.by_rank) <= 1).all()
    assert balancedness(rank_load(then, plan))[0] >= max(reached) * 0.985
