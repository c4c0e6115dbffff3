"""The exact split of a batch: against pulp + HiGHS, against all subsets of ranks, and by source."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.split.exact import UNPROVEN, ExactSplit, confined_load, is_proven, split_exact
from moe_serve.eplb.split.layer import ReplicaGraph
from moe_serve.eplb.split.make import make_split
from moe_serve.eplb.split.policy import NativeSplit
from moe_serve.topology import Topology
from tests.eplb.split_cases import best_by_subsets, by_source_of, cases, layer_of, random_case, rank_loads, split_batch


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


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_forest_connects_all_ranks_that_share_experts_and_leaves_come_first(case):
    row, counts, num_ranks = case
    graph = ReplicaGraph.of(layer_of(row, num_ranks, len(counts)))
    forest, together = graph.forest, [{rank} for rank in range(num_ranks)]
    for i in range(len(graph.experts)):
        ranks = set(graph.replica_rank[graph.replica_start[i] : graph.replica_start[i + 1]])
        joined = set().union(*(part for part in together if part & ranks))
        together = [part for part in together if not part & ranks] + [joined]
    assert len(forest.child) == num_ranks - len(together)
    assert len(set(forest.child)) == len(forest.child)
    for k, (child, mine, theirs) in enumerate(
        zip(forest.child, forest.child_replica, forest.parent_replica, strict=True)
    ):
        assert child not in forest.parent[k:], "all that hangs on a rank has been levelled before it"
        assert graph.owner[mine] == graph.owner[theirs]
        assert (graph.replica_rank[mine], graph.replica_rank[theirs]) == (child, forest.parent[k])


def test_one_pass_over_the_forest_levels_a_chain_of_ranks():
    row = [0, 5, 0, 1, 1, 2, 2, 3, 3, 4]  # rank r holds experts r - 1 and r; rank 0 expert 5 too
    graph = ReplicaGraph.of(layer_of(row, 5))
    result = split_exact(graph, [40, 40, 40, 40, 20, 20])
    assert result.num_pushes == 0
    assert result.rank_load.tolist() == [40] * 5
    assert result.max_load == 40
