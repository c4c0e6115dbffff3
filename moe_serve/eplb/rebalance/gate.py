"""Decides whether a move is worth its cost, learns from the measured gains of moves, and bounds the loss.

Every move is compared with doing nothing, that is with the baseline: the placement in use at the start, or the last one
that was not the gate's choice. The load of a closed window is known, so its time on the baseline and on the placement
that served it can both be predicted. Each move's gain is thus measured afterwards, on load that it was not planned for.
What is learned, per layer except trust:

- trust: the ratio of measured to predicted gains scales the next prediction;
- noise: of the gain of a plan only what the tokens of its windows cannot have shown by chance counts;
- reach: a gain counts for as long as a layer's moves have lasted so far, at most the horizon;
- back-off: after a move that did not earn its cost, a layer stays put, twice as long after each failure, unless its
  earlier moves have earned enough to make up for it;
- memory: plans use the latest window alone or several, and nothing from before the load has shifted (`LoadMemory`);
- regret: all costs and losses minus gains stay below a share of the serving time. A move must fit into what is left of
  that bound, together with the cost of reverting it and one window as bad as moves have been so far, and as long: the
  bound is for windows of about equal numbers of steps, as a server's are. Once it is used up, layers that lose revert
  to the baseline.

Predicted times may be wrong, so costs count `gain_margin` times and gains 1/sqrt(gain_margin) times.

Shape words: L = MoE layers, E = experts, R = ranks, W = windows that are remembered.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.load import LoadRecord, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.settings import RebalanceSettings

Floats = NDArray[np.float64]
FIRST_TRUST = 0.5  # a plan looks better on the load that it was made from
# Share of its time that a moved layer may lose in the next window, until measured. Large enough that an adversary that
# knows the plan stays inside the bound (tests/eplb/test_gate.py).
FIRST_SURPRISE = 0.3
LEAST_SURPRISE = 0.01
KEEP = 0.5  # of what earlier moves of a layer have earned, when one is judged: one noisy window is no failure
SPENDABLE = 0.75  # share of the regret bound that known costs may spend; the rest covers what cannot be foreseen
ERRORS_KEPT = 0.7  # weight of earlier prediction errors against those of the next window
SHIFT = 2.0  # a load that is this many times further from its prediction than usual has shifted
# A shift is learned as this many usual errors: a rare one teaches little, while constant ones soon become usual.
LEARNED = 1.5
LEAST_ERRORS = 2  # windows to be predicted before an error can be called usual


@dataclass(frozen=True, eq=False)
class Window:
    """A closed window of load, as means over its steps with tokens, of which there are num_steps.

    tokens:      [L, E] per step
    by_source:   [L, R, E] tokens per step;  activations: [L, E] share of the steps; None = not recorded
    known:       placement -> [L] seconds of a step on it, once computed, at the newest prices
    """

    tokens: Floats
    num_steps: int
    by_source: Floats | None
    activations: Floats | None
    known: dict[Placement, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class ClosedWindow:
    """A window with load.

    first, last: the placements in use at its beginning and end
    whole:  one placement served all of it, so its time can teach the prices
    unseen: the last move is over, and its plan knew nothing of this load, so the load measures what the move gains
    """

    first: Placement
    last: Placement
    whole: bool
    unseen: bool


@dataclass(eq=False)
class _Trial:
    """A move whose gain is being measured.

    before: the placement that it replaced;  rows: [L] bool, layers that moved
    promised_s, cost_s, gained_s: [L] seconds: predicted gain per window, cost, and measured gain over num_windows
    """

    before: Placement
    rows: NDArray[np.bool_]
    promised_s: Floats
    cost_s: Floats
    gained_s: Floats
    num_windows: int = 0


@dataclass(frozen=True)
class Verdict:
    """The measured gain of a move.

    promised_s, realised_s: seconds per window, of the layers that moved
    num_windows: on which it was measured
    num_failed:  of num_rows layers, those that did not earn their cost
    """

    promised_s: float
    realised_s: float
    num_windows: int
    num_failed: int
    num_rows: int

    @property
    def totals_s(self) -> tuple[float, float]:
        """The promised and the measured gain over all windows of the measurement, in seconds."""
        return self.promised_s * self.num_windows, self.realised_s * self.num_windows

    def __str__(self) -> str:
        earned = f"{self.num_rows - self.num_failed} of {self.num_rows} layers earned the cost of their move"
        rest = "the others stay put for a while" if self.num_failed else ""
        return (
            f"the last move gains {self.realised_s:.3g} s a window of {self.promised_s:.3g} s promised; "
            f"{'; '.join(filter(None, (earned, rest)))}"
        )


class Gate:
    """Weighs gains against costs for one rebalancer."""

    def __init__(self, baseline: Placement, cost: GateCost, settings: RebalanceSettings) -> None:
        """baseline: the placement in use at the start;  cost: predicts the time of layers and of migrations."""
        self.cost = cost
        self._horizon = float(settings.horizon_windows)
        self._margin, self._regret, self._time = settings.gain_margin, settings.max_regret, settings.expert_time
        self._memory = LoadMemory(baseline.num_layers, settings.history_windows, settings.decay)
        self.rebase(baseline)

    def rebase(self, baseline: Placement) -> None:
        """Begins anew with another baseline: only the load and the prices that are known still count."""
        num_layers = baseline.num_layers
        self.baseline = baseline
        self._trust = FIRST_TRUST
        self._surprise = FIRST_SURPRISE
        self._elapsed_s = 0.0
        self._lost_s = 0.0
        self._now = 0  # windows closed
        self._earned_s = np.zeros(num_layers)  # by moves so far, earlier ones fading
        self._failures = np.zeros(num_layers, dtype=np.int64)
        self._shut_until = np.zeros(num_layers, dtype=np.int64)
        self._moved_at = np.zeros(num_layers)
        self._spacing = np.full(num_layers, self._horizon)
        self._trial: _Trial | None = None

    @property
    def has_load(self) -> bool:
        """Whether a window has been closed."""
        return bool(self._memory.windows)

    @property
    def has_shifted(self) -> bool:
        """Whether the last window is the first one of another load, in any layer."""
        return bool(self._memory.shifted.any())

    def close_window(self, record: LoadRecord, closed: ClosedWindow) -> None:
        """Adds a closed window."""
        first, last = closed.first, closed.last
        if closed.whole and first is last and self.cost.learn_window(record, last):
            for known in self._memory.windows:
                known.known.clear()
        steps = max(record.busy_steps, 1)
        tokens = record.tokens / steps
        window = Window(
            tokens,
            steps,
            None if record.by_source is None else record.by_source / steps,
            record.activation_share,
        )
        self._memory.add(window)
        self._now += 1
        baseline_s = self._seconds(window, self.baseline)
        # It is not known how many steps each placement served, so each layer counts its slower one.
        lost = (np.maximum(self._seconds(window, first), self._seconds(window, last)) - baseline_s) * window.num_steps
        other_s = self.cost.other_seconds(tokens, window.activations, self.baseline)
        self._elapsed_s += (float(baseline_s.sum()) + other_s) * window.num_steps
        self._lost_s += float(np.where(lost > 0, lost, lost / np.sqrt(self._margin)).sum())
        moved = self._moved(last)
        if moved.any():
            served_s = max(float(baseline_s[moved].sum()) * window.num_steps, 1e-12)  # nothing where no skew costs time
            share = float(np.maximum(lost, 0)[moved].sum()) / served_s
            self._surprise = max(0.5 * self._surprise, share, LEAST_SURPRISE)
        if self._trial is not None and closed.unseen:
            gained = self._seconds(window, self._trial.before) - self._seconds(window, last)
            self._trial.gained_s += gained * window.num_steps
            self._trial.num_windows += 1

    def judge(self) -> Verdict | None:
        """Ends the measurement of the last move, and learns from it; None: there is no move to judge."""
        trial = self._trial
        if trial is None or not trial.num_windows:
            return None
        self._trial = None
        gained = trial.gained_s / trial.num_windows
        promised, realised = float(trial.promised_s.sum()), float(gained[trial.rows].sum())
        if promised > 0:
            self._trust = 0.5 * self._trust + 0.5 * min(max(realised / promised, 0.0), 1.0)
        earned = gained * self.reach - trial.cost_s
        self._earned_s = np.where(trial.rows, KEEP * self._earned_s + earned, self._earned_s)
        failed = trial.rows & (earned < 0) & (self._earned_s < 0)
        self._failures[trial.rows & ~failed] = 0
        self.back_off(failed)
        return Verdict(promised, realised, trial.num_windows, int(failed.sum()), int(trial.rows.sum()))

    def back_off(self, rows: NDArray[np.bool_]) -> None:
        """Keeps these layers in place, twice as long after each failure in a row. rows: [L] bool"""
        self._failures[rows] += 1
        self._shut_until[rows] = self._now + 2 ** np.minimum(self._failures[rows], 8)

    def free_all(self) -> None:
        """Ends the back-off of all layers."""
        self._failures[:] = 0
        self._shut_until[:] = 0

    @property
    def reach(self) -> Floats:
        """[L] windows over which a gain is counted."""
        return np.asarray(np.clip(self._spacing, 1.0, self._horizon))

    @property
    def capital_s(self) -> float:
        """Seconds that may still be lost, weighted by gain_margin; negative once the regret bound is used up."""
        per_window = self._elapsed_s / max(self._now, 1)
        return SPENDABLE * self._regret * max(self._elapsed_s, self._horizon * per_window) - self._lost_s

    def free_layers(self, current: Placement) -> NDArray[np.bool_]:
        """Returns [L], whether a layer may move: its back-off is over, or it is slower than on the baseline."""
        return (self._shut_until <= self._now) | (self._saved(current, self.baseline) > 0)

    def planning_load(self) -> tuple[Floats, Floats | None, Floats | None]:
        """Returns the load to plan for: tokens per step [L, E], by source [L, R, E] and activations [L, E].

        With `expert_time` the first is the time that the tokens of a step take, in rows, on average. The last two are
        None unless all windows recorded them.
        """

        def mean(parts: list[Floats | None]) -> Floats | None:
            kept = [part for part in parts if part is not None]
            if len(kept) < len(parts):
                return None
            return np.asarray(np.einsum("lw,wl...->l...", self._memory.weights(), np.array(kept)))

        windows = self._memory.windows
        time = self._time
        tokens = mean([w.tokens if time is None else time.mean_rows(w.tokens, w.activations) for w in windows])
        assert tokens is not None
        return tokens, mean([w.by_source for w in windows]), mean([w.activations for w in windows])

    def gains(self, current: Placement, candidate: Placement) -> Floats:
        """Returns [L], seconds per window that the candidate should save, scaled by trust."""
        return self._saved(current, candidate) * self._trust

    def planned_gains(self, current: Placement, planned: Placement) -> Floats:
        """Returns [L], as `gains`, less what chance alone may promise of a placement planned for these windows.

        Tokens of a window are draws, so the load of a rank is uncertain by the root of its tokens. A plan levels what
        was drawn, and the next draws exceed that level on the busiest of R ranks; what the busiest rank of the
        placement in use exceeds may be chance, too. Tokens of one prompt choose alike, which is not counted: noise is
        at least this.
        """
        moved = (current.physical_to_logical != planned.physical_to_logical).any(axis=1)
        weights, windows = self._memory.weights(), self._memory.windows
        tokens = np.einsum("lw,wle->le", weights, np.array([w.tokens for w in windows]))
        steps = weights @ np.array([float(w.num_steps) for w in windows])
        levelled = expected_maximum(len(planned.live_ranks)) * self._chance(planned)
        chance = np.minimum(self._chance(current), 1.0)
        active = self.planning_load()[2]

        def seconds(share: Floats, placement: Placement) -> Floats:
            return self.cost.layer_seconds(tokens * share[:, None], active, placement)

        as_drawn = np.ones_like(chance)
        noise = seconds(1 + levelled, planned) - seconds(as_drawn, planned)
        noise += seconds(as_drawn, current) - seconds(1 - chance, current)
        return np.where(moved, self._saved(current, planned) - noise * steps, 0.0) * self._trust

    def _chance(self, placement: Placement) -> Floats:
        """Returns [L], the standard error of the busiest rank's load over that load, from the numbers of draws."""
        weights = self._memory.weights()
        loads = np.array([rank_load(w.tokens, placement) for w in self._memory.windows])  # [W, L, R] per step
        steps = np.array([w.num_steps for w in self._memory.windows])
        mean = np.einsum("lw,wlr->lr", weights, loads)
        variance = np.einsum("lw,wlr->lr", weights**2, loads / steps[:, None, None])
        return np.asarray(np.sqrt(variance.max(axis=1)) / np.maximum(mean.max(axis=1), 1e-12))

    def worth_reverting(self, current: Placement, costs_s: Floats) -> NDArray[np.int64]:
        """Returns the rows that lose more against the baseline than reverting them costs."""
        return np.flatnonzero(self._saved(current, self.baseline) * self.reach > costs_s)

    def choose_layers(
        self, gains_s: Floats, costs_s: Floats, revert_s: Floats, current: Placement, candidate: Placement
    ) -> NDArray[np.int64]:
        """Returns the rows to move, best value first, that pay for themselves and fit into the capital.

        gains_s: [L] per window;  costs_s, revert_s: [L], of moving there, and of reverting to the baseline later
        """
        worth = gains_s * self.reach
        pays = self.free_layers(current) & (gains_s > 0) & (worth >= self._margin * costs_s)
        # Set aside what layers that already moved could lose; a move that makes a layer safer frees it again.
        risk = self._risk(current)
        needed = self._margin * (costs_s + revert_s) + self._risk(candidate) - risk
        left = self.capital_s - float(risk.sum())
        rows = np.flatnonzero(pays)
        order = rows[np.lexsort((-worth[rows] / np.maximum(costs_s[rows], 1e-12), needed[rows] > 0))]
        chosen = []
        for row in order:
            if needed[row] <= max(left, 0.0):
                left -= needed[row]
                chosen.append(row)
        return np.array(chosen, dtype=np.int64)

    def start_move(self, before: Placement, rows: NDArray[np.int64], promised_s: Floats, costs_s: Floats) -> None:
        """Charges the cost of a move that begins now, and begins to measure its gain. promised_s, costs_s: [L]"""
        moved = np.zeros(len(promised_s), dtype=bool)
        moved[rows] = True
        self._lost_s += self._margin * float(costs_s[moved].sum())
        again = moved & (self._moved_at > 0)
        self._spacing[again] = 0.5 * self._spacing[again] + 0.5 * (self._now - self._moved_at[again])
        self._moved_at[moved] = self._now
        zeros = np.zeros(len(promised_s))
        self._trial = _Trial(before, moved, np.where(moved, promised_s, 0), np.where(moved, costs_s, 0), zeros)

    def _moved(self, placement: Placement) -> NDArray[np.bool_]:
        return np.asarray((placement.physical_to_logical != self.baseline.physical_to_logical).any(axis=1))

    def _risk(self, placement: Placement) -> Floats:
        """Returns [L], seconds that a placement may lose in one window: the worst so far, and a surprise."""
        moved = self._moved(placement)
        if not moved.any():
            return np.zeros(len(moved))
        baseline_s = [self._seconds(w, self.baseline) * w.num_steps for w in self._memory.windows]
        lost = [self._seconds(w, placement) * w.num_steps for w in self._memory.windows] - np.array(baseline_s)
        typical = np.mean(baseline_s, axis=0)
        return np.where(moved, np.maximum(np.max(lost, axis=0), 0.0) + self._surprise * typical, 0.0)

    def _saved(self, current: Placement, candidate: Placement) -> Floats:
        """Returns [L], seconds per window that the candidate would have saved over the windows of the history."""
        saved = [(self._seconds(w, current) - self._seconds(w, candidate)) * w.num_steps for w in self._memory.windows]
        return np.asarray((self._memory.weights() * np.array(saved).T).sum(axis=1))

    def _seconds(self, window: Window, placement: Placement) -> Floats:
        if placement not in window.known:
            window.known[placement] = self.cost.layer_seconds(window.tokens, window.activations, placement)
        return window.known[placement]


