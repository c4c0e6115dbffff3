import pytest

from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.replay.redundancy import redundancy_curve
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology
from tests.eplb.loads import lognormal


def test_more_slots_never_hurt():
    rows = redundancy_curve(lognormal(2, 30, 1.0), Topology(2, 5), range(30, 71, 10), PlanRules())
    assert [slots for slots, _, _ in rows] == [30, 40, 50, 60, 70]
    reached = [mean for _, mean, _ in rows]
    assert reached == sorted(reached)
    assert all(worst <= mean for _, mean, worst in rows)


def test_slots_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(PlacementError, match="num_slots"):
        redundancy_curve(lognormal(1, 4, 1.0), Topology(1, 2), [5], PlanRules())
