"""A mistake of the balancer ends the balancing, not the serving."""

from dataclasses import replace

import pytest

from moe_serve.engine.balancing.balance_reports import BalanceReports
from moe_serve.engine.balancing.contained_leader import ContainedLeader
from moe_serve.engine.protocol.balance_messages import BalanceReport
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError
from tests.engine.moving import RestlessLeader

PLACEMENT = Placement.trivial(2, 4, 2, 2)


class Mistaken(RestlessLeader):
    closed = False

    def poll(self, step: int) -> None:
        raise ZeroDivisionError("nothing by nothing")

    def set_placement(self, step: int, table: list[list[int]]) -> str:
        raise PlacementError("it does not fit")

    def close(self) -> None:
        self.closed = True


def contained(leader: RestlessLeader) -> ContainedLeader:
    return ContainedLeader(leader, BalanceReports(0, 0, "dynamic"), lambda: PLACEMENT)


def test_a_mistake_raises_an_alarm_once_and_nothing_else_moves() -> None:
    mistaken = Mistaken(PLACEMENT, 5)
    leader = contained(mistaken)
    assert leader.next_round() is not None
    assert leader.report(3) is None
    leader.poll(4)
    assert mistaken.closed
    report = leader.report(5)
    assert report is not None
    assert (report.state, report.step) == ("off", 5)
    assert "ZeroDivisionError: nothing by nothing" in report.alarm
    assert leader.report(6) is None
    assert not leader.has_work
    assert leader.next_round() is None
    leader.activated(6, 1, 0, 0.0, 0.0)
    leader.group_changed(7, PLACEMENT)
    with pytest.raises(PlacementError, match=r"the balancer has failed.*restart the server"):
        leader.rebalance_now(8)
    leader.close()


def test_a_placement_error_outside_of_commands_is_a_mistake_too() -> None:
    class Confused(RestlessLeader):
        def activated(self, step: int, version: int, num_bytes: int, move_s: float, pause_s: float) -> None:
            raise PlacementError("version 3 was activated but version 2 is running")

    leader = contained(Confused(PLACEMENT, 5))
    leader.activated(6, 3, 0, 0.0, 0.0)
    report = leader.report(7)
    assert report is not None
    assert "version 2 is running" in report.alarm


def test_where_experts_are_is_told_after_the_end_too_and_totals_stay() -> None:
    class Busy(Mistaken):
        def report(self, step: int) -> BalanceReport | None:
            return BalanceReports(0, 0, "dynamic").make(step, "moving", PLACEMENT, {"num_rounds": 3.0})

    in_use = [PLACEMENT]
    leader = ContainedLeader(Busy(PLACEMENT, 5), BalanceReports(0, 0, "dynamic"), lambda: in_use[-1])
    assert leader.report(3) is not None
    leader.poll(4)
    assert leader.report(4) is not None
    assert leader.report(5) is None
    in_use.append(replace(PLACEMENT, version=1))  # the round that all ranks were told before goes live
    report = leader.report(6)
    assert report is not None
    assert (report.placement_version, report.totals) == (1, {"num_rounds": 3.0})
    assert report.placement is not None


def test_a_refused_command_is_no_mistake() -> None:
    leader = contained(Mistaken(PLACEMENT, 5))
    with pytest.raises(PlacementError, match="it does not fit"):
        leader.set_placement(0, [[0]])
    assert leader.rebalance_now(1) == "it never rests"
    assert leader.has_work
