"""The per-batch split: exact against pulp + HiGHS and against all subsets of ranks, by source, and its alternatives."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.exact import UNPROVEN, ExactSplit, confined_load, is_proven, split_exact
from moe_serve.eplb.split.layer_slots import LayerSlots
from moe_serve.eplb.split.make import SPLITS, make_split, make_splits, split_batch
from moe_serve.eplb.split.native import NativeSplit, build_library, find_library
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


def layer_of(row, num_ranks, num_logical=None, num_nodes=1, layer_row=0):
    return LayerSlots.of(row, Topology(num_nodes, num_ranks // num_nodes), num_logical, layer_row)


def by_source_of(totals, num_ranks, seed):
    """Returns counts [R, E] with these totals."""
    return np.random.default_rng(seed).multinomial(totals, np.full(num_ranks, 1 / num_ranks)).T


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
    graph = ReplicaGraph.of(layer_of(row, num_ranks, len(counts)))
    split = split_exact(graph, counts.tolist())
    assert split.max_load == split.rank_load.max() == best_by_subsets(graph, counts.tolist())
    assert -(-confined_load(graph, counts.tolist(), split.certificate) // len(split.certificate)) == split.max_load
    assert is_proven(graph, counts.tolist(), split)

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
def test_no_table_with_these_slot_totals_has_shorter_routes(case, seed):
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
        taken = np.repeat(slots, sent[:, slots].sum(axis=0))
        cost = price[sources][:, taken]
        assert (sent[:, slots] * price[:, slots]).sum() == cost[linear_sum_assignment(cost)].sum()


@settings(max_examples=200, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32), name=st.sampled_from(["even", "nearest", "exact"]))
def test_compiled_splits_equal_the_plain_ones(library, case, seed, name):
    row, totals, num_ranks = case
    layer = layer_of(row, num_ranks, len(totals), 2 if num_ranks % 2 == 0 else 1, seed % 5)
    plain, native = make_split(name, layer), make_split(name, layer, library)
    assert native.native is not None
    counts = by_source_of(totals, num_ranks, seed)
    assert np.array_equal(plain.split(counts), native.split(counts))
    if name != "nearest":
        assert np.array_equal(plain.split(totals), native.split(totals))
    assert plain.outcomes.tolist() == native.outcomes.tolist()


def test_compiled_exact_split_equals_the_plain_one_on_a_large_layer(library):
    rng = np.random.default_rng(1)
    for skew in (0.3, 0.8, 1.2):
        p = rng.permutation(np.arange(1.0, 257) ** -skew)
        row = rng.permutation(np.concatenate([np.arange(256), rng.choice(256, 64, p=p / p.sum())]))
        layer = layer_of(row, 32, 256, 4)
        plain, native = make_split("exact", layer), make_split("exact", layer, library)
        for scale in (10**3, 10**6, 2**52):
            totals = rng.multinomial(scale, p / p.sum())
            assert np.array_equal(plain.split(totals), native.split(totals))
            counts = by_source_of(totals, 32, 0)
            assert np.array_equal(plain.split(counts), native.split(counts))
        assert plain.outcomes.tolist() == native.outcomes.tolist()
        assert plain.outcomes.sum() == 6
        assert plain.outcomes[UNPROVEN] == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_counts_as_proven_only_where_its_certificate_proves_it(compiled, request):
    layer = layer_of([0, 1, 2, 3, 0, 1], 3)  # rank 0: experts 0, 1; rank 1: 2, 3; rank 2: 0, 1
    reaches, graph = (1, 3, 3), ReplicaGraph.of(layer)
    stops_early = replace(graph, live=(0,))  # its first bound, the load of all on rank 0, is above any load

    def outcomes_of(counts, used):
        if compiled:
            native = NativeSplit(request.getfixturevalue("library"), layer, reaches, used)
            native.split(np.array(counts))
            return native.outcomes.tolist()
        policy = ExactSplit(layer, reaches)
        policy._graph = used
        policy.split_plainly(np.array(counts))
        return policy.outcomes.tolist()

    level = [[2, 2, 1, 1], [0, 0, 1, 1], [2, 2, 0, 0]]
    assert outcomes_of(level, graph) == [1, 0, 0], "own tokens stay, and all ranks have 4"
    uneven = [[9, 9, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert outcomes_of(uneven, graph) == [0, 1, 0], "near replicas would take all; half is pushed away"
    assert outcomes_of(uneven, stops_early) == [0, 0, 1]


@pytest.mark.parametrize("name", SPLITS)
def test_every_policy_sends_every_token_to_a_slot_of_its_expert(name):
    rng = np.random.default_rng(3)
    for _ in range(100):
        row, totals, num_ranks = random_case(rng)
        counts = rng.multinomial(totals, np.full(num_ranks, 1 / num_ranks)).T
        policy = make_split(name, layer_of(row, num_ranks, len(totals)))
        sent = policy.split(counts)
        kept = row >= 0
        for source in range(num_ranks):
            assert np.array_equal(np.bincount(row[kept], sent[source, kept], len(totals)), counts[source])
        if name != "nearest":
            flat = policy.split(totals)
            assert np.array_equal(np.bincount(row[kept], flat[kept], len(totals)), totals)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_even_split_deals_rows_out_one_at_a_time_and_slots_differ_by_at_most_one(case, seed):
    row, totals, num_ranks = case
    layer_row = seed % 7
    counts = by_source_of(totals, num_ranks, seed)
    sent = make_split("even", layer_of(row, num_ranks, len(totals), layer_row=layer_row)).split(counts)
    expected = np.zeros_like(sent)
    for expert in range(len(totals)):
        slots, turn = np.flatnonzero(row == expert), expert + layer_row
        for source in range(num_ranks):
            for _ in range(counts[source, expert]):
                expected[source, slots[turn % len(slots)]] += 1
                turn += 1
        received = sent.sum(axis=0)[slots]
        assert received.max() - received.min() <= 1
    assert np.array_equal(sent, expected)


def test_odd_rows_of_the_even_split_do_not_pile_up_on_the_lowest_slots():
    row = np.concatenate([np.arange(12), np.arange(12)])
    for layer_row in range(2):
        sent = make_split("even", layer_of(row, 2, layer_row=layer_row)).split(np.ones(12, dtype=int))
        assert rank_loads(sent, 2).tolist() == [6, 6]
        assert sent[0] == (layer_row == 0), "layers begin at different replicas"


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_nearest_split_uses_the_own_rank_then_the_node_then_all_evenly(case, seed):
    row, totals, num_ranks = case
    per_node = 2 if num_ranks % 2 == 0 else 1
    counts = by_source_of(totals, num_ranks, seed)
    sent = make_split("nearest", layer_of(row, num_ranks, len(totals), num_ranks // per_node)).split(counts)
    slot_rank = np.arange(len(row)) // (len(row) // num_ranks)
    by_group = {}
    for source in range(num_ranks):
        for expert in range(len(totals)):
            slots = np.flatnonzero(row == expert)
            own = slots[slot_rank[slots] == source]
            node = slots[slot_rank[slots] // per_node == source // per_node]
            near = own if len(own) else node if len(node) else slots
            assert sent[source, near].sum() == counts[source, expert]
            by_group.setdefault((expert, *near.tolist(), len(own) > 0, len(node) > 0), []).append(sent[source, near])
    for received in by_group.values():
        together = np.sum(received, axis=0)
        assert together.max() - together.min() <= 1, "those that use the same slots use them evenly"


def test_nearest_split_stays_on_the_rank_then_on_the_node():
    # Two nodes of two ranks; expert 0 on ranks 1 and 2, expert 1 on rank 0, expert 2 on rank 3.
    counts = np.array([[6, 0, 0], [5, 0, 0], [4, 0, 0], [3, 0, 0]])
    sent = make_split("nearest", layer_of([1, 0, 0, 2], 4, num_nodes=2)).split(counts)
    assert sent[:, 1].tolist() == [6, 5, 0, 0]
    assert sent[:, 2].tolist() == [0, 0, 4, 3]


def test_nearest_split_without_sources_says_what_it_needs():
    with pytest.raises(PlacementError, match="counts by source rank"):
        make_split("nearest", layer_of([0, 1], 2)).split(np.array([1, 1]))


def test_fewest_activated_split_activates_as_few_experts_on_the_worst_rank_as_possible():
    rng = np.random.default_rng(5)
    for _ in range(200):
        row, counts, num_ranks = random_case(rng)
        graph = ReplicaGraph.of(layer_of(row, num_ranks, len(counts)))
        sent = make_split("fewest_activated", graph.layer).split(counts)
        assert all((sent[row == e] > 0).sum() <= 1 for e in range(len(counts)))
        active = (counts > 0).astype(int)
        assert rank_loads((sent > 0).astype(int), num_ranks).max() == best_by_subsets(graph, active.tolist())


def test_zero_is_a_normal_size():
    assert split_batch([0, 0], [0, 1], 2).tolist() == [0, 0]
    assert split_batch([7], [0], 1).tolist() == [7]
    assert split_batch(np.zeros((2, 3), dtype=int), [0, 1, 2, 0], 2).tolist() == [[0, 0, 0, 0]] * 2
    for name in SPLITS:
        assert make_split(name, layer_of([0, 1], 2)).split(np.array([[0, 3], [0, 0]])).sum() == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_an_expert_with_tokens_but_without_a_slot_is_named(compiled):
    with pytest.raises(PlacementError, match="expert 1 has tokens but no slot"):
        split_batch([1, 1, 1], [0, 2], 2)
    with pytest.raises(PlacementError, match="expert 1 has tokens but no slot"):
        make_split("exact", layer_of([0, 2], 2, 3), find_library() if compiled else None).split(np.array([1, 1, 1]))


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
    with pytest.raises(ConfigError, match="even, nearest, exact"):
        make_split("fair", layer_of([0, 1], 2))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_library() is None
    with pytest.raises(ConfigError, match="no C compiler"):
        build_library()


def test_a_topology_of_another_cluster_is_named():
    with pytest.raises(PlacementError, match="the topology has 4 ranks, the placement 2"):
        make_splits("even", Placement.trivial(1, 4, 2), Topology(2, 2))


def test_a_broken_compiler_is_reported_not_hidden(tmp_path, monkeypatch):
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho bad flag >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="bad flag"):
        build_library(tmp_path / "cache")
