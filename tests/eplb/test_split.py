"""The splits of a batch: even, nearest, fewest activated, the compiled twins of all, and where no split helps."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import PlanReady, RequestPlan, WindowClosed
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace, plan_to_json, plan_to_table
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.report import verdict
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.split.layer import ReplicaGraph
from moe_serve.eplb.split.limit import fewest_slots, split_limit, where_no_split_helps
from moe_serve.eplb.split.make import SPLITS, make_split, make_splits
from moe_serve.eplb.split.policy import find_library
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology
from tests.eplb.split_cases import best_by_subsets, by_source_of, cases, layer_of, random_case, rank_loads, split_batch
from tests.eplb.test_rebalancer import LinearPrices

TIME = ExpertTime(3)  # of the split by time


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


@pytest.mark.parametrize("name", SPLITS)
def test_every_policy_sends_every_token_to_a_slot_of_its_expert(name):
    rng = np.random.default_rng(3)
    for _ in range(100):
        row, totals, num_ranks = random_case(rng)
        counts = rng.multinomial(totals, np.full(num_ranks, 1 / num_ranks)).T
        policy = make_split(name, layer_of(row, num_ranks, len(totals)), time=TIME)
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
        assert make_split(name, layer_of([0, 1], 2), time=TIME).split(np.array([[0, 3], [0, 0]])).sum() == 3


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
        ([[1, 2]], [0, 1], 2, "by source rank"),
        ([1, 2], [0, 1, 1], 2, "3 slots"),
        ([1, 2], [0, 2], 2, "-1 .. 1"),
        ([1, 2], [[0, 1]], 2, "one layer"),
    ],
    ids=str,
)
def test_wrong_input_is_named(counts, row, num_ranks, message):
    with pytest.raises(PlacementError, match=message):
        split_batch(counts, row, num_ranks)


def test_an_unknown_split_is_refused_and_a_missing_compiler_is_told(tmp_path, monkeypatch, caplog):
    with pytest.raises(ConfigError, match="even, nearest, exact"):
        make_split("fair", layer_of([0, 1], 2))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_library.cache_clear()
    try:
        assert find_library() is None
    finally:
        find_library.cache_clear()
    assert "no C compiler for split.c" in caplog.text


def test_a_topology_of_another_cluster_is_named():
    with pytest.raises(PlacementError, match="the topology has 4 ranks, the placement 2"):
        make_splits("even", Placement.trivial(1, 4, 2), Topology(2, 2))


ONE_HOT = np.array([[60, 10, 10, 10, 10, 0, 0, 0]])


def lightest_top(tokens: np.ndarray, placement: Placement) -> float:
    """Returns the largest rank load under the best split of layer 0: the heaviest cut over sets of ranks."""
    of_rank = placement.physical_to_logical[0].reshape(placement.num_ranks, -1)
    ranks_of = [frozenset(np.flatnonzero((of_rank == e).any(axis=1)).tolist()) for e in range(placement.num_logical)]
    best = 0.0
    for size in range(1, placement.num_ranks + 1):
        for chosen in itertools.combinations(range(placement.num_ranks), size):
            inside = sum(float(w) for w, where in zip(tokens, ranks_of, strict=True) if where <= set(chosen))
            best = max(best, inside / size)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_no_split_exceeds_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_logical, per_rank = int(rng.integers(1, 5)), int(rng.integers(1, 7)), int(rng.integers(2, 5))
    if num_ranks * per_rank < num_logical:
        per_rank = -(-num_logical // num_ranks)
    row = np.concatenate(
        [np.arange(num_logical), rng.integers(-1, num_logical, size=num_ranks * per_rank - num_logical)]
    )
    placement = Placement(rng.permutation(row)[None], num_logical, num_ranks)
    tokens = rng.integers(0, 50, size=(1, num_logical)) * (rng.random((1, num_logical)) < 0.8)
    limit = split_limit(tokens, placement)
    top = lightest_top(tokens[0], placement)
    reached = 1.0 if top == 0 else tokens.sum() / len(placement.live_ranks) / top
    assert limit.even[0] - 1e-12 <= reached <= limit.most[0] + 1e-12
    if limit.is_hopeless[0]:
        assert reached - limit.even[0] < 0.005


def test_a_hot_expert_with_one_replica_is_named_with_the_replicas_and_slots_that_it_needs() -> None:
    placement = Placement.trivial(1, 8, 4)
    limit = split_limit(ONE_HOT, placement)
    assert limit.expert.tolist() == [0]
    assert limit.rank.tolist() == [0]
    assert limit.weight.tolist() == [2.4]
    assert limit.most.tolist() == pytest.approx([25 / 70])
    text = where_no_split_helps(ONE_HOT, placement)
    assert text is not None
    assert "layer 0 at 0.357, where rank 0 alone holds expert 0 with 2.40 times" in text
    assert "3 replicas would" in text
    assert "at least 12 slots in place of 8" in text


def test_where_the_slots_are_there_it_says_so() -> None:
    placement = Placement(np.array([[0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7, -1]]), 8, 4)
    text = where_no_split_helps(ONE_HOT, placement)
    assert text is not None
    assert text.endswith("for which the 12 slots suffice.")


def test_several_experts_of_one_rank_are_said_to_be_moved() -> None:
    text = where_no_split_helps(np.array([[20, 20, 1, 1]]), Placement.trivial(1, 4, 2))
    assert text is not None
    assert "several such experts" in text
    assert "moved away" in text


@pytest.mark.parametrize(
    "tokens, row",
    [
        ([[0, 0, 0, 0]], [0, 1, 2, 3]),  # no load
        ([[5, 5, 5, 5]], [0, 1, 2, 3]),  # even
        ([[30, 20, 0, 0]], [0, 1, 0, 2, 3, 3]),  # 15 + 20 of the even split becomes 5 + 20: a split helps
    ],
)
def test_nothing_is_said_where_a_split_helps_or_none_is_needed(tokens, row) -> None:
    tokens = np.array(tokens)
    ranks = 2 if len(row) == 4 else 3
    assert where_no_split_helps(tokens, Placement(np.array([row]), 4, ranks)) is None


def test_the_fewest_slots() -> None:
    assert fewest_slots(np.array([0, 0, 0]), 2) == 4
    assert fewest_slots(np.array([25, 25, 25, 25]), 4) == 4
    assert fewest_slots(np.array([100, 0, 0, 0]), 4) == 8  # 4 replicas, and 3 experts more


def test_plans_replays_and_the_balancer_say_it() -> None:
    records = [LoadRecord(100 * i, 100, "decode", 100 * ONE_HOT) for i in range(4)]
    trace, topology = LoadTrace.of(records), Topology(1, 4)
    made = plan_from_trace(trace, TracePlanSettings(topology, 8))
    assert "no split over replicas can help" in plan_to_table(made)
    assert "no split over replicas can help" in plan_to_json(made)["where_no_split_helps"]
    enough = plan_from_trace(trace, TracePlanSettings(topology, 16))
    assert plan_to_json(enough)["where_no_split_helps"] is None
    report = replay(trace, ["incremental"], ReplaySettings(topology, 8))
    assert any("no split over replicas can help" in sentence for sentence in verdict(report))
    balancer = Rebalancer(Placement.trivial(1, 8, 4), topology, RebalanceSettings(), LinearPrices(transfer_s=1e6))
    for record in records:
        for action in balancer.handle(WindowClosed(record.first_step + 100, record)):
            assert isinstance(action, RequestPlan)
            balancer.handle(PlanReady(action.step, action.request_id, made.plan))
    kept = [each.reason for each in balancer.decisions if each.kind == "keep"]
    assert kept
    assert all("no layer is worth its move. As planned: In 1 of 1 layers" in reason for reason in kept)
