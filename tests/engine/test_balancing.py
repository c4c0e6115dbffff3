"""What one rank says and does about moves, step by step, without processes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from moe_serve.engine.balancing.balancer import BalanceReports
from moe_serve.engine.balancing.balancing import Balancing
from moe_serve.engine.balancing.split_choice import SplitChoice
from moe_serve.engine.protocol.messages import Answer, BalanceReport, Rebalance, SetPlacement
from moe_serve.engine.step.plan import StepPlan
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError
from tests.engine.moving import RestlessBalancer

PLACEMENT = Placement.trivial(2, 4, 2, 2)


class Rank:
    """The lowest of two ranks, whose balancer wants to move at once. Its model and its mover do nothing."""

    def __init__(self, balancer: RestlessBalancer | None = None, mode: str = "dynamic") -> None:
        self.balancer = balancer or RestlessBalancer(PLACEMENT, num_rounds=5)
        self.served = SimpleNamespace(placement=PLACEMENT, replica_map=SimpleNamespace(time=None))
        self.recovery = SimpleNamespace(members=[0, 1], regrouped=0, waits=False, reload_lost_experts=lambda plan: None)
        self.closed: list[str] = []
        self.sent: list[Any] = []
        self.balancing = Balancing(
            rank=0,
            launch_id=0,
            served=cast(Any, self.served),
            recovery=cast(Any, self.recovery),
            mode=cast(Any, mode),
            mover=cast(
                Any,
                SimpleNamespace(
                    staged=0,
                    cancel=lambda: None,
                    advance=lambda step_s: None,
                    close=lambda: self.closed.append("mover"),
                ),
            ),
            split_choice=SplitChoice("even", has_replicas=True),
            make_balancer=self._make_balancer,
            send=self.sent.append,
            on_event=lambda name, step, **fields: None,
        )

    def _make_balancer(self, step: int, reports: BalanceReports) -> Any:
        self.balancer.reports = reports
        return self.balancer

    def run(self, number: int, **facts: Any) -> BalanceReport | None:
        """Runs a step, and returns what the rank reports after it."""
        num_sent = len(self.sent)
        plan = step(step=number, **facts)
        self.balancing.begin_step(plan)
        self.balancing.end_step(plan, 0.01)
        reports = self.sent[num_sent:]
        assert len(reports) <= 1
        return reports[0] if reports else None

    def answer(self, command: Rebalance | SetPlacement) -> tuple[bool, str]:
        self.balancing.command(command, 1)
        answer = self.sent[-1]
        assert isinstance(answer, Answer)
        return answer.ok, answer.text


def step(**facts: Any) -> StepPlan:
    wanted: dict[str, Any] = {
        "step": 3, "phase": "decode", "max_tokens": 1, "num_chunks": 1, "overlap": False, "hold_prefill": False,
        "close_window": False, "sleep": False, "stop": False,
    }  # fmt: skip
    return StepPlan(**(wanted | facts))


def test_a_round_that_was_announced_before_a_rank_was_lost_is_not_announced_to_the_new_group() -> None:
    rank = Rank()
    assert rank.balancing.announce() == 1
    rank.recovery.regrouped = 1  # the step was void before the round was told
    assert rank.balancing.announce() == 0, "the leader does not know yet which ranks are left"
    rank.recovery.regrouped = 0
    rank.balancing.begin_step(step(regrouped=True))
    assert len(rank.balancer.groups) == 1
    assert rank.balancing.announce() == 1


def test_nobody_leads_while_ranks_wait_for_a_lost_one_without_which_experts_lack() -> None:
    rank = Rank()
    rank.recovery.waits = True
    rank.balancing.begin_step(step(regrouped=True))
    assert not rank.balancing.leads
    rank.recovery.waits = False
    rank.balancing.begin_step(step(regrouped=True))
    assert rank.balancing.leads


def test_in_mode_static_the_leader_reports_the_load_and_refuses_to_move() -> None:
    rank = Rank(mode="static")
    first = rank.run(0)
    assert first is not None
    assert (first.state, first.placement) == ("watching", PLACEMENT.physical_to_logical.tolist())
    assert rank.run(1) is None
    load = np.array([[50, 50, 1, 1], [10, 10, 10, 10]])
    rank.balancing.window_closed(LoadRecord(0, 20, "mixed", load))
    second = rank.run(2)
    assert second is not None
    assert second.window is not None
    assert (second.placement, second.totals) == (None, {"num_windows": 1})
    rank.balancing.window_closed(LoadRecord(20, 20, "mixed", 0 * load))
    third = rank.run(3)
    assert third is not None
    assert third.window is None, "nobody asked for anything: that is no balance"
    rank.served.placement, _ = PLACEMENT.without_ranks([1])
    regrouped = rank.run(4, regrouped=True)
    assert regrouped is not None
    assert regrouped.placement is not None
    assert not rank.balancing.has_work
    for command in (Rebalance(1), SetPlacement(2, [])):
        ok, text = rank.answer(command)
        assert not ok
        assert "start the server with eplb.mode: dynamic" in text


class Mistaken(RestlessBalancer):
    """Divides by zero at each poll, and refuses every placement."""

    reports: BalanceReports
    closed = False

    def poll(self, step: int) -> None:
        if step > 4:
            raise ZeroDivisionError("nothing by nothing")

    def report(self, step: int) -> BalanceReport | None:
        return self.reports.make(step, "moving", PLACEMENT)

    def set_placement(self, step: int, table: list[list[int]]) -> str:
        raise PlacementError("it does not fit")

    def close(self) -> None:
        self.closed = True


def test_a_mistake_raises_an_alarm_once_and_nothing_else_moves() -> None:
    rank = Rank(mistaken := Mistaken(PLACEMENT, 5))
    assert rank.balancing.announce() == 1
    assert rank.run(2) is not None
    assert rank.run(3) is None
    report = rank.run(4)
    assert mistaken.closed
    assert report is not None
    assert (report.state, report.step) == ("off", 5)
    assert "ZeroDivisionError: nothing by nothing" in report.alarm
    assert rank.run(5) is None
    assert not rank.balancing.has_work
    assert rank.balancing.announce() == 0
    rank.balancing.begin_step(step(regrouped=True))
    ok, text = rank.answer(Rebalance(1))
    assert not ok
    assert "the balancer has failed" in text
    assert "restart the server" in text
    rank.balancing.close()
    assert rank.closed == ["mover"]


def test_a_placement_error_outside_of_commands_is_a_mistake_too() -> None:
    class Confused(RestlessBalancer):
        def group_changed(self, step: int, placement: Placement) -> None:
            raise PlacementError("version 3 was activated but version 2 is running")

    rank = Rank(Confused(PLACEMENT, 5))
    report = rank.run(6, regrouped=True)
    assert report is not None
    assert "version 2 is running" in report.alarm


def test_where_experts_are_is_told_after_the_end_too_and_totals_stay() -> None:
    rank = Rank(mistaken := Mistaken(PLACEMENT, 5))
    mistaken.reports.totals["num_rounds"] = 3.0
    assert rank.run(2) is not None
    assert rank.run(4) is not None
    assert rank.run(5) is None
    rank.served.placement = replace(PLACEMENT, version=1)  # the round that all ranks were told before goes live
    report = rank.run(6)
    assert report is not None
    assert (report.placement_version, report.totals) == (1, {"num_rounds": 3.0})
    assert report.placement is not None


def test_a_refused_command_is_no_mistake() -> None:
    rank = Rank(Mistaken(PLACEMENT, 5))
    assert rank.answer(SetPlacement(1, [[0]])) == (False, "it does not fit")
    assert rank.answer(Rebalance(2)) == (True, "it never rests")
    assert rank.balancing.has_work
