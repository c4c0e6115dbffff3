"""The balancer as the front end knows it from the leader's reports, for status, metrics and dashboard.

All of it outlives a change of the leader and a restart of the ranks; totals go on from their last values. The leader
reports decisions, windows and running totals. `MoveLog` derives each move from them, with the balancedness and step
time before and after it. Every list is bounded. Pure state: time is an argument (wall clock).
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

from moe_serve.engine.protocol.messages import BalanceReport, DecisionReport, WindowReport
from moe_serve.log import get_logger

log = get_logger(__name__)


NUM_MOVES = 50
TRIAL_WINDOWS = 4  # a move is judged by the mean of this many windows after it


@dataclass(frozen=True)
class WindowPoint:
    """A window as a point of a curve. at_s: when it was reported

    lowest, middle, mean: balancedness over layers (0..1);  mean_at_end: on the placement at its end
    """

    at_s: float
    launch_id: int  # start of the ranks; steps count within one
    first_step: int
    num_steps: int
    phase: str
    step_time_s: float
    lowest: float
    middle: float
    mean: float
    mean_at_end: float

    @property
    def end_step(self) -> int:
        """The first step after the window."""
        return self.first_step + self.num_steps


@dataclass(frozen=True)
class Event:
    """Something on the timeline: a decision of the balancer (kinds of rebalance/events.py), "alarm" or "leader".

    gain_s, cost_s: predicted seconds over the horizon; 0 where nothing was predicted. Of "watch": what the last move
                had promised for the windows in which it was measured
    realised_s: of "watch": what the last move has gained in them
    """

    at_s: float
    step: int
    kind: str
    text: str
    num_layers: int = 0
    gain_s: float = 0.0
    cost_s: float = 0.0
    realised_s: float = 0.0


@dataclass(frozen=True)
class Move:
    """A change of the placement, from the decision until its last round is live, and its effect.

    decision:      why, with the predicted gain and cost
    version:       of the placement: before the move, then of the newest round that is live
    num_experts, num_rounds, num_bytes: what has moved so far
    ended_s:       when it was live or given up; None: under way
    failed:        why it was given up; None: it was not
    before, after: mean balancedness of the last window before it, and of the load of the windows that ended after it on
                the placement that it has made; None: there is none yet
    step_before_s, step_after_s: mean time of a step in the window before it, and in those that began after it
    """

    decision: Event
    version: int
    num_experts: int = 0
    num_rounds: int = 0
    num_bytes: int = 0
    ended_s: float | None = None
    ended_step: int = 0
    failed: str | None = None
    before: float | None = None
    after: float | None = None
    step_before_s: float | None = None
    step_after_s: float | None = None

    @property
    def summary(self) -> str:
        """Says in words what moved and with what effect."""
        text = f"{_count(self.num_experts, 'expert')} moved in {_count(self.num_rounds, 'round')}"
        if self.failed is not None:
            return f"given up after {text}: {self.failed}"
        if self.before is not None and self.after is not None:
            text += f", balancedness {self.before:.2f} -> {self.after:.2f}"
        return text


class MoveLog:
    """The newest moves, oldest first. The last one may still be running."""

    def __init__(self) -> None:
        self._moves: deque[Move] = deque(maxlen=NUM_MOVES)
        self._at_start: Mapping[str, float] = {}
        self._num_after = 0  # windows on which the last move was judged

    def __iter__(self) -> Iterator[Move]:
        return iter(self._moves)

    @property
    def running(self) -> Move | None:
        """The running move; None: there is none."""
        return self._moves[-1] if self._moves and self._moves[-1].ended_s is None else None

    @property
    def last_done(self) -> Move | None:
        """The newest move that is live."""
        return next((move for move in reversed(self._moves) if move.ended_s is not None and not move.failed), None)

    def begin(self, decision: Event, version: int, totals: Mapping[str, float], points: Sequence[WindowPoint]) -> None:
        """Notes the decision to move. totals: before anything moved;  points: this launch's windows"""
        self.give_up(decision.at_s, decision.step, "another move began")
        before = [point for point in points if point.end_step <= decision.step][
            -1:
        ]  # of an earlier one the load may differ
        self._at_start = totals
        self._moves.append(Move(decision, version, before=_balance(before), step_before_s=_step_time(before)))

    def grow(self, version: int, totals: Mapping[str, float]) -> None:
        """Notes how much has moved so far."""
        if self.running is None:
            return
        experts, rounds, num_bytes = (
            int(totals.get(name, 0) - self._at_start.get(name, 0))
            for name in ("num_experts_moved", "num_rounds", "num_bytes_moved")
        )
        self._moves[-1] = replace(
            self._moves[-1], version=version, num_experts=experts, num_rounds=rounds, num_bytes=num_bytes
        )

    def end(self, at_s: float, step: int) -> None:
        """Notes that the last round of the running move is live."""
        if self.running is not None:
            self._moves[-1] = replace(self._moves[-1], ended_s=at_s, ended_step=step)
            self._num_after = 0

    def give_up(self, at_s: float, step: int, reason: str) -> None:
        """Notes that the running move, if there is one, was given up."""
        if self.running is not None:
            self._moves[-1] = replace(self._moves[-1], ended_s=at_s, ended_step=step, failed=reason)

    def stop_trial(self) -> None:
        """Ends the trial of the last move, since windows after a restart say nothing about it."""
        self._num_after = TRIAL_WINDOWS

    def judge(self, points: Sequence[WindowPoint]) -> Move | None:
        """Measures the last move by this launch's windows that ended after it. Returns it at its first judgement.

        The first of these windows usually is the one in which it moved; the balancer judges by it as well.
        """
        if not self._moves or self._moves[-1].ended_s is None or self._moves[-1].failed is not None:
            return None
        ended_step = self._moves[-1].ended_step
        after = [point for point in points if point.end_step > ended_step][:TRIAL_WINDOWS]
        if len(after) <= self._num_after:
            return None
        first, self._num_after = self._num_after == 0, len(after)
        self._moves[-1] = replace(
            self._moves[-1],
            after=fmean(point.mean_at_end for point in after),
            step_after_s=_step_time([point for point in after if point.first_step >= ended_step]),
        )
        return self._moves[-1] if first else None


