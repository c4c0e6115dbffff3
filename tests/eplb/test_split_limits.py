"""Where no split over replicas can help: the bound against every split, the words, and who says them."""

import itertools

import numpy as np
import pytest

from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.shares import even_out_shares
from moe_serve.eplb.rebalance.events import PlanReady, RequestPlan, WindowClosed
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace, plan_to_json, plan_to_table
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.report import verdict
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.split.limit import fewest_slots, split_limit, where_no_split_helps
from moe_serve.topology import Topology
from tests.eplb.test_rebalancer import LinearPrices

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
        shares = even_out_shares(tokens, placement)
        assert np.all(shares >= 0)
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
