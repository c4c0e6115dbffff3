"""Scores one window of load on one placement, from recorded data alone.

Shape words: L = layers, E = experts, R = ranks, N = nodes, P = slots.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import LoadRecord, balancedness, rank_load, slot_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.run import Served
from moe_serve.eplb.replay.settings import NO_STEPS, EvenSteps
from moe_serve.errors import TraceError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WindowScore:
    """One window on one placement.

    balancedness: [L], mean / max rank load
    ranks:        [R], load summed over layers
    off_node:     share of routes that leave the node of their token; None = sources not recorded
    traffic:      [N, N] routes from node to node; None likewise
    activated:    experts active in a step on the rank that has most, mean over layers; a replica is active when its
                  expert is. None = activations not recorded
    step_s:       predicted time of one step; None = no costs
    """

    balancedness: Floats
    ranks: Floats
    off_node: float | None = None
    traffic: Floats | None = None
    activated: float | None = None
    step_s: float | None = None


class Scorer:
    """Scores windows.

    split "window": replicas share an expert's tokens evenly, on the sums of the window. Others ("even", "nearest",
    "exact", "fewest_activated") split every single step, which has to be in the trace, with its sources for "nearest";
    balancedness and activated experts are then means over steps, and traffic is that of the split where the sources of
    single steps are known. even_steps: those that "exact" splits evenly, as the server did.
    """

    def __init__(
        self,
        topology: Topology,
        topk: int | None,
        costs: ProfileCosts | None = None,
        split: str = "window",
        even_steps: EvenSteps = NO_STEPS,
    ) -> None:
        self.topology, self.topk, self.costs, self.split, self.even_steps = topology, topk, costs, split, even_steps
        self._splitter: StepSplitter | None = None

    def score(self, record: LoadRecord, placement: Placement, shares: Floats | None = None) -> WindowScore:
        """Returns the score of a window; shares as in `rank_load`, for split "window"."""
        off_node, traffic = self._traffic(record, placement)
        if self.split == "window":
            load = rank_load(record.tokens, placement, shares)
            balance, ranks, activated = balancedness(load), load.sum(axis=0), self._activated(record, placement)
        else:
            if self._splitter is None or self._splitter.placement is not placement:
                self._splitter = StepSplitter(self.split, placement, self.topology, self.even_steps)
            rows = self._splitter.slot_rows(record)
            by_rank = rows.sum(axis=2).reshape(*rows.shape[:2], placement.num_ranks, -1)
            load = by_rank.sum(axis=3).astype(np.float64)  # [steps, L, R]
            balance, ranks = balancedness(load).mean(axis=0), load.sum(axis=(0, 1))
            activated = float((by_rank > 0).sum(axis=3).max(axis=2).mean())
            if rows.shape[2] == self.topology.num_ranks:
                nodes, per_node = self.topology.num_nodes, self.topology.ranks_per_node
                by_node = rows.sum(axis=(0, 1)).reshape(nodes, per_node, nodes, -1).sum(axis=(1, 3))
                off_node, traffic = _off_node(by_node), by_node.astype(np.float64)
        return WindowScore(
            balance, ranks, off_node, traffic, activated, self._step(record, placement, placement.num_slots)
        )

    def score_served(self, record: LoadRecord, served: Served) -> WindowScore:
        """Returns the score of a window on what served it; where experts moved in it, the mean weighted by steps."""
        score = self.score(record, served.placement, served.shares)
        if served.earlier is None:
            return score
        placement, share = served.earlier
        return _mean_score(self.score(record, placement), score, share)

    def perfect(self, record: LoadRecord, slots_per_rank: int) -> WindowScore:
        """Returns the score of perfect balance: every rank has the mean load of every layer."""
        num_layers, num_ranks = record.num_layers, self.topology.num_ranks
        step_s = self._step(record, None, slots_per_rank * num_ranks)
        ranks = np.full(num_ranks, record.tokens.sum() / num_ranks)
        return WindowScore(np.ones(num_layers), ranks, step_s=step_s)

    def tokens_per_step(self, record: LoadRecord) -> float:
        """Returns the tokens of a step with tokens, over all ranks; the layers agree on it up to dropped tokens."""
        assert self.topk is not None
        return float(record.tokens.sum(axis=1).max(initial=0)) / self.topk / max(record.busy_steps, 1)

    def _step(self, record: LoadRecord, placement: Placement | None, num_slots: int) -> float | None:
        if self.costs is None or not record.busy_steps or not self.topk:
            return None
        tokens = record.tokens / record.busy_steps
        return self.costs.step_seconds(tokens, placement, num_slots, self.tokens_per_step(record), record.phase)

    def _activated(self, record: LoadRecord, placement: Placement) -> float | None:
        active = record.active_steps()
        if active is None or not record.busy_steps:
            return None
        slots = slot_load(active * placement.replica_count, placement)  # slot_load divides by the replicas again
        by_rank = slots.reshape(placement.num_layers, placement.num_ranks, -1).sum(axis=2)
        return float(by_rank.max(axis=1).mean()) / record.busy_steps

    def _traffic(self, record: LoadRecord, placement: Placement) -> tuple[float | None, Floats | None]:
        if record.by_source is None:
            return None, None
        nodes, per_node = self.topology.num_nodes, self.topology.ranks_per_node
        layers, experts = placement.num_layers, placement.num_logical
        by_node = record.by_source.reshape(layers, nodes, per_node, experts).sum(axis=2)
        table = placement.physical_to_logical
        node_of_slot = np.arange(placement.num_slots) // (placement.slots_per_rank * per_node)
        # One cell per (layer, node, expert); the last column of experts counts empty slots.
        keys = (np.arange(layers)[:, None] * nodes + node_of_slot) * (experts + 1) + table % (experts + 1)
        replicas = np.bincount(keys.ravel(), minlength=layers * nodes * (experts + 1)).reshape(layers, nodes, -1)
        share = replicas[:, :, :-1] / placement.replica_count[:, None, :]
        traffic = np.einsum("lne,lme->nm", by_node.astype(np.float64), share, optimize=True)
        return _off_node(traffic), traffic


def _mean_score(first: WindowScore, last: WindowScore, share: float) -> WindowScore:
    """Returns the mean of two scores of one window; share: weight of the first."""
    mean: dict[str, Any] = {}
    for name in ("balancedness", "ranks", "off_node", "traffic", "activated", "step_s"):
        one, other = getattr(first, name), getattr(last, name)
        mean[name] = None if one is None or other is None else share * one + (1 - share) * other
    return WindowScore(**mean)


def _off_node(traffic: NDArray[np.number]) -> float:
    """Returns the share of routes [N, N] that leave their node."""
    total = traffic.sum()
    return float(1 - np.trace(traffic) / total) if total else 0.0


class StepSplitter:
    """Splits every single step of a window over the replicas of one placement, as a server does batch by batch."""

    def __init__(self, split: str, placement: Placement, topology: Topology, even_steps: EvenSteps = NO_STEPS) -> None:
        """split: of `make_split`;  even_steps: those that "exact" splits evenly"""
        from moe_serve.eplb.split.make import make_splits
        from moe_serve.eplb.split.policy import find_library

        self.split, self.placement = split, placement
        self._even_steps = even_steps if split == "exact" else NO_STEPS
        self._layers = make_splits(split, placement, topology, find_library())
        self._even_layers = make_splits("even", placement, topology, find_library()) if self._even_steps.steps else []

    def slot_rows(self, record: LoadRecord) -> NDArray[np.int64]:
        """Returns the rows that each source sends to each slot in every step: [steps, L, S, P].

        S: source ranks, where the window is one step and its sources are known: then this is the server's own split;
        else 1
        Raises TraceError when the record does not hold single steps, or lacks the sources that the split needs.
        """
        if record.num_steps == 1 and record.by_source is not None:
            steps = record.by_source[None]
        elif self.split == "nearest":
            raise TraceError(
                f"the window of step {record.first_step} lacks what the nearest split needs: one step, with its tokens "
                "by source rank (by_source); record that, draw it (--window 1 --sources), or use --split window"
            )
        elif record.per_step is not None:
            steps = record.per_step
        elif record.num_steps == 1:
            steps = record.tokens[None]
        else:
            raise TraceError(
                f"the window of step {record.first_step} sums {record.num_steps} steps, and a split per batch works on "
                f"single ones; record per_step, draw windows of one step (--window 1), or use --split window"
            )
        rows = []
        for number, step in enumerate(steps):
            evenly = (record.first_step + number, record.phase) in self._even_steps
            layers = self._even_layers if evenly else self._layers
            rows.append([np.atleast_2d(layer.split(counts)) for layer, counts in zip(layers, step, strict=True)])
        return np.array(rows)
