"""Decides when to look for drafts, how many of them to verify, and whether the model's own layer predicts some.

Rows of a MoE model are not free, since each draft reads experts of its own (Cascade, arXiv 2506.20675), nor is looking
for drafts, where a step takes less than a millisecond. So all is weighed by times that were measured here, against
steps without drafts. `DraftGate` is told these times and looks at no clock: what it decides follows from what it was
told, and `Decision` has the numbers of one choice. Numpy only.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MIN_GAIN = 1.1  # of tokens per second: of many lengths the best looks better than it is, by the noise of times
_FRESH_STEPS = 16  # with drafts, for which the time of a step without is taken to be the same
# Between two looks for drafts while none pay: behind a new request, later, and where looks take long.
_LOOK_STEPS, _MOST_LOOK_STEPS, _RAREST_LOOK_STEPS = 3, 31, 255
_LOOK_SHARE = 0.01  # of the time, that looks may take while none pay
_PATIENCE = 8  # looks that find nothing, behind drafts that paid, before steps are left out
_DRAFT_COST = 0.25  # of a draft, before it is known: a share of a step without drafts, divided by its decodes
# Looks at drafts that do not pay, before some are verified to see whether they still do not: at first, and at most.
_EXPLORE_LOOKS, _MOST_EXPLORE_LOOKS = 2, 16
_TRUST_STEPS = 8.0  # as which the first trust in a promise counts
# The layer runs for so many decode steps before it is judged; where it has lost, it rests for so many: at first, later.
_LAYER_STEPS, _REST_STEPS, _MOST_REST_STEPS = 16, 512, 8192


class DecodeStep(NamedTuple):
    """What a step of decodes alone took, in seconds, and yielded.

    num_layer_drafts: of the drafts, those of the model's layer
    num_layer_requests, num_layer_right: requests that began while the layer ran, and its drafts that were right of them
    look_s:  of the time, looking for drafts;  layer_s: running the layer
    """

    num_requests: int
    num_drafts: int
    num_tokens: int
    seconds: float
    look_s: float = 0.0
    layer_s: float = 0.0
    num_layer_drafts: int = 0
    num_layer_requests: int = 0
    num_layer_right: int = 0


class Decision(NamedTuple):
    """A choice of lengths, and what it follows from: lengths = best_lengths of the others.

    Fields as its arguments; lengths: of each request, 0: none are verified
    """

    num_decodes: int
    chances: list[float]
    most: list[int]
    multiples: list[float]
    least_gain: float
    lengths: list[int]


class StepCosts:
    """How long steps with drafts take, as a multiple of steps without: moving averages, and straight lines between.

    A multiple is that of steps near each other in time, so that neither longer contexts nor other work on the machine
    make drafts look cheap or dear. Steps with drafts have the time of looking for them, the others have not.
    """

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}  # steps without drafts, by decodes
        self._num_since: dict[int, int] = {}  # steps with drafts since then
        # By powers of two of decodes and of drafts: averages of drafts and multiple, and how many steps these are of.
        self._seen: dict[int, dict[int, tuple[float, float, int]]] = {}

    def add(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        """Counts a step. One that took far longer than usual has waited for something else, and counts little."""
        plain_s = self._plain_s.get(num_decodes)
        if num_drafts == 0:
            self._plain_s[num_decodes] = seconds if plain_s is None else _moved(plain_s, seconds, 0.25)
            self._num_since[num_decodes] = 0
        elif plain_s is not None:
            self._num_since[num_decodes] += 1
            seen = self._seen.setdefault(num_decodes.bit_length(), {})
            guess = 1 + _DRAFT_COST * num_drafts / num_decodes
            drafts, multiple, num_steps = seen.get(num_drafts.bit_length(), (num_drafts, guess, 1))
            weight = max(0.1, 1 / (num_steps + 1))
            drafts += weight * (num_drafts - drafts)
            seen[num_drafts.bit_length()] = drafts, _moved(multiple, seconds / plain_s, weight), num_steps + 1

    def plain_s(self, num_decodes: int) -> float | None:
        """Returns the time of a step without drafts; None: none was seen."""
        return self._plain_s.get(num_decodes)

    def is_fresh(self, num_decodes: int) -> bool:
        """Returns whether a step without drafts was seen not long ago."""
        return self._num_since.get(num_decodes, _FRESH_STEPS) < _FRESH_STEPS

    def doubt(self, num_decodes: int) -> None:
        """Gives the next step with drafts as much weight as all that were seen before it."""
        seen = self._seen.get(num_decodes.bit_length(), {})
        seen.update({key: (drafts, multiple, 1) for key, (drafts, multiple, _) in seen.items()})

    def of(self, num_decodes: int, num_drafts: int) -> list[float]:
        """Returns the multiples of steps with 0, 1, ... num_drafts drafts.

        Beyond what was seen a draft costs what those before it cost; before any was, little, so that some are tried.
        """
        seen = self._seen.get(num_decodes.bit_length(), {}).values()
        points = sorted((drafts, multiple) for drafts, multiple, _ in seen)
        last, multiple = points[-1] if points else (float(num_decodes), 1 + _DRAFT_COST)
        if num_drafts > last or not points:
            most = max(float(num_drafts), last)
            points.append((most, 1 + max(0.0, multiple - 1) * most / last))
        drafts, multiples = zip((0.0, 1.0), *points, strict=True)
        found: list[float] = np.interp(np.arange(num_drafts + 1), drafts, multiples).tolist()
        return found


def _moved(average: float, value: float, weight: float) -> float:
    """Returns a moving average that a single large value moves little."""
    return average + weight * (min(value, 2 * average) - average)


def best_lengths(
    num_decodes: int,
    chances: Sequence[float],
    most: Sequence[int],
    multiples: Sequence[float],
    least_gain: float = MIN_GAIN,
) -> list[int]:
    """Returns how many drafts of each request to verify, so that a step yields the most tokens per second.

    num_decodes: rows without drafts
    chances:     of the next draft of each request to be right, where those before it are
    most:        drafts that each has
    multiples:   of a step without drafts, how long one takes with 0, 1, ... as many as there is room for
    least_gain:  of tokens per second, below which none are verified
    """
    lengths, best = [0] * len(chances), [0] * len(chances)
    tokens, best_rate = float(num_decodes), least_gain * num_decodes
    gains = [(-chance, index) for index, chance in enumerate(chances) if most[index]]
    heapq.heapify(gains)
    for multiple in multiples[1:]:
        if not gains:
            break
        gain, index = gains[0]
        tokens -= gain
        lengths[index] += 1
        if lengths[index] < most[index]:
            heapq.heapreplace(gains, (gain * chances[index], index))
        else:
            heapq.heappop(gains)
        if tokens / multiple > best_rate:
            best, best_rate = list(lengths), tokens / multiple
    return best


def expected_right(chance: float, num_drafts: int) -> float:
    """Returns how many of some drafts are right on average, where the first wrong one ends them."""
    return float(num_drafts) if chance >= 1 else chance * (1 - chance**num_drafts) / (1 - chance)


@dataclass
class _Trust:
    """Tokens per second that steps gave, over those that were promised: the choice of the best is too hopeful."""

    given: float = _TRUST_STEPS
    promised: float = _TRUST_STEPS

    def add(self, given: float, promised: float) -> None:
        self.given = 0.98 * self.given + given
        self.promised = 0.98 * self.promised + promised

    def fade(self) -> None:
        """Forgets a little, so that what did not pay is tried again some day."""
        self.given += 0.02 * (self.promised - self.given)

    @property
    def least_gain(self) -> float:
        """What must be promised, so that steps give at least MIN_GAIN."""
        return MIN_GAIN * max(1.0, self.promised / self.given)


class DraftGate:
    """The decisions about drafts of one rank.

    Drafts are looked for in each step while they pay. Otherwise some steps look, and see what would have been right;
    the steps between run as without drafts. They are tried again now and then.
    The layer for multi-token prediction runs while the time that its drafts save, of which each is worth a share of a
    step without drafts, exceeds that of its runs and of the rows that verify them.
    """

    def __init__(self, has_layer: bool = False, always: bool = False):
        """has_layer: drafts of the layer are weighed, too;  always: each step looks, for a caller that verifies all"""
        self.costs = StepCosts()
        self.saved_s = 0.0  # by drafts, in steps that have looked for some, as far as the time of one without is known
        self.decision: Decision | None = None  # the newest with drafts to choose from
        self.layer_runs = has_layer
        self._has_layer = has_layer
        self._always = always
        self._trust: dict[int, _Trust] = {}  # by powers of two of decodes
        self._promised = 1.0  # by the newest look: tokens per second over those without drafts
        self._multiple = 1.0  # of the time of a step without, that it expects
        self.measures = True  # whether the time of this step matters
        self._steps_to_look = 0  # as long as that many are left
        self._look_steps = self._first_steps = _LOOK_STEPS
        self._look_share = 0.0  # of a look, of a step without
        self._num_empty = _PATIENCE  # looks in a row that have found none, since drafts paid
        self._num_looks = 0  # in a row, at drafts that do not pay
        self._explore_looks = _EXPLORE_LOOKS
        self._layer_gain = 0.0  # of this trial, in steps without drafts
        self._layer_steps = 0  # of this trial
        self._layer_rest = 0  # steps, once the layer has lost
        self._rest_steps = _REST_STEPS

    @property
    def pays(self) -> bool:
        """Whether drafts pay, as far as is known."""
        return self._look_steps == 0

    def is_due(self, has_new: bool) -> bool:
        """Returns whether to look for drafts in this step. Called once for each step that decodes.

        has_new: a request is among the decodes that was not in the step before. Where none of those before had drafts
        that paid, it is looked at later.
        """
        if has_new and not self.pays:
            self._look_steps = self._first_steps
            self._steps_to_look = min(self._steps_to_look, self._first_steps)
            self._first_steps = min(2 * self._first_steps + 1, self._most_look_steps)
        self._steps_to_look -= 1
        self._layer_rest -= 1
        each = self.layer_runs or self._always
        self.measures = self._steps_to_look <= _LOOK_STEPS or each
        return self._steps_to_look < 0 or each

    def lengths(self, num_decodes: int, chances: Sequence[float], most: Sequence[int], num_rows: int) -> list[int]:
        """Returns how many of the drafts that were found to verify. Arguments as of `best_lengths`; num_rows: of drafts

        Where they would pay if they cost half as much, they are verified now and then, so that their cost is measured
        anew; and steps that verify are now and then followed by one that does not, for the same reason.
        """
        none = [0] * len(most)
        self._promised = self._multiple = 1.0
        if not self.costs.is_fresh(num_decodes):
            self._steps_to_look = 0
            return none
        if not any(most) and self._num_empty < _PATIENCE:
            self._num_empty += 1
            self._steps_to_look = 0
            return none
        self._look_steps = self._steps_to_look = min(2 * self._look_steps + 1, self._most_look_steps)
        if not any(most):
            return none
        multiples = self.costs.of(num_decodes, min(num_rows, sum(most)))
        trust = self._trust.setdefault(num_decodes.bit_length(), _Trust())
        lengths = best_lengths(num_decodes, chances, most, multiples, trust.least_gain)
        self.decision = Decision(num_decodes, list(chances), list(most), multiples, trust.least_gain, lengths)
        if any(lengths):
            right = sum(expected_right(chance, length) for chance, length in zip(chances, lengths, strict=True))
            self._multiple = multiples[sum(lengths)]
            self._promised = (1 + right / num_decodes) / self._multiple
            self._num_looks, self._explore_looks, self._first_steps = 0, _EXPLORE_LOOKS, _LOOK_STEPS
            self._look_steps = self._steps_to_look = self._num_empty = 0
            return lengths
        trust.fade()
        self._num_looks += 1
        if self._num_looks < self._explore_looks:
            return none
        self._num_looks, self._explore_looks = 0, min(2 * self._explore_looks, _MOST_EXPLORE_LOOKS)
        self.costs.doubt(num_decodes)
        return best_lengths(num_decodes, chances, most, [(1 + multiple) / 2 for multiple in multiples])

    def ended(self, step: DecodeStep) -> None:
        """Learns what a step took and yielded. Called for steps of decodes alone, where `measures`."""
        num, plain_s = step.num_requests, self.costs.plain_s(step.num_requests)
        seconds = step.seconds - step.layer_s
        self.costs.add(num, step.num_drafts, seconds if step.num_drafts else seconds - step.look_s)
        if plain_s is None:
            return
        # A step that took much longer than expected has waited for something else.
        if (step.look_s or step.num_drafts) and (self._always or seconds < 2 * plain_s * self._multiple):
            self.saved_s += step.num_tokens / num * plain_s - step.seconds
            if self.pays:
                trust = self._trust.setdefault(num.bit_length(), _Trust())
                trust.add(step.num_tokens / num * plain_s / seconds, self._promised)
            self._look_share += 0.25 * (min(step.look_s / plain_s, 1.0) - self._look_share)
        if self._has_layer:
            self._judge_layer(step, plain_s)

    @property
    def _most_look_steps(self) -> int:
        """Steps between two looks while drafts do not pay, at most."""
        return min(max(_MOST_LOOK_STEPS, int(self._look_share / _LOOK_SHARE)), _RAREST_LOOK_STEPS)

    def wants_layer(self, has_prompt: bool) -> bool:
        """Returns whether the layer should run in this step. It begins again with a prompt, whose rows it needs.

        has_prompt: the step begins one; going on with one is not enough
        """
        if not self.layer_runs and has_prompt and self._has_layer and self._layer_rest <= 0:
            self.layer_runs, self._layer_gain, self._layer_steps = True, 0.0, 0
        return self.layer_runs

    def _judge_layer(self, step: DecodeStep, plain_s: float) -> None:
        """Counts what the layer has given and taken in a step, and ends its runs where they do not pay.

        Requests that began before it ran have none of its keys. What it gives is counted as if all were like those that
        have them; where none has, it gives nothing.
        """
        if not self.layer_runs:
            return
        cost = step.layer_s / plain_s
        if step.num_drafts:
            of_rows = max(0.0, (step.seconds - step.layer_s) / plain_s - 1)
            cost += of_rows * step.num_layer_drafts / step.num_drafts
        self._layer_gain += step.num_layer_right / max(1, step.num_layer_requests) - min(cost, 2.0)
        self._layer_steps += 1
        if self._layer_steps < _LAYER_STEPS:
            return
        if self._layer_gain < 0:
            self.layer_runs, self._layer_rest = False, self._rest_steps
            self._rest_steps = min(2 * self._rest_steps, _MOST_REST_STEPS)
        else:
            self._rest_steps = _REST_STEPS
        self._layer_gain, self._layer_steps = 0.0, 0
