"""Decides whether the exact split, or that by time, pays on this machine: a trial while serving, phase by phase, by
measured step times.

Such a split shortens the work of the most loaded rank and takes time of its own. Which of the two is larger depends
on machine, model, batches and placement. So a trial splits short blocks of steps so and evenly, in turn, and
compares the blocks of each pair. A step is compared with the usual time of steps of its size, and a pair counts by
its sign and rank alone, so that a few slow steps decide nothing.

The leader runs it, and the step plan brings its choice to all ranks, one step later: steps are judged by the plan that
ran. It reads no clock: the same steps and times lead to the same choices.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from moe_serve.engine.step.plan import PHASES, MovePlan, StepPlan
from moe_serve.eplb.split.make import SEARCHED_SPLITS
from moe_serve.log import get_logger

log = get_logger(__name__)

BLOCK_STEPS = 8  # in a row with the same split
JUDGED_AT = (16, 32, 64, 128)  # pairs of blocks: a trial ends with the first clear result, or with the last number
CONFIDENCE = 0.99  # of the interval of one judgement
WARM_UP_STEPS = 64  # of a phase, before a trial and after a change of the placement
RETRY_STEPS = 100_000  # of a phase, from one trial to the next while the placement stays
TRIAL_SHARE = 0.02  # of a phase's steps may run the split that is not in use, and beyond that
TRIAL_ALLOWANCE = (BLOCK_STEPS + 2) * JUDGED_AT[-1]  # steps of a trial where no difference shows
_NO_MOVES = MovePlan()
_KEPT_TIMES = 64  # of each size
_KNOWN_FROM = 8  # times of a size that make its usual time


@dataclass(frozen=True)
class Gain:
    """The time that a split saves, as shares of a step with the even split; negative = it costs time.

    low, high: an interval that holds the true median with CONFIDENCE
    """

    median: float
    low: float
    high: float
    num_pairs: int

    @classmethod
    def of(cls, pairs: list[float]) -> "Gain":
        """Returns the gain of the pairs' log ratios, even over the other."""
        low, high = median_interval(pairs, CONFIDENCE)
        return cls(-math.expm1(-median(pairs)), -math.expm1(-low), -math.expm1(-high), len(pairs))

    def words(self, split: str) -> str:
        """Returns a sentence. split: whose gain it is"""
        times = f"{self.low:+.1%} to {self.high:+.1%}, {self.num_pairs} pairs of {BLOCK_STEPS} steps"
        if self.low > 0:
            return f"the {split} split saves {self.median:.1%} of a step ({times})"
        if self.high < 0:
            return f"the {split} split makes a step {-self.median:.1%} longer (gain {times})"
        return f"the {split} split saves nothing that can be measured (gain {times})"


class SplitChoice:
    """The leader's choice between a searched split and the even one. `observe` it after each step with a forward.

    even_phases: the phases whose next batches are to be split evenly, as bits in the order of PHASES
    """

    def __init__(self, split: str, has_replicas: bool):
        """split: of the configuration; only "exact" and "time" have an alternative

        has_replicas: whether experts can have some
        """
        self._split = split
        self._phases = (
            {phase: _PhaseTrials(phase, split) for phase in PHASES} if split in SEARCHED_SPLITS and has_replicas else {}
        )
        self.even_phases = 0

    def observe(self, plan: StepPlan, step_s: float) -> None:
        """Takes the time of a step, from its exchange to its tokens, and chooses the split of the next ones."""
        phase = self._phases.get(plan.phase)
        if phase is not None:
            does_more = plan.moves != _NO_MOVES or plan.close_window or plan.regrouped
            phase.observe(plan.max_tokens, plan.split_evenly, None if does_more else step_s)
            self._note_wishes()

    def placement_changed(self) -> None:
        """Measures anew, after some steps: earlier times belong to other replicas."""
        for phase in self._phases.values():
            phase.begin_anew()
        self._note_wishes()

    def _note_wishes(self) -> None:
        self.even_phases = sum(phase.wants_even << number for number, phase in enumerate(self._phases.values()))

    def describe(self) -> dict[str, Any]:
        """Returns the split of each phase and the gain over the even one, for /server_info and the status."""
        return {
            "split": self._split,
            "phases": {
                name: {
                    "split": "even" if phase.evenly else self._split,
                    "gain": None if phase.gain is None else vars(phase.gain),
                    "num_steps": phase.num_steps,
                    "num_trial_steps": phase.num_tried,
                }
                for name, phase in self._phases.items()
            },
        }


