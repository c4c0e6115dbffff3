"""Loads of benchmarks/balancer.py beside the synthetic families: single windows, and an adversary."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.replay.synthetic import FAMILIES, SyntheticLoad, popularity, window_counts


def static_load(
    kind: str, num_layers: int, num_logical: int, seed: int, skew: float | None = None, num_groups: int = 8
) -> NDArray[np.int64]:
    """Returns [L, E] int64, one window of a family: the instance of a planning benchmark.

    kind: uniform, zipf, lognormal, group, hot or tiny; about a million tokens per layer (tiny: half a one per expert).
    """
    load = SyntheticLoad(kind, 1, num_layers, num_logical, min(8, num_logical), num_groups, skew, seed=seed)
    rng = np.random.default_rng([seed, 3000 + FAMILIES.index(kind)])
    weights = next(popularity(load))
    return rng.multinomial(num_logical // 2 if kind == "tiny" else 1_000_000, weights).astype(np.int64)


@dataclass
class FlippingLoad:
    """An adversary with two profiles: after every move of experts it switches to the other one.

    Each move thus fits the load that has just ended. Call `next_window(moved)` for each window.
    """

    load: SyntheticLoad

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.load.seed, 2000])
        shape = (2, self.load.num_layers, self.load.num_logical)
        profiles = np.exp(self.load.sigma * rng.standard_normal(shape))
        self._profiles = profiles / profiles.sum(axis=2, keepdims=True)
        self._rng = rng
        self._side = 0
        self._step = 0

    def next_window(self, moved: bool) -> LoadRecord:
        """Returns the next window; moved: whether experts moved since the last one."""
        self._side ^= int(moved)
        record = window_counts(self._profiles[self._side], self.load, self._rng, self._step)
        self._step += self.load.steps_per_window
        return record
