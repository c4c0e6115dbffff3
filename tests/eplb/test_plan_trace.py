"""Plans from traces: windows summed, empty slots filled for engines that have none."""

import numpy as np

from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.repair import fill_empty_slots
from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace
from moe_serve.topology import Topology


def test_only_the_last_windows_count() -> None:
    records = [LoadRecord(i, 1, "mixed", np.array([[2**i, 1]])) for i in range(5)]
    made = plan_from_trace(LoadTrace.of(records), TracePlanSettings(Topology(1, 2), 2, "greedy", last=2))
    assert made.tokens.tolist() == [[8 + 16, 2]]
    assert made.num_windows == 2
    whole = plan_from_trace(LoadTrace.of(records), TracePlanSettings(Topology(1, 2), 2, "greedy"))
    assert whole.tokens.tolist() == [[31, 5]]


def test_an_empty_slot_takes_the_replica_that_helps_most() -> None:
    # Rank 0 has 8 of expert 0 and 2 of expert 1; rank 1 has 2 of expert 2 and room: a replica of 0 evens it out best.
    placement = Placement(np.array([[0, 1, 2, -1]]), 3, 2, (7,))
    filled = fill_empty_slots(placement, np.array([[8, 2, 2]]))
    assert filled.physical_to_logical.tolist() == [[0, 1, 2, 0]]
    assert filled.moe_layer_ids == (7,)


def test_a_rank_that_holds_all_experts_repeats_one() -> None:
    filled = fill_empty_slots(Placement(np.array([[0, 1, -1, 0, 1, -1]]), 2, 2), np.array([[4, 2]]))
    assert (filled.physical_to_logical >= 0).all()


def test_a_filled_plan_says_its_own_balance() -> None:
    tokens = np.array([[5, 1, 0, 0]])
    settings = TracePlanSettings(Topology(1, 2), 6, fill=True)
    made = plan_from_trace(LoadTrace.of([LoadRecord(0, 1, "mixed", tokens)]), settings)
    assert (made.plan.placement.physical_to_logical >= 0).all()
    np.testing.assert_allclose(made.plan.balancedness, balancedness(rank_load(tokens, made.plan.placement)))
    np.testing.assert_allclose(made.plan.gap, made.plan.bound - made.plan.balancedness)


def test_filled_slots_count_as_moves_where_a_rank_receives_an_expert() -> None:
    tokens = np.full((1, 4), 100)
    in_use = Placement(np.array([[0, 1, -1, 2, 3, -1]]), 4, 2)
    rules = PlanRules(max_moves=0)
    settings = TracePlanSettings(Topology(1, 2), 6, "incremental", current=in_use, fill=True, rules=rules)
    made = plan_from_trace(LoadTrace.of([LoadRecord(0, 1, "mixed", tokens)]), settings)
    assert (made.plan.placement.physical_to_logical >= 0).all()
    assert made.plan.num_moves == 2


def test_of_equally_good_experts_an_empty_slot_takes_one_that_its_rank_has_in_use() -> None:
    placement, tokens = Placement(np.array([[0, 1, 2, 2, 3, -1]]), 4, 2), np.array([[0, 0, 90, 1]])
    assert fill_empty_slots(placement, tokens).physical_to_logical.tolist() == [[0, 1, 2, 2, 3, 0]]
    in_use = Placement(np.array([[0, 2, 3, 2, 3, 1]]), 4, 2)
    assert fill_empty_slots(placement, tokens, in_use=in_use).physical_to_logical.tolist() == [[0, 1, 2, 2, 3, 1]]


def test_a_filled_slot_keeps_experts_on_the_nodes_that_hold_them() -> None:
    placement = Placement(np.array([[0, -1, 1, -1, 2, -1, 3, -1]]), 4, 4)
    tokens = np.array([[1, 1, 9, 1]])
    assert fill_empty_slots(placement, tokens, num_nodes=2).physical_to_logical.tolist() == [[0, 1, 1, 0, 2, 3, 3, 2]]
    assert fill_empty_slots(placement, tokens).physical_to_logical[0, 1] == 2


def test_many_empty_slots_of_many_layers_are_filled_by_the_plain_rule() -> None:
    rng = np.random.default_rng(0)
    table = np.full((3, 4, 5), -1)
    table[:, :, :3] = rng.permuted(np.tile(np.arange(12), (3, 1)), axis=1).reshape(3, 4, 3)
    tokens = rng.integers(1, 1000, (3, 12))
    filled = fill_empty_slots(Placement(table.reshape(3, 20), 12, 4), tokens).physical_to_logical
    for row, slot in np.argwhere(table.reshape(3, 20) < 0).tolist():
        rank = table[row, slot // 5]
        worth = {}
        for expert in set(range(12)) - set(rank.tolist()):
            rank[slot % 5] = expert
            tried = Placement(table[row].reshape(1, 20), 12, 4)
            worth[expert] = float(rank_load(tokens[row : row + 1], tried).max())
        rank[slot % 5] = filled[row, slot]
        assert worth[filled[row, slot]] <= min(worth.values()) * (1 + 1e-12)
