"""A number of moves for all layers together goes where moves gain most."""

import numpy as np
import pytest

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.policies.single_edits import EditLog, edits_within, replay_edits
from moe_serve.topology import Topology
from tests.eplb.loads import drifting


def log_of(*layers):
    """layers: for each layer its edits, (moves so far, gain)"""
    rows = [(layer, *edit) for layer, edits in enumerate(layers) for edit in edits]
    layer, moves, gain = (np.array([row[i] for row in rows]) for i in range(3))
    slot = np.arange(len(rows))
    return EditLog(layer.astype(np.int64), slot, slot, slot, moves.astype(np.int64), gain.astype(np.float64))


@pytest.mark.parametrize(
    ("most", "keep"),
    [(0, [0, 0]), (1, [1, 0]), (2, [1, 1]), (3, [2, 1]), (4, [3, 1]), (5, [3, 2]), (6, [3, 2]), (99, [3, 2])],
)
def test_the_steepest_edits_of_all_layers_come_first(most, keep):
    log = log_of([(1, 9.0), (2, 3.0), (3, 2.0)], [(1, 4.0), (2, 1.0)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), most).tolist() == keep


def test_a_poor_edit_that_opens_the_way_for_a_rich_one_is_taken_with_it():
    log = log_of([(2, 1.0), (3, 8.0)], [(1, 2.0)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), 3).tolist() == [2, 0]
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), 2).tolist() == [0, 1]


def test_no_later_edit_of_a_layer_is_taken_without_the_one_before_it():
    log = log_of([(3, 9.0), (4, 1.0)], [(1, 0.5)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.ones(2), 1).tolist() == [0, 1]


def test_edits_that_take_moves_back_are_free_and_moves_of_a_repair_count():
    log = log_of([(2, 1.0), (1, 0.5)], [(5, 7.0)])
    assert edits_within(log, np.array([3, 4]), np.ones(2), 4).tolist() == [2, 0]
    assert edits_within(log, np.array([3, 4]), np.ones(2), 5).tolist() == [2, 0]
    assert edits_within(log, np.array([3, 4]), np.ones(2), 6).tolist() == [2, 1]


def test_a_busier_layer_counts_more():
    log = log_of([(1, 1.0)], [(1, 2.0)])
    assert edits_within(log, np.zeros(2, dtype=np.int64), np.array([3.0, 1.0]), 1).tolist() == [1, 0]


def test_kept_edits_are_made_in_order():
    log = EditLog(*(np.array(a) for a in ([0, 0, 0], [0, 3, 1], [2, 3, 1], [-1, 5, 7], [2, 3, 4])), np.ones(3))
    table = np.array([[[0, 1], [2, 3]]], dtype=np.int32)
    replay_edits(table, log, np.array([2]))
    assert table.tolist() == [[[2, 1], [0, 5]]]


@pytest.mark.parametrize(("slots", "ranks"), [(72, 8), (72, 18), (64, 32), (64, 64)])
@pytest.mark.parametrize("total", [0, 1, 20])
def test_a_plan_keeps_to_the_moves_of_all_layers_together(slots, ranks, total):
    loads = drifting(2, 5, 60, 0.9)
    top = Topology(1, ranks)
    current = make_policy("greedy").plan(PlanRequest(loads[0], top, slots)).placement
    request = PlanRequest(loads[1], top, slots, current=current, max_total_moves=total)
    plan = make_policy("incremental").plan(request)
    assert plan.num_moves <= total
    assert plan.balancedness.mean() >= balancedness(rank_load(loads[1], current)).mean() - 1e-9
    assert plan.num_moves > 0 or total // 5 == 0 or slots == ranks


def test_moves_of_all_layers_together_serve_better_than_as_many_for_each_layer():
    loads = drifting(2, 20, 64, 0.95)
    top = Topology(1, 8)
    current = make_policy("refined").plan(PlanRequest(loads[0], top, 72)).placement
    slowest = []
    for limit in ({"max_moves": 1}, {"max_total_moves": 20}):
        plan = make_policy("incremental").plan(PlanRequest(loads[1], top, 72, current=current, **limit))
        assert 0 < plan.num_moves <= 20
        slowest.append((1 / plan.balancedness).sum())
    assert slowest[1] < slowest[0] * 0.998


def test_the_price_applies_under_a_hierarchy_too():
    loads = drifting(2, 3, 64, 0.8)
    top = Topology(2, 4)
    current = make_policy("refined").plan(PlanRequest(loads[0], top, 80, num_groups=8, off_home=0.1)).placement
    few, many = (
        make_policy("incremental").plan(
            PlanRequest(loads[1], top, 80, num_groups=8, off_home=0.1, current=current, max_total_moves=most)
        )
        for most in (6, 1000)
    )
    assert 0 < few.num_moves <= 6 < many.num_moves
    assert (few.off_home <= 0.1 + 1e-9).all()
