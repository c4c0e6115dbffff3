"""What the front end knows of the balancer: built from the leader's reports, for status, metrics and dashboard.

The leader of the ranks may change, and the ranks may be restarted: what is known here lives on, and totals go on from
where they were. Every list is bounded. Pure state: no socket, and time is an argument (wall clock). Torch-free.
"""

import logging
from collections import Counter, deque
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

from moe_serve.engine.protocol.messages import BalanceReport, DecisionReport, WindowReport
from moe_serve.log import get_logger
from moe_serve.server.ranks.move_log import Event, MoveLog, WindowPoint

log = get_logger(__name__)

NUM_POINTS = 720  # windows that are kept as points of a curve
NUM_EVENTS = 300
_LARGEST = "longest_"  # totals of these names are largest values, all others are sums


class BalanceBook:
    """The newest state of the balancer, and its history.

    mode:        as configured until a rank has reported
    version:     of the placement in use, counted within one start of the ranks
    placement:   [layers][slots], -1 = empty slot; None = no rank has reported it yet;  num_placements: how many came
    splits:      how batches of each phase are split, and what the exact split gains there
    window:      the newest closed window
    points:      the curve of balancedness, oldest first;  num_windows: how many there were in all
    events:      the timeline, oldest first;  num_events: how many there were in all
    decisions:   how many of each kind there were
    rank_tokens: for each rank, the tokens of all windows and layers
    by_phase:    for each phase, the number of windows and the sum of their mean balancedness
    heard_s:     when the newest report came;  progress_s: the newest one that told something new
    """

    def __init__(self, mode: str):
        self.mode = mode
        self.state = "off" if mode == "off" else "watching"
        self.alarm = ""
        self.step = 0
        self.leader: tuple[int, int] | None = None  # (launch_id, rank)
        self.version = 0
        self.version_since_s: float | None = None
        self.placement: list[list[int]] | None = None
        self.splits: dict[str, Any] = {}
        self.num_placements = 0
        self.window: WindowReport | None = None
        self.points: deque[WindowPoint] = deque(maxlen=NUM_POINTS)
        self.num_windows = 0
        self.events: deque[Event] = deque(maxlen=NUM_EVENTS)
        self.num_events = 0
        self.moves = MoveLog()
        self.decisions: Counter[str] = Counter()
        self.last_decision: Event | None = None
        self.rank_tokens: list[float] = []
        self.by_phase: dict[str, tuple[int, float]] = {}
        self.heard_s: float | None = None
        self.progress_s: float | None = None
        self._totals: dict[str, float] = {}  # of the leader
        self._earlier: dict[str, float] = {}  # of the leaders before it

    @property
    def totals(self) -> dict[str, float]:
        """The running totals of all leaders so far."""
        joined = dict(self._earlier)
        for name, value in self._totals.items():
            before = joined.get(name, 0.0)
            joined[name] = max(before, value) if name.startswith(_LARGEST) else before + value
        return joined

    def take(self, report: BalanceReport, now_s: float) -> None:
        """Takes a report of the leader, and logs what people want to know."""
        has_news = self.heard_s is None or bool(report.decisions) or report.window is not None
        if self.leader != (report.launch_id, report.rank):
            self._follow(report, now_s)
            has_news = True
        version, totals = self.version, self.totals
        self.heard_s, self.step, self.mode, self.state = now_s, report.step, report.mode, report.state
        self._totals, self.splits = dict(report.totals), report.splits
        if report.placement is not None:
            self.placement = report.placement
            self.num_placements += 1
        if report.placement_version != version or self.version_since_s is None:
            self.version, self.version_since_s = report.placement_version, now_s
            has_news = True
        if report.window is not None:
            self._close_window(report.window, report.launch_id, now_s)
        for decision in report.decisions:
            self._decide(decision, report.launch_id, version, totals)
        self.moves.grow(self.version, self.totals)
        judged = self.moves.judge(self._points_of(report.launch_id))
        if judged is not None and judged.before is not None:
            log.info(
                "balancer: placement %d serves at balancedness %.2f, %.2f before",
                judged.version,
                judged.after,
                judged.before,
            )
        if report.alarm != self.alarm:
            self._change_alarm(report, now_s)
        if has_news:
            self.progress_s = now_s

    def _follow(self, report: BalanceReport, now_s: float) -> None:
        """Takes another rank's reports from now on; its totals, steps and versions begin anew."""
        if self.leader is not None:
            self._earlier, self._totals = self.totals, {}
            restarted = report.launch_id != self.leader[0]
            reason = "the ranks were restarted" if restarted else f"rank {report.rank} leads now"
            self.moves.give_up(now_s, report.step, reason)
            if restarted:
                self.moves.stop_trial()
                self.version_since_s = None
            self._note(Event(now_s, report.step, "leader", reason))
            log.info("balancer: %s", reason)
        self.leader = (report.launch_id, report.rank)

    def _close_window(self, window: WindowReport, launch_id: int, now_s: float) -> None:
        if not window.balancedness:
            return  # a model without MoE layers
        self.window = window
        self.num_windows += 1
        lowest, middle, mean = summary_of(window.balancedness)
        count, total = self.by_phase.get(window.phase, (0, 0.0))
        self.by_phase[window.phase] = (count + 1, total + mean)
        self.points.append(
            WindowPoint(
                now_s,
                launch_id,
                window.first_step,
                window.num_steps,
                window.phase,
                window.step_time_s,
                lowest,
                middle,
                mean,
                window.mean_at_end,
            )
        )
        of_ranks = [sum(loads) for loads in zip(*window.rank_load, strict=False)]
        self.rank_tokens = [old + new for old, new in zip_longest(self.rank_tokens, of_ranks, fillvalue=0.0)]

    def _decide(self, decision: DecisionReport, launch_id: int, version: int, totals: dict[str, float]) -> None:
        """version, totals: before this report"""
        at_s, step, kind, reason = decision.at_s, decision.step, decision.kind, decision.reason
        event = Event(
            at_s, step, kind, reason, decision.num_layers, decision.gain_s, decision.cost_s, decision.realised_s
        )
        self.decisions[kind] += 1
        self.last_decision = event
        self._note(event)
        level = logging.INFO
        match kind:
            case "move" | "manual" | "restore" if decision.num_layers:  # 0: everything is where it should be already
                self.moves.begin(event, version, totals, self._points_of(launch_id))
            case "done" if self.moves.running is not None:
                self.moves.grow(self.version, self.totals)
                reason = f"{reason}: {self.moves.running.summary}"
                self.moves.end(at_s, step)
            case "group":
                self.moves.give_up(at_s, step, "other ranks take part now")
            case "failed":
                self.moves.give_up(at_s, step, reason)
                level = logging.WARNING
        log.log(level, "balancer, step %d: %s", step, reason)

    def _change_alarm(self, report: BalanceReport, now_s: float) -> None:
        self.alarm = report.alarm
        text = report.alarm or "the alarm is over"
        self._note(Event(now_s, report.step, "alarm", text))
        if report.alarm:
            log.error("balancer: %s; serving goes on with placement %d", text, report.placement_version)
        else:
            log.info("balancer: %s", text)

    def _points_of(self, launch_id: int) -> list[WindowPoint]:
        return [point for point in self.points if point.launch_id == launch_id]

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.num_events += 1


def summary_of(balancedness: list[float]) -> tuple[float, float, float]:
    """Returns the lowest, the median and the mean of the layers' balancedness; there is at least one layer."""
    return min(balancedness), median(balancedness), fmean(balancedness)
