"""The per-batch split: exact against pulp + HiGHS and against all subsets of ranks, by source, and its alternatives."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.split.batch import SPLITS, make_split, split_batch
from moe_serve.eplb.split.exact import confined_load, split_exact
from moe_serve.eplb.split.native import NativeSplit, build_library
from moe_serve.eplb.split.replica_graph import ReplicaGraph
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology


def random_case(rng, max_ranks=6, max_tokens=40):
    """One layer and a batch: every expert has a slot, some have several, some slots are empty or duplicates."""
    num_ranks = int(rng.integers(1, max_ranks + 1))
    slots_per_rank = int(rng.integers(1, 5))
    num_slots = num_ranks * slots_per_rank
    num_logical = int(rng.integers(1, num_slots + 1))
    row = np.concatenate([np.arange(num_logical), rng.integers(-1, num_logical, num_slots - num_logical)])
    counts = rng.integers(0, max_tokens, num_logical) * (rng.random(num_logical) < 0.8)
    return rng.permutation(row), counts, num_ranks


def rank_loads(slot_tokens, num_ranks):
    return slot_tokens.reshape(num_ranks, -1).sum(axis=1)


def best_by_subsets(graph, counts):
    """max over sets of ranks of ceil(confined / size): the definition, by enumeration."""
    ranks = range(graph.num_ranks)
    return max(
        -(-confined_load(graph, counts, chosen) // size)
        for size in range(1, graph.num_ranks + 1)
        for chosen in combinations(ranks, size)
    )


@st.composite
def cases(draw):
    return random_case(
        np.random.default_rng(draw(st.integers(0, 2**32))), max_tokens=draw(st.sampled_from([2, 9, 1000]))
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return build_library(tmp_path_factory.mktemp("built"))
    except ConfigError as error:
        if "no C compiler" in str(error):
            pytest.skip("this machine has no C compiler; the plain split is the one in use")
        raise


def test_hand_worked_example():
    # Expert 0 (10 tokens) lives on ranks 0 and 1; rank 0 has 4 tokens of its own, rank 1 has 2.
    assert split_batch([10, 4, 2], [0, 1, 0, 2], 2).tolist() == [4, 4, 6, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp")
def test_largest_load_is_ceil_of_the_lp_optimum_of_pulp_highs_on_thousands_of_cases():
    pulp = pytest.importorskip("pulp")
    rng = np.random.default_rng(0)
    for _ in range(20):  # independent cases share one program, whose optimum is then optimal in each
        block = [random_case(rng) for _ in range(120)]
        program = pulp.LpProblem("splits", pulp.LpMinimize)
        tops = []
        for n, (row, counts, num_ranks) in enumerate(block):
            top = pulp.LpVariable(f"top{n}", lowBound=0)
            tops.append(top)
            slots_per_rank = len(row) // num_ranks
            x = [pulp.LpVariable(f"x{n}_{s}", lowBound=0) for s in range(len(row))]
            for expert, tokens in enumerate(counts.tolist()):
                program += pulp.lpSum(x[s] for s in np.flatnonzero(row == expert)) == tokens
            for rank in range(num_ranks):
                on_rank = range(rank * slots_per_rank, (rank + 1) * slots_per_rank)
                program += pulp.lpSum(x[s] for s in on_rank if row[s] >= 0) <= top
        program.setObjective(pulp.lpSum(tops))
        assert program.solve(pulp.HiGHS(msg=False)) == pulp.LpStatusOptimal
        for (row, counts, num_ranks), top in zip(block, tops, strict=True):
            got = rank_loads(split_batch(counts, row, num_ranks), num_ranks).max()
            assert got == int(np.ceil(top.value() - 1e-6)), (row, counts, num_ranks)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_split_is_optimal_complete_and_its_certificate_proves_it(case):
    row, counts, num_ranks = case
    graph = ReplicaGraph.of(row, num_ranks, len(counts))
    split = split_exact(graph, counts.tolist())
    assert split.max_load == split.rank_load.max() == best_by_subsets(graph, counts.tolist())
    assert -(-confined_load(graph, counts.tolist(), split.certificate) // len(split.certificate)) == split.max_load

    slot_tokens = split_batch(counts, row, num_ranks)
    assert (slot_tokens >= 0).all()
    assert (slot_tokens[row < 0] == 0).all()
    assert np.array_equal(np.bincount(row[row >= 0], slot_tokens[row >= 0], len(counts)), counts)
    assert np.array_equal(rank_loads(slot_tokens, num_ranks), split.rank_load)


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_split_by_source_reaches_the_same_load_and_sends_what_each_rank_has(case, seed):
    row, totals, num_ranks = case
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(totals, np.full(num_ranks, 1 / num_ranks)).T
    nodes = 2 if num_ranks % 2 == 0 else 1
    sent = split_batch(counts, row, num_ranks, Topology(nodes, num_ranks // nodes))
    assert (sent >= 0).all()
    for source in range(num_ranks):
        kept = row >= 0
        assert np.array_equal(np.bincount(row[kept], sent[source, kept], len(totals)), counts[source])
    best = rank_loads(split_batch(totals, row, num_ranks), num_ranks).max()
    assert rank_loads(sent.sum(axis=0), num_ranks).max() == best


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_no_table_with_these_slot_totals_has_shorter_ways(case, seed):
    pytest.importorskip("scipy")
    from scipy.optimize import linear_sum_assignment

    row, totals, num_ranks = case
    totals = np.minimum(totals, 8)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(totals, np.full(num_ranks, 1 / num_ranks)).T
    per_node = 2 if num_ranks % 2 == 0 else 1
    sent = split_batch(counts, row, num_ranks, Topology(num_ranks // per_node, per_node))
    slot_rank = np.arange(len(row)) // (len(row) // num_ranks)
    ranks = np.arange(num_ranks)
    # 0 on the rank, 1 on the node, 1000 between nodes: fewest between nodes first, then most on the rank.
    price = np.where(
        ranks[:, None] // per_node != slot_rank // per_node, 1000, (ranks[:, None] != slot_rank).astype(int)
    )
    for expert in range(len(totals)):
        slots = np.flatnonzero(row == expert)
        sources = np.repeat(ranks, counts[:, expert])
        room = np.repeat(slots, sent[:, slots].sum(axis=0))
        cost = price[sources][:, room]
        assert (sent[:, slots] * price[:, slots]).sum() == cost[linear_sum_assignment(cost)].sum()


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_compiled_split_equals_the_plain_one(library, case):
    row, counts, num_ranks = case
    graph = ReplicaGraph.of(row, num_ranks, len(counts))
    plain, native = split_exact(graph, counts.tolist()), NativeSplit(library, graph).split(counts)
    for name in ("copy_tokens", "rank_load", "max_load", "certificate"):
        assert np.array_equal(getattr(plain, name), getattr(native, name)), name
    slot_tokens = NativeSplit(library, graph).slot_tokens(counts)
    assert np.array_equal(slot_tokens, make_split("exact", graph, compiled="never").split(counts))


def test_compiled_split_equals_the_plain_one_on_a_large_layer(library):
    rng = np.random.default_rng(1)
    for skew in (0.3, 0.8, 1.2):
        p = rng.permutation(np.arange(1.0, 257) ** -skew)
        row = rng.permutation(np.concatenate([np.arange(256), rng.choice(256, 64, p=p / p.sum())]))
        graph = ReplicaGraph.of(row, 32, 256)
        native = NativeSplit(library, graph)
        for scale in (10**3, 10**6, 2**52):
            counts = rng.multinomial(scale, p / p.sum())
            plain, compiled = split_exact(graph, counts.tolist()), native.split(counts)
            assert np.array_equal(plain.copy_tokens, compiled.copy_tokens)
            assert plain.max_load == compiled.max_load
            assert plain.certificate == compiled.certificate


@pytest.mark.parametrize("name", SPLITS)
def test_every_policy_sends_every_token_to_a_slot_of_its_expert(name):
    rng = np.random.default_rng(3)
    for _ in range(100):
        row, totals, num_ranks = random_case(rng)
        counts = rng.multinomial(totals, np.full(num_ranks, 1 / num_ranks)).T
        policy = make_split(name, ReplicaGraph.of(row, num_ranks, len(totals)), Topology(1, num_ranks), "never")
        sent = policy.split(counts)
        kept = row >= 0
        for source in range(num_ranks):
            assert np.array_equal(np.bincount(row[kept], sent[source, kept], len(totals)), counts[source])
        if name != "nearest":
            flat = policy.split(totals)
            assert np.array_equal(np.bincount(row[kept], flat[kept], len(totals)), totals)


def test_even_split_differs_by_at_most_one_token_between_copies():
    row, num_ranks = np.array([0, 1, 0, 2, 0, 3]), 3
    counts = np.random.default_rng(0).integers(0, 7, (num_ranks, 4))
    sent = make_split("even", ReplicaGraph.of(row, num_ranks)).split(counts)
    of_expert_0 = sent.sum(axis=0)[row == 0]
    assert of_expert_0.max() - of_expert_0.min() <= 1


def test_nearest_split_stays_on_the_rank_then_on_the_node():
    # Two nodes of two ranks; expert 0 on ranks 1 and 2, expert 1 on rank 0, expert 2 on rank 3.
    graph = ReplicaGraph.of([1, 0, 0, 2], 4)
    counts = np.array([[6, 0, 0], [5, 0, 0], [4, 0, 0], [3, 0, 0]])
    sent = make_split("nearest", graph, Topology(2, 2)).split(counts)
    assert sent[:, 1].tolist() == [6, 5, 0, 0]
    assert sent[:, 2].tolist() == [0, 0, 4, 3]


def test_nearest_split_without_sources_says_what_it_needs():
    with pytest.raises(PlacementError, match="counts by source rank"):
        make_split("nearest", ReplicaGraph.of([0, 1], 2)).split(np.array([1, 1]))


def test_fewest_activated_split_activates_as_few_experts_on_the_worst_rank_as_possible():
    rng = np.random.default_rng(5)
    for _ in range(200):
        row, counts, num_ranks = random_case(rng)
        graph = ReplicaGraph.of(row, num_ranks, len(counts))
        sent = make_split("fewest_activated", graph).split(counts)
        assert all((sent[row == e] > 0).sum() <= 1 for e in range(len(counts)))
        active = (counts > 0).astype(int)
        assert rank_loads((sent > 0).astype(int), num_ranks).max() == best_by_subsets(graph, active.tolist())


def test_zero_is_a_normal_size():
    assert split_batch([0, 0], [0, 1], 2).tolist() == [0, 0]
    assert split_batch([7], [0], 1).tolist() == [7]
    assert split_batch(np.zeros((2, 3), dtype=int), [0, 1, 2, 0], 2).tolist() == [[0, 0, 0, 0]] * 2
    for name in SPLITS:
        assert make_split(name, ReplicaGraph.of([0, 1], 2)).split(np.array([[0, 3], [0, 0]])).sum() == 3


@pytest.mark.parametrize("compiled", ["auto", "never"])
def test_an_expert_with_tokens_but_without_a_slot_is_named(compiled):
    with pytest.raises(PlacementError, match="expert 1 has tokens but no slot"):
        split_batch([1, 1, 1], [0, 2], 2)
    with pytest.raises(PlacementError, match="expert 1 has tokens but no slot"):
        make_split("exact", ReplicaGraph.of([0, 2], 2, 3), compiled=compiled).split(np.array([1, 1, 1]))


@pytest.mark.parametrize(
    ("counts", "row", "num_ranks", "message"),
    [
        ([1.5, 2], [0, 1], 2, "whole numbers"),
        ([-1, 2], [0, 1], 2, ">= 0"),
        ([2**53, 2], [0, 1], 2, "at most 2\\^53"),
        ([[1, 2]], [0, 1], 2, "2 ranks"),
        ([1, 2], [0, 1, 1], 2, "3 slots"),
        ([1, 2], [0, 2], 2, "-1 .. 1"),
        ([1, 2], [[0, 1]], 2, "one layer"),
    ],
    ids=str,
)
def test_wrong_input_is_named(counts, row, num_ranks, message):
    with pytest.raises(PlacementError, match=message):
        split_batch(counts, row, num_ranks)


def test_unknown_split_and_missing_compiler_are_config_errors(tmp_path, monkeypatch):
    graph = ReplicaGraph.of([0, 1], 2)
    with pytest.raises(ConfigError, match="even, nearest, exact"):
        make_split("fair", graph)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert make_split("exact", graph, compiled="auto").split(np.array([3, 4])).tolist() == [3, 4]
    with pytest.raises(ConfigError, match="no C compiler"):
        make_split("exact", graph, compiled="always")


def test_a_broken_compiler_is_reported_not_hidden(tmp_path, monkeypatch):
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho bad flag >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="bad flag"):
        build_library(tmp_path / "cache")
