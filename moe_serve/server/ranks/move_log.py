"""The moves of experts, and what each has brought: balancedness and step time before and after it. Torch-free.

The leader reports decisions, windows and running totals; a move is put together from these. Pure state.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

NUM_MOVES = 50
TRIAL_WINDOWS = 4  # a move is judged by the mean of so many windows after it


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
    """A change of the placement, from the decision until its last round is live, and what it brought.

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
        """What moved and what it brought, in words."""
        text = f"{_count(self.num_experts, 'expert')} moved in {_count(self.num_rounds, 'round')}"
        if self.failed is not None:
            return f"given up after {text}: {self.failed}"
        if self.before is not None and self.after is not None:
            text += f", balancedness {self.before:.2f} -> {self.after:.2f}"
        return text


class MoveLog:
    """The newest moves, oldest first; the last one may be under way."""

    def __init__(self) -> None:
        self._moves: deque[Move] = deque(maxlen=NUM_MOVES)
        self._at_start: Mapping[str, float] = {}
        self._num_after = 0  # windows on which the last move was judged

    def __iter__(self) -> Iterator[Move]:
        return iter(self._moves)

    @property
    def running(self) -> Move | None:
        """The move that is under way; None: there is none."""
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
        """Notes what has moved so far."""
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
        """Notes that the last round of the move under way is live."""
        if self.running is not None:
            self._moves[-1] = replace(self._moves[-1], ended_s=at_s, ended_step=step)
            self._num_after = 0

    def give_up(self, at_s: float, step: int, reason: str) -> None:
        """Notes that the move under way, if there is one, was given up."""
        if self.running is not None:
            self._moves[-1] = replace(self._moves[-1], ended_s=at_s, ended_step=step, failed=reason)

    def stop_trial(self) -> None:
        """The ranks were restarted: later windows say nothing about moves before that."""
        self._num_after = TRIAL_WINDOWS

    def judge(self, points: Sequence[WindowPoint]) -> Move | None:
        """Measures the last move by this launch's windows that ended after it. Returns it when it is judged first.

        The first of them is usually the one in which it moved, by which the balancer judges it, too.
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
