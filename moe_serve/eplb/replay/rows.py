"""Collects what a policy did and how it served, window by window, into a PolicyResult."""

import numpy as np

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Unkept
from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.result import PolicyResult
from moe_serve.eplb.replay.run import Served
from moe_serve.eplb.replay.score import WindowScore


class ResultRows:
    """Collects the windows of one policy."""

    def __init__(self, name: str):
        self._name = name
        self._rows: dict[str, list[np.ndarray | float]] = {}
        self._traffic: np.ndarray | None = None
        self._received: np.ndarray | None = None
        self._unkept: dict[tuple[str, str], list[Unkept]] = {}

    def add(self, served: Served, score: WindowScore, costs: ProfileCosts | None) -> None:
        for unkept in served.unkept:
            self._unkept.setdefault((unkept.rule, unkept.because), []).append(unkept)
        unknown = np.full(len(score.balancedness), np.nan)
        moved = served.moved
        if self._received is None:
            self._received = np.zeros_like(served.placement.replica_count, dtype=np.int64)
        if moved is not None:
            self._received += moved.by_expert
        stall = 0.0
        if moved is not None and moved.num_moves and served.stall_s is None:
            stall = costs.stall_seconds(moved) if costs else np.nan
        row: dict[str, np.ndarray | float] = {
            "served": score.balancedness,
            "fit": unknown if served.fit is None else served.fit,
            "bound": unknown if served.bound is None else served.bound,
            "rank_load": score.ranks,
            "moves": moved.num_moves if moved else 0,
            "moves_off_node": int(moved.off_node.sum()) if moved else 0,
            "num_rounds": served.num_rounds,
            "off_node": np.nan if score.off_node is None else score.off_node,
            "activated": np.nan if score.activated is None else score.activated,
            "step_s": np.nan if score.step_s is None else score.step_s,
            "stall_s": stall if served.stall_s is None else served.stall_s,
            "plan_s": served.plan_s,
        }
        small = {"served", "fit", "bound", "rank_load"}
        for name, value in row.items():
            self._rows.setdefault(name, []).append(np.asarray(value, dtype=np.float32) if name in small else value)
        if score.traffic is not None:
            self._traffic = score.traffic if self._traffic is None else self._traffic + score.traffic

    def result(self, decisions: tuple[Decision, ...], final: Placement | None) -> PolicyResult:
        whole = {"moves", "moves_off_node", "num_rounds"}
        arrays = {
            name: np.array(values, dtype=np.int64 if name in whole else None) for name, values in self._rows.items()
        }
        traffic = np.full((1, 1), np.nan) if self._traffic is None else self._traffic
        assert self._received is not None  # a result has at least one window
        arrays |= {"traffic": traffic, "received": self._received}
        unkept = tuple(self._said(plans) for plans in self._unkept.values())
        return PolicyResult(self._name, **arrays, final=final, decisions=decisions, unkept=unkept)

    def _said(self, plans: list[Unkept]) -> str:
        """Returns the sentence about a rule that some plans did not keep."""
        worst = max(plans, key=lambda one: one.reached)
        return (
            f"{self._name} does not keep {worst.rule} in {len(plans)} plan{'s' * (len(plans) != 1)} (up to "
            f"{worst.reached:.4g} in a layer): {worst.because}."
        )
