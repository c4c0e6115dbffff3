"""Which of the last windows tell the load of the next one, layer by layer.

Two guesses are compared: the latest window alone, and all windows with older ones fading. Whichever has predicted new
windows better is used. Where a window is much further from both than windows usually are, and than its number of tokens
explains, the load has shifted: what came before says nothing any more, and is left out. Where loads shift all the time,
that is what is usual, and windows are averaged again.

Shape words: L = MoE layers, E = experts, W = windows that are remembered.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement

Floats = NDArray[np.float64]
KEEP = 0.7  # share of what is known about errors that stays with each window
SHIFT = 2.0  # a load that is so many times further away than usual has shifted
LEARNED = 1.5  # such an error is learned as so many usual ones: rare shifts teach little, constant ones are usual soon
LEAST_ERRORS = 2  # windows that must have been predicted before anything is usual


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


class LoadMemory:
    """The last windows of load, and how much each counts in plans and predictions.

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
            usual = self._error / (1 - KEEP**self._num_errors)
            shifted = (errors > SHIFT * np.maximum(usual, _sampling_error(guesses, window))).all(axis=0)
            errors = np.where(shifted, np.minimum(errors, LEARNED * usual), errors)
        self._error = KEEP * self._error + (1 - KEEP) * errors
        self._num_errors += 1
        return shifted


def _shares(tokens: Floats) -> Floats:
    return np.asarray(tokens / np.maximum(tokens.sum(axis=-1, keepdims=True), 1e-12))


def _sampling_error(shares: Floats, window: Window) -> Floats:
    """Returns the distance at which as many draws from these shares as the window has tokens lie on average."""
    num_tokens = np.maximum(window.tokens.sum(axis=1) * window.num_steps, 1)
    return np.asarray(np.sqrt(shares).sum(axis=-1) * np.sqrt(2 / (np.pi * num_tokens)))
