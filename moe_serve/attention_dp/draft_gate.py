"""Decides when to look for drafts, how many of them to verify, and whether the model's own layer predicts some.

Rows of a MoE model are not free, since each draft reads experts of its own (Cascade, arXiv 2506.20675), nor is looking
for drafts, where a step takes less than a millisecond. So all is weighed by times that were measured here, against
steps without drafts; and whatever these say, what is spent and lost comes out of budgets, each a share of the time of
the decode steps so far. `DraftGate` is told times and looks at no clock: what it decides follows from what it was told,
and `Decision` has the numbers of one choice. Plain Python: a step may have one draft, and take a quarter of a
millisecond.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

MIN_GAIN = 1.1  # of tokens per second: of many lengths the best looks better than it is, by the noise of times
_FRESH_STEPS = 32  # with drafts, for which the time of a step without is taken to be the same
_PATIENCE = 8  # looks without drafts to verify, behind drafts that paid, before steps are left out
_DRAFT_COST = 0.25  # of a draft, before it is known: a share of a step without drafts, divided by its decodes
_TRUST_STEPS = 8.0  # as which the first trust in a promise counts
# Shares of the time of decode steps: for looks while no drafts pay; that drafts may lose; that the layer may lose.
_LOOK_SHARE, _LOSS_SHARE, _LAYER_SHARE = 0.006, 0.004, 0.004
# Steps without drafts, of which the time is lent at first; and may be saved for later, by drafts that paid, so that a
# few steps that waited for something else do not end them.
_LENT_LOOKS, _LENT_LOSS, _LENT_LAYER_LOSS, _MOST_LOSS = 3.0, 4.0, 8.0, 12.0
_TRIAL = 2.0  # steps without drafts, of which the time is to be saved before drafts are tried again that have lost
_LONGEST_LOOK = 4.0  # steps without drafts, as reading long prompts may take; a look of more has waited for something
_LAYER_STEPS = 16  # with the layer, before it is judged
# Looks at drafts that do not pay, before some are verified to see whether they still do not: at first, and at most.
_EXPLORE_LOOKS, _MOST_EXPLORE_LOOKS = 4, 256
_TRIED_STEPS = 3  # in a row: what the first one runs is in no cache of the processor
# Of a step without drafts: what a look is charged beside its own time where it has found nothing to verify, so that at
# most one of 15 steps looks. In a step of a larger model it takes several times what it takes in a loop, since nothing
# that it runs is in a cache of the processor then; and what runs behind it finds less there, which no clock tells.
_EMPTY_LOOK = 0.09


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
    look_s: float
    layer_s: float
    num_layer_drafts: int
    num_layer_requests: int
    num_layer_right: int


class Decision(NamedTuple):
    """A choice of lengths, and what it follows from: lengths = best_lengths of the others.

    Fields as its arguments; lengths: of each request, 0: none are verified
    """

    num_decodes: int
    chances: Sequence[Sequence[float]]
    multiples: Sequence[float]
    least_gain: float
    lengths: Sequence[int]


@dataclass
class Budget:
    """Seconds that may be spent: a share of the time so far, and what was gained.

    lent, most: steps without drafts, of which the time is there at first, and is kept at most
    left_s:     is owed if negative
    is_open:    whether a step was seen; before, there is nothing to spend
    """

    share: float
    lent: float
    most: float
    left_s: float = 0.0
    is_open: bool = False

    def passed(self, seconds: float, plain_s: float) -> None:
        """Counts the time of a step. plain_s: of one without drafts"""
        if not self.is_open:
            self.is_open, self.left_s = True, self.lent * plain_s
        elif self.left_s < self.lent * plain_s:
            self.left_s += self.share * seconds
        self.left_s = min(self.left_s, self.most * plain_s)

    def spend(self, seconds: float) -> None:
        """Takes time out of it, or puts in what was gained, if negative."""
        if self.is_open:
            self.left_s -= seconds


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

        Beyond what was seen a draft costs half of what those before it cost, since drafts share experts and a step with
        any has costs of its own; before any was, little, so that some are tried.
        """
        seen = self._seen.get(num_decodes.bit_length(), {}).values()
        points = sorted([(drafts, multiple) for drafts, multiple, _ in seen])
        last, multiple = points[-1] if points else (float(num_decodes), 1 + _DRAFT_COST)
        if num_drafts > last or not points:
            most = max(float(num_drafts), last)
            points.append((most, multiple + 0.5 * max(0.0, multiple - 1) * (most / last - 1)))
        multiples, drafts, multiple = [1.0], 0.0, 1.0
        for next_drafts, next_multiple in points:
            each = (next_multiple - multiple) / (next_drafts - drafts)
            while len(multiples) <= min(num_drafts, next_drafts):
                multiples.append(multiple + each * (len(multiples) - drafts))
            drafts, multiple = next_drafts, next_multiple
        return multiples