def median_interval(values: list[float], confidence: float) -> tuple[float, float]:
    """Returns an interval of the true median, between two of the values: whatever their distribution.

    The sign test inverted. With too few values for this confidence, it is the interval from the least to the largest.
    """
    ordered, n, cut = sorted(values), len(values), 0
    beyond = 1 / 2**n  # the chance that at most `cut` values lie below the median; as many may lie above it
    while True:
        beyond += math.comb(n, cut + 1) / 2**n
        if 2 * beyond > 1 - confidence:
            return ordered[cut], ordered[n - 1 - cut]
        cut += 1


@dataclass
class _Pair:
    """Two blocks of steps, one of them split evenly. Each holds (size, seconds) of its steps."""

    even_first: bool
    blocks: dict[bool, list[tuple[int, float]]] = field(default_factory=lambda: {False: [], True: []})

    @property
    def wants_even(self) -> bool:
        """The split of the block that is not full; of the first where both are."""
        return self.even_first == (len(self.blocks[self.even_first]) < BLOCK_STEPS)

    @property
    def is_full(self) -> bool:
        return all(len(block) == BLOCK_STEPS for block in self.blocks.values())


class _PhaseTrials:
    """One phase: the split in use, and the trial that may change it.

    evenly:    whether the split in use is the even one
    gain:      of the last judgement
    num_tried: steps that ran the split which was not in use
    """

    def __init__(self, name: str, split: str):
        """split: the alternative to the even one"""
        self.evenly = False
        self.gain: Gain | None = None
        self.num_steps = self.num_tried = 0
        self._name, self._split = name, split
        self._begin_at = WARM_UP_STEPS
        self._pair: _Pair | None = None
        self._even_first = True
        self._gains: list[float] = []  # of the trial's pairs: log of even over exact
        self._times: dict[int, deque[float]] = {}  # by size, of the latest steps, whatever their split

    @property
    def wants_even(self) -> bool:
        return self.evenly if self._pair is None else self._pair.wants_even

    def observe(self, max_tokens: int, evenly: bool, step_s: float | None) -> None:
        """Takes a step. step_s: None where it did more than a usual step"""
        self.num_steps += 1
        self.num_tried += evenly != self.evenly
        if step_s is not None:
            size = size_class(max_tokens)
            self._times.setdefault(size, deque(maxlen=_KEPT_TIMES)).append(step_s)
            # The steps that were decided before the choice reached the ranks ran the other split.
            if self._pair is not None and evenly == self._pair.wants_even:
                self._pair.blocks[evenly].append((size, step_s))
                if self._pair.is_full:
                    self._end_pair(self._pair)
        if self._pair is None and self.num_steps >= self._begin_at and self._can_afford_pair():
            self._pair = _Pair(self._even_first)
            self._even_first = not self._even_first  # even, exact, exact, even: a drift of the machine cancels out

    def begin_anew(self) -> None:
        self._pair = None
        self._gains.clear()
        self._begin_at = self.num_steps + WARM_UP_STEPS

    def _can_afford_pair(self) -> bool:
        return self.num_tried + BLOCK_STEPS + 1 <= TRIAL_ALLOWANCE + TRIAL_SHARE * self.num_steps

    def _end_pair(self, pair: _Pair) -> None:
        self._pair = None
        exact, even = self._typical(pair.blocks[False]), self._typical(pair.blocks[True])
        if exact is None or even is None:
            return
        self._gains.append(even - exact)
        if len(self._gains) in JUDGED_AT:
            self._judge(Gain.of(self._gains))

    def _typical(self, block: list[tuple[int, float]]) -> float | None:
        """Returns the block's median of log(time / usual time of the size); None where most sizes are not known."""
        known = [(size, step_s) for size, step_s in block if len(self._times[size]) >= _KNOWN_FROM]
        if 2 * len(known) < BLOCK_STEPS:
            return None
        return median(math.log(max(step_s, 1e-9) / max(median(self._times[size]), 1e-9)) for size, step_s in known)

    def _judge(self, gain: Gain) -> None:
        if gain.low <= 0 <= gain.high and gain.num_pairs < JUDGED_AT[-1]:
            return
        is_first, was_even = self.gain is None, self.evenly
        self.gain, self.evenly = gain, gain.low <= 0
        self._gains.clear()
        self._begin_at = self.num_steps + RETRY_STEPS
        if self.evenly != was_even:
            then = "batches are split evenly" if self.evenly else f"the {self._split} split serves"
            log.info("%s: %s: %s from now on", self._name, gain.words(self._split), then)
        elif is_first:
            log.info("%s: %s: it stays in use", self._name, gain.words(self._split))


def size_class(max_tokens: int) -> int:
    """Returns the same number for steps of like size: each of its own up to 8 rows, then four classes an octave."""
    return max_tokens if max_tokens <= 8 else 8 + math.ceil(4 * math.log2(max_tokens / 8))
