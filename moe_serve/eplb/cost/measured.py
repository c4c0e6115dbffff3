"""Prices of serving and moving, learned from the step times and move times of the running system.

A step is taken to last

    base_s  +  token_s x tokens of the mean rank  +  skew_s x tokens by which the busiest rank exceeds the mean

with tokens counted as (token, expert) pairs and summed over layers. Attention and all else that grows with the batch is
in token_s, so that a larger batch is not mistaken for a worse placement: what a better placement saves is skew_s. The
three are fitted by least squares over the last windows, of which older ones fade and outliers count less. Until the
load has varied enough to tell them apart, weak assumptions from the sizes of the model hold.

A round of moves is taken to cost the longer of two: a price for each expert that its busiest rank sends or receives,
and one for each that crosses the network of its busiest node. Either is the median over the last rounds in which it was
the longer one; that of the network begins with the measured rate and delay, that of an expert with its copy or, if that
is longer, with a share of the steps measured so far: each round stops serving at its activation.

Shape words: L = MoE layers, E = experts, R = ranks.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.load import LoadRecord, rank_load
from moe_serve.eplb.migration.moves import MigrationRound
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.topology import Topology

Floats = NDArray[np.float64]
NUM_WINDOWS = 64
FADING = 0.98  # weight of a window against the next newer one
OUTLIER = 2.0  # times the usual error: larger ones count less, in inverse proportion
LEAST_ERROR = 0.01  # of a step: no window tells its time more exactly; of few windows not even that
NUM_REFITS = 2  # after each window, with the weights that follow from the errors of the fit before
MOE_SHARE = 0.5  # assumed share of token_s that the busiest rank's experts take, before the skew has varied
# Of a step, assumed for what a round costs until one is measured. The longest of 189 rounds of the demo model took 0.52
# (benchmarks/README.md).
FIRST_ROUND = 0.2
NUM_ROUNDS = 15  # rounds whose median is the price of a moved expert


@dataclass(frozen=True)
class PriorPrices:
    """Prices before anything is measured, in seconds.

    token_s:    of a (token, expert) pair on its rank, attention and all
    expert_s:   of serving time, for each expert that the busiest rank of a round receives
    off_node_s: likewise, for each that the busiest node of a round sends to other nodes, or receives; 0: not known
    """

    token_s: float
    expert_s: float
    off_node_s: float = 0.0


class MeasuredCost(GateCost):
    """The costs of one running system. Deterministic: the same windows and rounds give the same prices.

    step_share: how much longer steps may be while experts move, so that a moving second costs this share of one
    time:       of experts, where batches are split by it: their rows then count as many as they last, see
                `ExpertTime.mean_rows`; None = tokens count
    """

    learns: bool = True

    def __init__(self, prior: PriorPrices, step_share: float, time: ExpertTime | None = None) -> None:
        self._prior = prior
        self._step_share, self._time = step_share, time
        self._prices = np.array([0.0, prior.token_s, MOE_SHARE * prior.token_s])
        self._rows: deque[Floats] = deque(maxlen=NUM_WINDOWS)  # of each window: 1, tokens of the mean rank, and beyond
        self._step_s: deque[float] = deque(maxlen=NUM_WINDOWS)
        self._expert_s: deque[float] = deque(maxlen=NUM_ROUNDS)  # of rounds that were measured
        self._off_node_s: deque[float] = deque([prior.off_node_s], maxlen=NUM_ROUNDS)

    @property
    def base_s(self) -> float:
        """Seconds of a step without tokens."""
        return float(self._prices[0])

    @property
    def token_s(self) -> float:
        """Seconds for each (token, expert) pair of the mean rank, summed over layers."""
        return float(self._prices[1])

    @property
    def skew_s(self) -> float:
        """Seconds for each pair by which the busiest rank of a layer exceeds the mean."""
        return float(self._prices[2])

    @property
    def expert_s(self) -> float:
        """Seconds of serving time for each expert that the busiest rank of a round receives."""
        first_s = self._prior.expert_s
        if self._step_s:
            first_s = max(first_s, FIRST_ROUND * _median(np.array(self._step_s)))
        return _median(np.array([first_s, *self._expert_s][-NUM_ROUNDS:]))

    @property
    def off_node_s(self) -> float:
        """Seconds of serving time for each expert that crosses the network of the busiest node of a round."""
        return _median(np.array(self._off_node_s))

    @property
    def off_node_weight(self) -> float:
        near_s, far_s = self.expert_s, self.off_node_s
        return far_s / near_s if far_s > near_s > 0 else 1.0

    def layer_seconds(self, tokens: Floats, activations: Floats | None, placement: Placement) -> Floats:
        busiest: Floats = rank_load(self._load(tokens, activations), placement).max(axis=1)
        return self.skew_s * busiest

    def other_seconds(self, tokens: Floats, activations: Floats | None, placement: Placement) -> float:
        mean = float(self._load(tokens, activations).sum()) / len(placement.live_ranks)
        return self.base_s + (self.token_s - self.skew_s) * mean

    def migration_seconds(self, plan: MigrationPlan, topology: Topology) -> float:
        return sum(max(self._in_ranks_s(each), self._network_s(each, topology)) for each in plan.rounds)

    def learn_window(self, record: LoadRecord, placement: Placement) -> bool:
        if record.step_time_s is None or not record.busy_steps:
            return False
        rows = self._load(record.tokens / record.busy_steps, record.activation_share)
        load = rank_load(rows, placement)[:, placement.live_ranks]
        mean = float(load.mean(axis=1).sum())
        self._rows.append(np.array([1.0, mean, float(load.max(axis=1).sum()) - mean]))
        self._step_s.append(record.step_time_s)
        self._fit()
        return True

    def learn_round(self, finished: MigrationRound, topology: Topology, move_s: float, pause_s: float) -> None:
        cost_s = pause_s + self._step_share * move_s
        if self._network_s(finished, topology) > self._in_ranks_s(finished):
            self._off_node_s.append(cost_s / finished.busiest_node(topology))
        else:
            self._expert_s.append(cost_s / max(finished.busiest(), 1))

    def _load(self, tokens: Floats, activations: Floats | None) -> Floats:
        return tokens if self._time is None else self._time.mean_rows(tokens, activations)

    def _in_ranks_s(self, moves: MigrationRound) -> float:
        return self.expert_s * max(moves.busiest(), 1)

    def _network_s(self, moves: MigrationRound, topology: Topology) -> float:
        return self.off_node_s * moves.busiest_node(topology)

    def _fit(self) -> None:
        """Fits the prices to the last windows, again with less weight on those that fitted badly."""
        rows, step_s = np.array(self._rows), np.array(self._step_s)
        num = len(step_s)
        fading = FADING ** np.arange(num)[::-1]
        typical_s = _median(step_s)
        least_s = LEAST_ERROR * (1 + 10 / num) * typical_s
        for _ in range(NUM_REFITS):
            errors = np.abs(step_s - rows @ self._prices)
            error_s = max(1.5 * _median(errors), least_s)
            weights = fading * np.minimum(1.0, OUTLIER * error_s / np.maximum(errors, 1e-12)) / error_s**2
            scaled = weights[:, None] * rows
            self._prices = self._solve(scaled.T @ rows, scaled.T @ step_s, typical_s)

    def _solve(self, normal: Floats, right: Floats, typical_s: float) -> Floats:
        """Returns the prices that fit best, none below zero, with the assumptions as further observations.

        typical_s: of a step, the scale on which the time of an empty one is unknown
        """
        token_s = self._prior.token_s
        assumed = np.diag([1.0 / typical_s**2, 1.0 / (100.0 * token_s) ** 2, 0.0])
        # skew_s = MOE_SHARE x token_s, give or take as much
        ratio = np.array([0.0, -MOE_SHARE, 1.0]) / (MOE_SHARE * max(self.token_s, token_s / 1000))
        normal = normal + assumed + np.outer(ratio, ratio)
        right = right + np.array([0.0, 1.0 / (100.0**2 * token_s), 0.0])
        free = [0, 1, 2]
        while True:
            prices = np.zeros(3)
            unit = np.sqrt(np.diag(normal))[free]  # the columns differ by many orders of magnitude
            prices[free] = np.linalg.solve(normal[np.ix_(free, free)] / np.outer(unit, unit), right[free] / unit) / unit
            if (prices >= 0).all():
                return prices
            free = [index for index in free if prices[index] >= 0]


def _median(values: Floats) -> float:
    """Returns the upper median; np.median takes ten times as long on few values."""
    return float(np.sort(values)[len(values) // 2])
