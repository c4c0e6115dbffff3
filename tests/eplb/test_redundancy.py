import numpy as np
import pytest

from moe_serve.eplb.replay.redundancy import plan_redundancy
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology
from tests.eplb.loads import lognormal


def test_the_fewest_slots_that_reach_the_target_are_chosen():
    plan = plan_redundancy(lognormal(2, 64, 0.6), Topology(4, 8), target=0.95, bytes_per_expert=1000)
    assert plan.chosen is not None
    assert plan.chosen.balancedness >= 0.95
    assert all(p.balancedness < 0.95 for p in plan.points if p.num_slots < plan.chosen.num_slots)
    assert [p.num_slots for p in plan.points] == [64, 96, 128]
    assert [p.extra_bytes for p in plan.points] == [0, 2000, 4000]


def test_more_slots_never_hurt():
    points = plan_redundancy(lognormal(2, 30, 1.0), Topology(2, 5), slots=range(30, 71, 10), policy="greedy").points
    reached = [p.balancedness for p in points]
    assert reached == sorted(reached)
    assert all(p.worst <= p.balancedness <= p.bound + 1e-9 for p in points)


def test_a_target_out_of_reach_is_said():
    hot = np.array([[10_000, 1, 1, 1]])
    plan = plan_redundancy(hot, Topology(1, 4), target=0.99, slots=[4])
    assert plan.chosen is None
    assert plan.points[0].bound < 0.99


def test_wrong_arguments_are_refused():
    with pytest.raises(PlacementError, match="target"):
        plan_redundancy(np.ones((1, 4)), Topology(1, 2), target=1.5)
    with pytest.raises(PlacementError, match="num_slots"):
        plan_redundancy(np.ones((1, 4)), Topology(1, 2), slots=[5])