class LoadMemory:
    """The last windows of load, and how much each counts in plans and predictions, layer by layer.

    Two guesses are compared: the latest window alone, and all windows with older ones fading. The one that has
    predicted new windows better is used. A window that is much further from both than windows usually are, and than its
    number of tokens explains, has shifted: earlier windows no longer count. Where loads shift all the time, such errors
    become usual, and windows are averaged again.

    shifted: [L] bool, whether the last window is the first one of another load
    """

    def __init__(self, num_layers: int, num_windows: int, decay: float) -> None:
        """num_windows: that are remembered;  decay: weight of a window against the next newer one"""
        self.windows: deque[Window] = deque(maxlen=num_windows)
        self._fading = decay ** np.arange(num_windows)[::-1]
        self.shifted = np.zeros(num_layers, dtype=bool)
        self._age = np.zeros(num_layers, dtype=np.int64)  # windows since the load of a layer has shifted
        self._error = np.zeros((2, num_layers))  # of predicting a window from the latest one, and from all
        self._num_errors = 0

    def add(self, window: Window) -> None:
        """Adds the window that has just closed."""
        if self.windows:
            self.shifted = self._learn(window)
        self._age = np.where(self.shifted, 1, self._age + 1)
        self.windows.append(window)

    def weights(self) -> Floats:
        """Returns [L, W], how much each window counts; rows sum to 1."""
        latest = np.eye(len(self.windows))[-1]
        return np.asarray(np.where((self._error[0] < self._error[1])[:, None], latest, self._all()))

    def _all(self) -> Floats:
        """Returns [L, W], the weights of all windows since the load has shifted; rows sum to 1."""
        num = len(self.windows)
        counts = np.arange(num, 0, -1) <= self._age[:, None]
        weights = self._fading[-num:] * counts
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def _learn(self, window: Window) -> NDArray[np.bool_]:
        """Compares both guesses with the window that has closed; returns [L], whether its load has shifted."""
        past = np.array([earlier.tokens for earlier in self.windows])
        guesses = _shares(np.stack([past[-1], np.einsum("lw,wle->le", self._all(), past)]))
        errors = np.abs(guesses - _shares(window.tokens)).sum(axis=2)
        shifted = np.zeros(len(self._age), dtype=bool)
        if self._num_errors >= LEAST_ERRORS:
            usual = self._error / (1 - ERRORS_KEPT**self._num_errors)
            shifted = (errors > SHIFT * np.maximum(usual, _sampling_error(guesses, window))).all(axis=0)
            errors = np.where(shifted, np.minimum(errors, LEARNED * usual), errors)
        self._error = ERRORS_KEPT * self._error + (1 - ERRORS_KEPT) * errors
        self._num_errors += 1
        return shifted


def expected_maximum(num: int) -> float:
    """Returns about the mean of the highest of `num` standard normal draws (Blom, 1958), 0 for one."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


def _shares(tokens: Floats) -> Floats:
    return np.asarray(tokens / np.maximum(tokens.sum(axis=-1, keepdims=True), 1e-12))


def _sampling_error(shares: Floats, window: Window) -> Floats:
    """Returns the distance at which as many draws from these shares as the window has tokens lie on average."""
    num_tokens = np.maximum(window.tokens.sum(axis=1) * window.num_steps, 1)
    return np.asarray(np.sqrt(shares).sum(axis=-1) * np.sqrt(2 / (np.pi * num_tokens)))
