"""Keeps a mistake of the balancer from ending the serving: it ends the balancing, and raises an alarm."""

from collections.abc import Callable
from typing import TypeVar

from moe_serve.engine.balancing.balance_reports import BalanceReports
from moe_serve.engine.balancing.leader import Leader
from moe_serve.engine.protocol.balance_messages import BalanceReport
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import StartRound
from moe_serve.errors import PlacementError
from moe_serve.log import get_logger

log = get_logger(__name__)
T = TypeVar("T")


class ContainedLeader(Leader):
    """A leader whose first error ends it. Only the refusal of a command (PlacementError) passes.

    placement: returns where experts are, for the report of the end
    """

    def __init__(self, leader: Leader, reports: BalanceReports, placement: Callable[[], Placement]):
        self._leader: Leader | None = leader
        self._reports, self._placement = reports, placement
        self._alarm = ""
        self._totals: dict[str, float] = {}  # of the last report
        self._reported: Placement | None = None  # since the end

    @property
    def has_work(self) -> bool:
        return self._leader is not None and self._call(lambda leader: leader.has_work, False)

    def window_closed(self, record: LoadRecord, step: int) -> None:
        self._call(lambda leader: leader.window_closed(record, step), None)

    def poll(self, step: int) -> None:
        self._call(lambda leader: leader.poll(step), None)

    def next_round(self) -> StartRound | None:
        return self._call(lambda leader: leader.next_round(), None)

    def round_sent(self, version: int) -> None:
        self._call(lambda leader: leader.round_sent(version), None)

    def activated(self, step: int, version: int, num_bytes: int, move_s: float, pause_s: float) -> None:
        self._call(lambda leader: leader.activated(step, version, num_bytes, move_s, pause_s), None)

    def cancelled(self, step: int, reason: str) -> None:
        self._call(lambda leader: leader.cancelled(step, reason), None)

    def group_changed(self, step: int, placement: Placement) -> None:
        self._call(lambda leader: leader.group_changed(step, placement), None)

    def rebalance_now(self, step: int) -> str:
        return self._command(lambda leader: leader.rebalance_now(step))

    def set_placement(self, step: int, table: list[list[int]]) -> str:
        return self._command(lambda leader: leader.set_placement(step, table))

    def report(self, step: int) -> BalanceReport | None:
        report = self._call(lambda leader: leader.report(step), None)
        if report is not None:
            self._totals = report.totals
        elif self._alarm and self._reported is not self._placement():  # a round may go live after the end
            self._reported = self._placement()
            return self._reports.make(step, "off", self._reported, self._totals, alarm=self._alarm)
        return report

    def close(self) -> None:
        self._call(lambda leader: leader.close(), None)

    def _command(self, act: Callable[[Leader], str]) -> str:
        """Returns what a command does. Raises PlacementError where the leader refuses it, or has ended."""
        refusal: PlacementError | None = None

        def try_to(leader: Leader) -> str:
            nonlocal refusal
            try:
                return act(leader)
            except PlacementError as error:
                refusal = error
                return ""

        text = self._call(try_to, "")
        if refusal is not None:
            raise refusal
        if self._leader is None:
            raise PlacementError(f"{self._alarm}; restart the server to balance again")
        return text

    def _call(self, act: Callable[[Leader], T], otherwise: T) -> T:
        leader = self._leader
        if leader is None:
            return otherwise
        try:
            return act(leader)
        except Exception as error:  # the balancer is not worth a served token: it ends here, and says so
            log.exception("the balancer has failed; serving goes on without it")
            self._leader = None
            self._alarm = f"the balancer has failed ({type(error).__name__}: {error})"
            leader.close()
            return otherwise