def _balance(points: Sequence[WindowPoint]) -> float | None:
    return fmean(point.mean for point in points) if points else None


def _step_time(points: Sequence[WindowPoint]) -> float | None:
    times = [point.step_time_s for point in points if point.step_time_s > 0]
    return fmean(times) if times else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
    traffic_before: of the newest window before the last move, see `WindowReport`; [] = there is none
    points:      the curve of balancedness, oldest first;  num_windows: how many there were in all
    events:      the timeline, oldest first;  num_events: how many there were in all
    decisions:   how many of each kind there were
    rank_tokens: for each rank, the tokens of all windows and layers
    by_phase:    for each phase, the number of windows and the sum of their mean balancedness
    newest:      for each phase, its newest window and how many there were in all up to it
    heard_s:     when the newest report came;  progress_s: when one last said something new
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
        self.traffic_before: list[list[float]] = []
        self.points: deque[WindowPoint] = deque(maxlen=NUM_POINTS)
        self.num_windows = 0
        self.events: deque[Event] = deque(maxlen=NUM_EVENTS)
        self.num_events = 0
        self.moves = MoveLog()
        self.decisions: Counter[str] = Counter()
        self.last_decision: Event | None = None
        self.rank_tokens: list[float] = []
        self.by_phase: dict[str, tuple[int, float]] = {}
        self.newest: dict[str, tuple[int, WindowReport]] = {}
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
        """Takes a report of the leader, and logs what matters to operators."""
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
        """Follows another rank from now on, whose totals, steps and versions begin anew."""
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
        self.newest[window.phase] = (self.num_windows, window)
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
                self.traffic_before = [] if self.window is None else self.window.traffic
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
