"""`max_rank_moves`: no rank of a layer receives more experts than that, in every policy that keeps limits of moves."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.edits import EditState, all_overwrites, all_swaps
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.pairs import place_pairs
from moe_serve.eplb.policies.policy import PlanRequest, PlanRules
from moe_serve.eplb.policies.problem import holds
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology
from tests.eplb.loads import drifting, lognormal, same_slots, small_cases

RELAXED = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def arrivals(old: Placement, new: Placement) -> np.ndarray:
    """Returns how many experts each rank must receive, [L, R]."""
    before, after = (holds(p.physical_to_logical.reshape(p.num_layers, p.num_ranks, -1), p.num_logical)
                     for p in (old, new))  # fmt: skip
    return (after & ~before).sum(axis=2)


def planned(name, tokens, topology, slots, current, **more):
    return make_policy(name).plan(PlanRequest(tokens, topology, slots, current=current, **more))


@given(case=small_cases(), most=st.integers(0, 3), name=st.sampled_from(["incremental", "series"]))
@RELAXED
def test_no_rank_receives_more_than_the_limit_on_awkward_sizes(case, most, name):
    tokens, nodes, ranks, slots = case
    top = Topology(nodes, ranks)
    current = Placement.trivial(*tokens.shape, top.num_ranks, slots - tokens.shape[1])
    assume(not current.num_duplicates.any())
    series = np.stack([tokens, tokens[:, ::-1]]) // 2
    made = planned(name, series.sum(axis=0), top, slots, current, max_rank_moves=most, series=series)
    assert arrivals(current, made.placement).max() <= most
    assert made.placement.num_duplicates.sum() == 0


@pytest.mark.parametrize("slots_per_rank", [1, 2, 3, 9])
def test_a_limit_of_all_slots_is_none_and_a_limit_of_zero_moves_nothing(slots_per_rank):
    top = Topology(1, 8)
    slots = 8 * slots_per_rank
    loads = [lognormal(3, slots * 7 // 8, 0.9, seed) for seed in (0, 1)]
    current = planned("refined", loads[0], top, slots, None).placement
    free, all_slots, none = (
        planned("incremental", loads[1], top, slots, current, max_rank_moves=most) for most in (None, slots_per_rank, 0)
    )
    assert same_slots(free.placement, all_slots.placement)
    assert free.num_moves > none.num_moves == 0
    assert same_slots(none.placement, current)


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(32, 36, 4), (64, 72, 18), (64, 72, 36)])
def test_a_tighter_limit_still_evens_the_load(experts, slots, ranks):
    """Also with two slots per rank, where ranks are paired anew."""
    loads, top = drifting(2, 2, experts, 0.9), Topology(1, ranks)
    current = planned("refined", loads[0], top, slots, None).placement
    reached = [float(balancedness(rank_load(loads[1], current)).mean())]
    for most in (1, 2, None):
        made = planned("incremental", loads[1], top, slots, current, max_rank_moves=most)
        reached.append(float(made.balancedness.mean()))
        if most is not None:
            assert arrivals(current, made.placement).max() <= most
    assert reached[1] > reached[0] + 0.03
    assert min(reached[1:]) > max(reached[1:]) - 0.03


@pytest.mark.parametrize("seed", range(12))
def test_an_edit_is_legal_where_no_rank_beyond_the_limit_receives_one_more(seed):
    """All overwrites and swaps of a layer that has been edited already, some ranks beyond the limit."""
    draw = np.random.default_rng(seed)
    num_logical, shape, most = 6, (4, 3), int(draw.integers(0, 3))
    table = np.stack([draw.permutation(num_logical)[:3] for _ in range(4)]).astype(np.int32)
    table[draw.integers(0, 4), draw.integers(0, 3)] = -1
    old = np.stack([draw.permutation(num_logical)[:3] for _ in range(4)]).astype(np.int32)
    held = holds(old[None], num_logical)
    made = [
        EditState(draw.random((1, num_logical)), table[None].copy(), held, 9.0, max_rank_moves=limit)
        for limit in (None, most)
    ]

    def arrived(rows):
        return np.array([len(set(row[row >= 0]) - set(was)) for row, was in zip(rows, old, strict=True)])

    def still_legal(after):
        return bool((arrived(after) <= np.maximum(arrived(table), most)).all())

    heavy = np.arange(4)[None]
    free, limited = (all_overwrites(state) for state in made)
    refused = 0
    for place, expert in np.argwhere(np.isfinite(free.gain[0])):
        after = table.copy()
        after.reshape(-1)[free.slot[0, place]] = expert
        assert np.isfinite(limited.gain[0, place, expert]) == still_legal(after)
        refused += not still_legal(after)
    swaps = [all_swaps(state, heavy)[0].reshape(12, 12) for state in made]
    for one, other in np.argwhere(np.isfinite(swaps[0])):
        after = table.copy().reshape(-1)
        after[[one, other]] = after[[other, one]]
        assert np.isfinite(swaps[1][one, other]) == still_legal(after.reshape(shape))
        refused += not still_legal(after.reshape(shape))
    assert refused > 0
    assert np.isfinite(swaps[1]).any()


def received(table, current):
    return [len(set(row.tolist()) - set(was.tolist()) - {-1}) for row, was in zip(table, current, strict=True)]


def test_a_pair_of_two_new_experts_trades_one_of_them():
    """Of the pairs (0, 3), (6, 7), (2, 4), no rank holds an expert of the second one."""
    current = np.array([[0, 1], [2, 3], [4, 5]], dtype=np.int32)
    broken, pool = np.arange(3), np.array([0, 6, 2, 4, 7, 3])
    assert sorted(received(place_pairs(current, current, broken, pool), current)) == [1, 1, 2]
    traded = place_pairs(current, current, broken, pool, one_each=True)
    assert received(traded, current) == [1, 1, 1]
    assert sorted(traded.ravel().tolist()) == sorted(pool.tolist())


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_trades_keep_the_pool_and_repeat_no_expert_on_a_rank(data):
    num_ranks = data.draw(st.integers(2, 6))
    ids = st.lists(st.integers(-1, 7), min_size=2, max_size=2, unique_by=lambda e: e if e >= 0 else object())
    current = np.array([data.draw(ids) for _ in range(num_ranks)], dtype=np.int32)
    broken = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks)))
    new = [data.draw(ids) for _ in broken]
    pool = np.array(data.draw(st.permutations([e for pair in new for e in pair])), dtype=np.int64)
    plain, traded = (place_pairs(current, current, broken, pool, one_each=each) for each in (False, True))
    assert sorted(traded.ravel().tolist()) == sorted(plain.ravel().tolist())
    assert all(row[0] != row[1] or row[0] < 0 for row in traded)
    beyond = [sum(n > 1 for n in received(table, current)) for table in (plain, traded)]
    assert beyond[1] <= beyond[0]
    np.testing.assert_array_equal(np.delete(traded, broken, axis=0), np.delete(current, broken, axis=0))


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_program_finds_the_best_placement_within_the_limit(most):
    draw = np.random.default_rng(2)
    top, old = Topology(1, 3), [{0, 1}, {2, 3}, {0, 2}]
    current = Placement(np.array([sorted(rank) for rank in old], dtype=np.int32).reshape(1, 6), 4, 3)
    sets = [set(s) for size in (0, 1, 2) for s in itertools.combinations(range(4), size)]
    for tokens in draw.integers(1, 1000, (3, 1, 4)):
        best = np.inf
        for ranks in itertools.product(sets, repeat=3):
            count = np.array([sum(e in rank for rank in ranks) for e in range(4)])
            if count.all() and all(len(now - was) <= most for now, was in zip(ranks, old, strict=True)):
                best = min(best, max(sum(tokens[0, e] / count[e] for e in rank) for rank in ranks))
        exact, edited = (
            planned(name, tokens, top, 6, current, max_rank_moves=most) for name in ("milp", "incremental")
        )
        assert exact.balancedness[0] == pytest.approx(tokens.sum() / 3 / best)
        assert arrivals(current, exact.placement).max(initial=0) <= most
        assert edited.balancedness[0] <= exact.balancedness[0] + 1e-9


def test_a_start_that_has_to_be_repaired_may_exceed_the_limit_and_edits_add_nothing_there():
    """Rank 1 is lost, and rank 0 is the only one with room for its experts."""
    current = Placement(np.array([[0, -1, -1, -1, 1, 2, 3, 4, 0, 5, 6, 7]], dtype=np.int32), 8, 3)
    tokens = np.array([[10, 10, 10, 10, 90, 10, 10, 10]])
    made = planned("incremental", tokens, Topology(1, 3), 12, current, excluded_ranks=(1,), max_rank_moves=1)
    assert (made.placement.without_ranks([1])[0].replica_count >= 1).all()
    gone = 4
    assert arrivals(current, made.placement)[0].tolist()[1] == 0
    assert arrivals(current, made.placement).sum() == gone


def test_a_replay_keeps_the_limit_and_says_so():
    loads, top = drifting(4, 2, 32, 0.5), Topology(1, 4)
    trace = LoadTrace.of([LoadRecord(i, 1, "decode", tokens) for i, tokens in enumerate(loads)])
    moves = []
    for most in (None, 1):
        settings = ReplaySettings(top, 36, rules=PlanRules(max_rank_moves=most, max_total_moves=20))
        report = replay(trace, ["incremental"], settings)
        moves.append(report.policies[0].moves)
    assert moves[0].max() > moves[1].max() > 0
    assert moves[1].max() <= 2 * 4
    assert report.conditions["moves"] == "at most 20 in all layers, at most 1 to a rank of a layer"


def test_a_limit_needs_a_placement_and_a_whole_number():
    tokens = lognormal(1, 8, 0.5)
    with pytest.raises(PlacementError, match="max_rank_moves is set but current is None"):
        PlanRequest(tokens, Topology(1, 2), 8, max_rank_moves=1)
    current = Placement.trivial(1, 8, 2, 0)
    for wrong in (-1, 0.5):
        with pytest.raises(PlacementError, match=f"max_rank_moves is {wrong}"):
            PlanRequest(tokens, Topology(1, 2), 8, current=current, max_rank_moves=wrong)
