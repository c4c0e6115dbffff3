"""The leader's balancer in mode dynamic: it feeds a `Rebalancer` with the engine's events, and never waits.

    window_closed ──> Rebalancer ──> planner process ──> poll ──> Rebalancer ──> next_round, which all ranks are told
    activated, cancelled, group_changed, rebalance_now, set_placement ──> Rebalancer

Every event that the rebalancer sees goes to the trace as well, in the same order as the records, so that a replay can
repeat it. A state that lasts too long raises an alarm and ends the balancing, not the serving.

`BalanceReports` tells the front end about the load, the placement and the balancer. Its running totals: num_windows,
num_plans, num_failures (plans and moves); num_rounds, num_experts_moved, num_bytes_moved; plan_seconds, move_seconds,
pause_seconds and, of each, longest_…; predicted_gain_seconds and realised_gain_seconds of moves, over the windows in
which their gain was measured.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from moe_serve.engine.protocol.messages import BalanceReport, DecisionReport, WindowReport
from moe_serve.eplb.load import LoadRecord, balancedness, rank_load, rank_traffic
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planner_process import PlanAnswer, PlannerProcess, PlanProblem
from moe_serve.eplb.rebalance.events import (
    REQUESTED,
    STARTED,
    Decision,
    Event,
    GroupChanged,
    MigrationFailed,
    PlaceAt,
    PlanFailed,
    PlanNow,
    PlanReady,
    RequestPlan,
    RoundActivated,
    StartRound,
    SwitchOff,
    WindowClosed,
    fields_of,
    placement_fields,
)
from moe_serve.eplb.rebalance.rebalancer import make_rebalancer
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts

OnEvent = Callable[..., None]  # (name, step, **fields), as `TraceWriter.event`
GRACE_S = 10.0  # beyond the deadline of a plan or a round, before the balancer raises an alarm
# A longer pause of the engine counts only as much: a stop of the ranks is no fault of a plan or a move.
LONGEST_TURN_S = 1.0


class BalanceReports:
    """Makes the reports of one leader: one for each change, with the changes alone.

    mode:     eplb.mode;  wall_s: seconds since the epoch
    totals:   running totals by name
    has_news: something else than the placement has changed since the last report
    """

    def __init__(self, rank: int, launch_id: int, mode: str, wall_s: Callable[[], float] = time.time):
        self._rank = rank
        self._launch_id = launch_id
        self._mode = mode
        self._wall_s = wall_s
        self.totals: dict[str, float] = defaultdict(float)
        self.has_news = True
        self._window: WindowReport | None = None
        self._placement: Placement | None = None  # of the last report

    def window_closed(self, record: LoadRecord, placement: Placement) -> None:
        """Takes the newest window for the next report; one without tokens says nothing, and is not reported.

        placement: where experts are now
        """
        self.totals["num_windows"] += 1
        self.has_news = True
        if record.tokens.any():
            self._window = window_report(record, placement)

    def count_seconds(self, name: str, seconds: float) -> None:
        """Adds to a total of seconds, and keeps the longest of them."""
        self.totals[name] += seconds
        self.totals[f"longest_{name}"] = max(self.totals[f"longest_{name}"], seconds)

    def make(
        self, step: int, state: str, placement: Placement, decisions: Sequence[Decision] = (), alarm: str = ""
    ) -> BalanceReport | None:
        """Returns a report of the changes since the last one; None: there are none. decisions: since then"""
        is_new = placement is not self._placement
        if not self.has_news and not is_new:
            return None
        self.has_news = False
        for decision in decisions:
            self._count(decision)
        window, self._window, self._placement = self._window, None, placement
        at_s = self._wall_s()
        return BalanceReport(
            rank=self._rank,
            launch_id=self._launch_id,
            step=step,
            mode=self._mode,
            state=state,
            placement_version=placement.version,
            totals=dict(self.totals),
            alarm=alarm,
            window=window,
            decisions=[
                DecisionReport(at_s, d.step, d.kind, d.reason, len(d.layer_rows), d.gain_s, d.cost_s, d.realised_s)
                for d in decisions
            ],
            placement=placement.physical_to_logical.tolist() if is_new else None,
        )

    def _count(self, decision: Decision) -> None:
        match decision.kind:
            case "failed":
                self.totals["num_failures"] += 1
            case "plan":
                self.totals["num_plans"] += 1
            case "watch":
                self.totals["predicted_gain_seconds"] += decision.gain_s
                self.totals["realised_gain_seconds"] += decision.realised_s


MAX_TRAFFIC_RANKS = 64  # of more, a report has no traffic: the engine waits for it, and nobody reads so large a table


def window_report(record: LoadRecord, placement: Placement) -> WindowReport:
    """Returns the load of a window, shared evenly over replicas.

    placement: at its end; also at its beginning, unless the record knows that one
    """
    first = record.placement or placement
    by_source = record.by_source if first.num_ranks <= MAX_TRAFFIC_RANKS else None
    load, load_at_end = rank_load(record.tokens, first), rank_load(record.tokens, placement)
    return WindowReport(
        first_step=record.first_step,
        num_steps=record.num_steps,
        phase=record.phase,
        step_time_s=record.step_time_s or 0.0,
        balancedness=balancedness(load, first.live_ranks).tolist(),
        rank_load=load.tolist(),
        tokens=record.tokens.tolist(),
        mean_at_end=float(balancedness(load_at_end, placement.live_ranks).mean()),
        traffic=[] if by_source is None else rank_traffic(by_source, first).tolist(),
    )


class Balancer:
    """Decides where experts should live, on the rank that leads.

    placement: in use now, at `step`
    planner:   makes the plans; closed by `close`
    reports:   told what happened, for the front end
    on_event:  called with every event, for the trace
    """

    def __init__(
        self,
        placement: Placement,
        settings: BalancerSettings,
        facts: SystemFacts,
        planner: PlannerProcess,
        reports: BalanceReports,
        on_event: OnEvent = lambda name, step, **fields: None,
        now: Callable[[], float] = time.monotonic,
        step: int = 0,
    ):
        self._settings = settings
        self.rebalancer = make_rebalancer(placement, settings, facts)
        self.planner = planner
        self._reports = reports
        self._on_event = on_event
        self._now = now
        self._round: StartRound | None = None  # to be broadcast, or being carried out
        self._is_told = False
        self._asked: int | None = None  # request that the planner works on
        self._waited_s = 0.0  # in this state, with this round
        self._polled_s: float | None = None
        self._num_reported = 0  # decisions
        self._has_load = False
        on_event(STARTED, step, num_ranks=placement.num_ranks, **placement_fields(placement), **facts.to_event())

    @property
    def placement(self) -> Placement:
        """The placement in use; a round counts once it is active."""
        return self.rebalancer.placement

    @property
    def alarm(self) -> str:
        """The reason for which the balancer has switched itself off; "" = it has not."""
        return self.rebalancer.journal.alarm

    @property
    def has_work(self) -> bool:
        """Whether steps must go on: a round is to be broadcast, or the rest of a request to be sent to the planner."""
        return self.next_round() is not None or self.planner.has_more_to_send

    def window_closed(self, record: LoadRecord, step: int) -> None:
        """Takes a final load record, after it was written to the trace. step: the first one after it"""
        if not self._has_load:
            self._has_load = True
            self.planner.start()  # load comes in, so a plan will be asked for
        self._handle(WindowClosed(step, record))

    def poll(self, step: int) -> None:
        """Takes the planner's answer, and watches the deadlines. Called once per turn of the engine's loop."""
        answer = self.planner.poll()
        if answer is not None and answer.request_id == self._asked:
            self._answered(step, answer)
        if self.rebalancer.state in ("watching", "off"):
            self._polled_s = None
            return
        now_s = self._now()
        if self._polled_s is not None:
            self._waited_s += min(now_s - self._polled_s, LONGEST_TURN_S)
        self._polled_s = now_s
        moving = self._round is not None
        limit_s = GRACE_S + (self._settings.move_deadline_s if moving else self._settings.plan_deadline_s)
        if self._waited_s > limit_s and not self.alarm:
            what = (
                "a round of moves is neither live nor given up" if moving else "there is neither a plan nor a refusal"
            )
            self._handle(SwitchOff(step, f"{what} after {self._waited_s:.0f} s"))
            if self.next_round() is not None:
                self.cancelled(step, "the ranks were never told of it")

    def next_round(self) -> StartRound | None:
        """Returns the round that the leader is to broadcast; the same one until `round_sent`."""
        return None if self._is_told else self._round

    def round_sent(self, version: int) -> None:
        """Notes that all ranks know the round."""
        assert self.next_round() is not None, f"round {version} was told, but none was to be told"
        self._is_told = True

    def activated(self, step: int, version: int, num_bytes: int, move_s: float, pause_s: float = 0.0) -> None:
        """Takes the end of a round: its experts serve from this step on.

        num_bytes: that ranks received;  move_s: from `round_sent` on;  pause_s: in which serving stood still
        """
        finished, self._round = self._round, None
        reports = self._reports
        if finished is not None:
            reports.totals["num_experts_moved"] += sum(move.src_slot >= 0 for move in finished.round.moves)
        reports.totals["num_rounds"] += 1
        reports.totals["num_bytes_moved"] += num_bytes
        reports.count_seconds("move_seconds", move_s)
        reports.count_seconds("pause_seconds", pause_s)
        self._handle(RoundActivated(step, version, move_s, pause_s))

    def cancelled(self, step: int, reason: str) -> None:
        """Takes the end of a round without effect."""
        self._round = None
        self._handle(MigrationFailed(step, reason))

    def group_changed(self, step: int, placement: Placement) -> None:
        """Begins anew: ranks were lost or have rejoined. placement: of those that take part"""
        self._round = self._asked = None
        self._handle(GroupChanged(step, placement))

    def rebalance_now(self, step: int) -> str:
        """Asks for a plan at once. Returns the next action, in words. Raises PlacementError if none can be made."""
        self._handle(PlanNow(step))
        return "a plan of all layers is being made; experts move if that pays"

    def set_placement(self, step: int, table: list[list[int]]) -> str:
        """Moves experts to these slots at any cost. Returns the next action, in words.

        Raises PlacementError, saying why, when that cannot be done.
        """
        self._handle(PlaceAt(step, table))
        return f"{self.rebalancer.decisions[-1].reason}; the placement in use is version {self.placement.version}"

    def report(self, step: int) -> BalanceReport | None:
        """Returns a report of the changes since the last one; None: there are none."""
        rebalancer = self.rebalancer
        decisions, self._num_reported = rebalancer.journal.since(self._num_reported)
        return self._reports.make(step, rebalancer.state, rebalancer.placement, decisions, self.alarm)

    def close(self) -> None:
        """Ends the planner."""
        self.planner.close()

    def _answered(self, step: int, answer: PlanAnswer | PlanProblem) -> None:
        self._asked = None
        match answer:
            case PlanAnswer():
                self._reports.count_seconds("plan_seconds", answer.plan.elapsed_s)
                self._handle(PlanReady(step, answer.request_id, answer.plan, answer.migration))
            case PlanProblem():
                self._handle(PlanFailed(step, answer.request_id, answer.reason))

    def _handle(self, event: Event) -> None:
        """Hands an event to the rebalancer, writes it to the trace, and carries out the rebalancer's actions."""
        actions = self.rebalancer.handle(event)
        self._reports.has_news = True
        if not isinstance(event, WindowClosed):
            name, fields = fields_of(event)
            self._on_event(name, event.step, **fields)
        for action in actions:
            self._waited_s, self._polled_s = 0.0, None
            match action:
                case RequestPlan():
                    self._asked = action.request_id
                    self.planner.submit(action.request_id, action.request, action.limits, action.relabel)
                    self._on_event(REQUESTED, action.step, request_id=action.request_id, layers=len(action.layer_rows))
                case StartRound():
                    self._round, self._is_told = action, False