def _moved(average: float, value: float, weight: float) -> float:
    """Returns a moving average that a single large value moves little."""
    return average + weight * (min(value, 2 * average) - average)


def best_lengths(
    num_decodes: int, chances: Sequence[Sequence[float]], multiples: Sequence[float], least_gain: float = MIN_GAIN
) -> list[int]:
    """Returns how many drafts of each request to verify, so that a step yields the most tokens per second.

    num_decodes: rows without drafts
    chances:     of each draft of each request to be right with all before it, so they never grow
    multiples:   of a step without drafts, how long one takes with 0, 1, ... as many as there is room for
    least_gain:  of tokens per second, below which none are verified
    """
    # Stable: of equal chances the earlier draft, so that each is taken with all before it.
    ranked = sorted(
        [(chance, row) for row, each in enumerate(chances) for chance in each], key=itemgetter(0), reverse=True
    )
    tokens, best, best_rate = float(num_decodes), 0, least_gain * num_decodes
    for number, ((chance, _), multiple) in enumerate(zip(ranked, multiples[1:], strict=False), 1):
        tokens += chance
        if tokens / multiple > best_rate:
            best, best_rate = number, tokens / multiple
    lengths = [0] * len(chances)
    for _, row in ranked[:best]:
        lengths[row] += 1
    return lengths


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

    Drafts are looked for in each step while they pay. Otherwise some steps look, as many as a budget allows, and see
    what would have been right; the steps between run as without drafts. What drafts lose comes out of a second budget,
    and none are verified while that owes time. They are tried again now and then.
    The layer for multi-token prediction runs while the time that its drafts save, of which each is worth a share of a
    step without drafts, exceeds that of its runs and of the rows that verify them; what it loses has a budget, too.
    """

    def __init__(self, has_layer: bool = False, always: bool = False):
        """has_layer: drafts of the layer are weighed, too
        always: each step looks, for a caller that verifies all, and the layer runs in each
        """
        self.costs = StepCosts()
        self.saved_s = 0.0  # by drafts, in steps that have looked for some, as far as the time of one without is known
        self.decision: Decision | None = None  # the newest with drafts to choose from
        self.layer_runs = has_layer
        self.pays = False  # drafts do, as far as is known
        self._has_layer = has_layer
        self._always = always
        self._looks = Budget(_LOOK_SHARE, _LENT_LOOKS, _LENT_LOOKS)
        self._losses = Budget(_LOSS_SHARE, _LENT_LOSS, _MOST_LOSS)
        self._layer_losses = Budget(_LAYER_SHARE, _LENT_LAYER_LOSS, _LENT_LAYER_LOSS)
        self._plain_s = 0.0  # of a step without drafts, with about as many decodes as now
        self._trust: dict[int, _Trust] = {}  # by powers of two of decodes
        self._promised = 1.0  # by the newest look: tokens per second over those without drafts
        self._multiple = 1.0  # of the time of a step without, that it expects
        self._num_empty = 0  # looks in a row without drafts to verify, while drafts pay
        self._num_looks = 0  # in a row, at drafts that do not pay
        self._explore_looks = _EXPLORE_LOOKS
        self._tried_steps = 0  # that are left of a trial
        self._had_drafts = False  # the step before
        self._leaves_out = True  # the first step with drafts behind one without, from what such steps cost
        self._last_excess = 0.0  # of the step with drafts before: its time, over what was expected
        self._layer_gain = 0.0  # of this trial, in steps without drafts
        self._layer_steps = 0  # of this trial

    @property
    def is_due(self) -> bool:
        """Whether to look for drafts in this step."""
        may_look = self._looks.left_s > 0 and self._losses.left_s > 0
        return may_look or self.pays or self._always or self.layer_runs

    def looked(self, look_s: float) -> None:
        """Learns how long a look took, whatever came of it, or what it learnt from the step that followed."""
        if not self.pays:
            self._looks.spend(min(look_s, _LONGEST_LOOK * self._plain_s))

    def lengths(self, num_decodes: int, chances: Sequence[Sequence[float]], num_rows: int) -> list[int]:
        """Returns how many of the drafts that were found to verify. Arguments as of `best_lengths`; num_rows: of drafts

        Where they would pay if they cost half as much, they are verified now and then, so that their cost is measured
        anew; and steps that verify are now and then followed by one that does not, for the same reason.
        """
        none = [0] * len(chances)
        self._promised = self._multiple = 1.0
        if not self.costs.is_fresh(num_decodes):
            return none
        lengths = none
        if self._losses.left_s > 0:
            multiples = self.costs.of(num_decodes, max(0, min(num_rows, sum(map(len, chances)))))
            trust = self._trust.setdefault(num_decodes.bit_length(), _Trust())
            lengths = best_lengths(num_decodes, chances, multiples, trust.least_gain)
            self.decision = Decision(num_decodes, chances, multiples, trust.least_gain, lengths)
            if any(lengths):
                self._expect(num_decodes, chances, lengths, multiples)
                self.pays, self._num_empty, self._num_looks, self._explore_looks = True, 0, 0, _EXPLORE_LOOKS
                return lengths
            trust.fade()
            self._num_looks += 1
            if self._tried_steps or self._num_looks >= self._explore_looks:
                lengths = best_lengths(num_decodes, chances, [(1 + each) / 2 for each in multiples])
                if any(lengths):
                    self._try(num_decodes)
                    self._expect(num_decodes, chances, lengths, multiples)
                    return lengths
        self.found_none()
        return lengths

    def _try(self, num_decodes: int) -> None:
        """Begins some steps with drafts that may not pay, or goes on with them."""
        if not self._tried_steps:
            self._num_looks, self._explore_looks = 0, min(2 * self._explore_looks, _MOST_EXPLORE_LOOKS)
            self._tried_steps = _TRIED_STEPS
            self.costs.doubt(num_decodes)
        self._tried_steps -= 1
        self.pays, self._num_empty = self._tried_steps > 0, 0

    def found_none(self) -> None:
        """Learns that a look has found no drafts to verify."""
        self._num_empty += 1
        self.pays = self.pays and self._num_empty < _PATIENCE
        if not self.pays:
            self._looks.spend(_EMPTY_LOOK * self._plain_s)

    def _expect(
        self,
        num_decodes: int,
        chances: Sequence[Sequence[float]],
        lengths: Sequence[int],
        multiples: Sequence[float],
    ) -> None:
        """Notes what a step with drafts of these lengths should take and give."""
        right = sum([sum(each[:length]) for each, length in zip(chances, lengths, strict=True) if length])
        self._multiple = multiples[sum(lengths)]
        self._promised = (1 + right / num_decodes) / self._multiple

    def ended(self, step: DecodeStep, num_like: int = 1) -> None:
        """Learns what a step of decodes alone took and yielded. num_like: steps that it stands for, itself included

        One whose look and layer took all of its time says nothing: they were measured by another clock.
        """
        num, plain_s = step.num_requests, self.costs.plain_s(step.num_requests)
        seconds = step.seconds - step.layer_s
        if seconds <= step.look_s:
            return
        if not step.num_drafts:
            self.costs.add(num, 0, seconds - step.look_s)
        elif self._had_drafts or not self._leaves_out:
            self.costs.add(num, step.num_drafts, seconds)
        # Where such steps stand alone again and again, all are of that kind, and count.
        self._leaves_out = self._had_drafts if step.num_drafts else self._leaves_out
        self._had_drafts = step.num_drafts > 0
        if plain_s is None:
            return
        self._plain_s = plain_s
        # A step that took much longer than expected has waited for something else.
        counted_s = min(seconds, 2 * plain_s * (self._multiple if step.num_drafts else 1.0))
        passed_s = counted_s + (num_like - 1) * min(counted_s, plain_s)
        for budget in (self._looks, self._losses, self._layer_losses):
            budget.passed(passed_s, plain_s)
        if step.look_s or step.num_drafts:
            saved_s = step.num_tokens / num * plain_s - (seconds if self._always else counted_s)
            self.saved_s += saved_s - step.layer_s
            if step.num_drafts:
                # One step that took far longer than expected has waited for something else; two in a row cost so much,
                # but hardly twice what as many other decodes would.
                excess = seconds / counted_s
                most_s = 2 * plain_s * (1 + step.num_drafts / num)
                lost_s = min(counted_s * max(1.0, min(excess, self._last_excess)), most_s)
                self._last_excess = excess
                self._losses.spend(lost_s - step.num_tokens / num * plain_s)
                trust = self._trust.setdefault(num.bit_length(), _Trust())
                trust.add(step.num_tokens / num * plain_s / counted_s, self._promised)
            elif self.pays:  # looks between drafts that pay are borne by what these save
                self._losses.spend(min(step.look_s, _LONGEST_LOOK * plain_s))
        if self.pays and self._losses.left_s <= 0:
            self.pays = False
            self._losses.spend(_TRIAL * plain_s)
        if self._has_layer:
            self._judge_layer(step, plain_s)

    def ran_beside(self, num_decodes: int, num_drafts: int, num_right: int, look_s: float) -> None:
        """Learns what came of a look in a step that was not of decodes alone, whose time says nothing of drafts: they
        count as in other steps.

        num_decodes: of the step;  num_drafts, num_right: verified in it
        """
        if num_drafts:
            of_rows = self.costs.of(num_decodes, num_drafts)[num_drafts] - 1
            self._losses.spend(look_s + (of_rows - num_right / num_decodes) * self._plain_s)
        elif self.pays:
            self._losses.spend(min(look_s, _LONGEST_LOOK * self._plain_s))

    def wants_layer(self, has_prompt: bool) -> bool:
        """Returns whether the layer should run in this step. It begins again with a prompt, whose rows it needs.

        has_prompt: the step begins one; going on with one is not enough
        """
        if not self.layer_runs and has_prompt and self._has_layer and self._layer_losses.left_s > 0:
            self.layer_runs = True
        return self.layer_runs

    def layer_ran(self, layer_s: float) -> None:
        """Learns how long the layer ran in a step that was not of decodes alone. It rests where its budget is spent."""
        self._layer_losses.spend(layer_s)
        if self._layer_losses.is_open and self._layer_losses.left_s <= 0 and not self._always:
            self._settle_layer()
            self.layer_runs = False

    def _judge_layer(self, step: DecodeStep, plain_s: float) -> None:
        """Counts what the layer has given and taken in a step, and ends its runs where they do not pay.

        Requests that began before it ran have none of its keys. What it gives is counted as if all were like those that
        have them; where none has, it gives nothing.
        """
        if not self.layer_runs or self._always:
            return
        cost = step.layer_s / plain_s
        if step.num_drafts:
            of_rows = max(0.0, (step.seconds - step.layer_s) / plain_s - 1)
            cost += of_rows * step.num_layer_drafts / step.num_drafts
        self._layer_gain += step.num_layer_right / max(1, step.num_layer_requests) - min(cost, 2.0)
        self._layer_steps += 1
        if self._layer_steps == _LAYER_STEPS:
            self.layer_runs = self._layer_gain >= 0
            self._settle_layer()

    def _settle_layer(self) -> None:
        """Takes out of the layer's budget what it has lost in this trial, or puts in what it has gained."""
        self._layer_losses.spend(-self._layer_gain * self._plain_s)
        self._layer_gain, self._layer_steps = 0.0, 0
