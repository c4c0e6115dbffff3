"""The results of a replay as plain arrays: one result per policy, and the report of all of them.

Equal traces and settings give equal results, except measured times (plan_s).
Shape words: W = scored windows, L = layers, R = ranks, E = experts.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import Decision

Floats = NDArray[np.float64]
FLOOR, CEILING = "do nothing", "perfect"


@dataclass(frozen=True, eq=False)
class PolicyResult:
    """One row of the table. NaN = not known, for the reason in `ReplayReport.missing`; in step_s also: no step ran.

    served:        [W, L] float32, balancedness on the window that came after the plan
    fit, bound:    [W, L] float32, balancedness of the newest plan on the load it was made for, and its bound
    rank_load:     [W, R] float32, tokens of each rank, summed over layers
    moves:         [W] int64, experts that ranks had to receive before the window
    moves_off_node: [W] int64, those of them from another node
    num_rounds:    [W] int64, migration rounds before the window (gated runs)
    off_node, activated, step_s, stall_s: [W] float64, see WindowScore; stall_s: pause of serving before the window
    plan_s:        [W] float64, measured CPU time of planning before the window
    traffic:       [R, R] float64, routes from rank to rank over all windows; all NaN = not known
    received:      [L, E] int64, how often a rank had to receive the expert, over all windows: what `moves` sums to
    final:         placement after the last window; None for the ceiling
    decisions:     of a rebalancer; () = none decides
    unkept:        sentences about rules that plans did not keep
    """

    name: str
    served: NDArray[np.float32]
    fit: NDArray[np.float32]
    bound: NDArray[np.float32]
    rank_load: NDArray[np.float32]
    moves: NDArray[np.int64]
    moves_off_node: NDArray[np.int64]
    num_rounds: NDArray[np.int64]
    off_node: Floats
    activated: Floats
    step_s: Floats
    stall_s: Floats
    plan_s: Floats
    traffic: Floats
    received: NDArray[np.int64]
    final: Placement | None = None
    decisions: tuple[Decision, ...] = ()
    unkept: tuple[str, ...] = ()

    @property
    def num_plans(self) -> int:
        return int(np.count_nonzero(self.plan_s))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), np.ndarray)}


@dataclass(frozen=True, eq=False)
class ReplayReport:
    """Everything a report shows.

    conditions:  what was replayed, in words, in the order to print
    results:     the floor first, then the policies, the ceiling last
    first_steps: [W] int64;  num_steps: [W] int64, steps with tokens
    tokens:      [W] float64, tokens served in the window, those of cached prompts among them (NaN: topk unknown)
    phases:      of each window
    load:        [L, E] float64, tokens per expert over the scored windows
    missing:     column -> what the trace or the command lacks to fill it
    redundancy:  rows (slots, balancedness mean, min over layers), served by plans one window old; () = not asked for
    expert_bytes: weights of one expert; None = unknown
    utilisation: share of the time in which steps run, where times are predicted
    """

    conditions: dict[str, str]
    results: tuple[PolicyResult, ...]
    first_steps: NDArray[np.int64]
    num_steps: NDArray[np.int64]
    tokens: Floats
    phases: tuple[str, ...]
    load: Floats
    moe_layer_ids: tuple[int, ...]
    num_slots: int
    num_ranks: int
    num_nodes: int
    missing: dict[str, str] = field(default_factory=dict)
    redundancy: tuple[tuple[int, float, float], ...] = ()
    expert_bytes: int | None = None
    utilisation: float = 1.0

    @property
    def floor(self) -> PolicyResult:
        return self.results[0]

    @property
    def policies(self) -> tuple[PolicyResult, ...]:
        return self.results[1:-1]

    @property
    def best(self) -> PolicyResult:
        """The policy with most tokens per second, or the best balanced one where times are not known."""
        runs = self.policies or self.results[:1]
        if all(np.isfinite(self.total_seconds(run)) for run in runs):
            return min(runs, key=lambda run: self.total_seconds(run))
        return max(runs, key=lambda run: float(run.served.mean()))

    def of_phase(self, phase: str) -> "ReplayReport":
        """Returns the report of the windows of one phase; load, traffic and experts received stay those of all."""
        kept = np.array([each == phase for each in self.phases], dtype=bool)

        def part(result: PolicyResult) -> PolicyResult:
            of_all = ("traffic", "received")
            return replace(result, **{name: a[kept] for name, a in result.arrays().items() if name not in of_all})

        return replace(
            self,
            results=tuple(part(result) for result in self.results),
            first_steps=self.first_steps[kept],
            num_steps=self.num_steps[kept],
            tokens=self.tokens[kept],
            phases=(phase,) * int(kept.sum()),
        )

    def total_seconds(self, result: PolicyResult) -> float:
        """Returns the predicted time of the whole trace: steps, pauses while experts move, and waiting for requests."""
        return float(self.step_seconds(result) / self.utilisation + result.stall_s.sum())

    def step_seconds(self, result: PolicyResult) -> float:
        """Returns the predicted time of all steps, in seconds; NaN = not known. A window without steps takes none."""
        return float((result.step_s * self.num_steps)[self.num_steps > 0].sum())

    def summary(self, result: PolicyResult) -> dict[str, Any]:
        """Returns the row of a policy as numbers; None = not known.

        Balancedness: mean, median and worst over layers, each averaged over windows; `worst` is the lowest of all.
        """
        windows = max(len(result.served), 1)
        total = self.total_seconds(result)
        planned = np.isfinite(result.fit).all(axis=1)
        slots = self.num_slots * len(self.moe_layer_ids)
        moved = result.moves[result.moves > 0]

        def known(value: float) -> float | None:
            return float(value) if np.isfinite(value) else None

        return {
            "policy": result.name,
            "served_mean": float(result.served.mean()),
            "served_p50": float(np.median(result.served, axis=1).mean()),
            "served_min": float(result.served.min(axis=1).mean()),
            "worst": float(result.served.min()),
            "fit_mean": known(result.fit[planned].mean()) if planned.any() else None,
            "fit_min": known(result.fit[planned].min(axis=1).mean()) if planned.any() else None,
            "bound_mean": known(result.bound[planned].mean()) if planned.any() else None,
            "num_plans": result.num_plans,
            "moves": int(result.moves.sum()),
            "moved_share": float(moved.mean() / slots) if len(moved) else 0.0,  # of all slots, per rebalance
            "num_rebalances": len(moved),
            "bytes": int(result.moves.sum()) * self.expert_bytes if self.expert_bytes is not None else None,
            "afar_share": float(result.moves_off_node.sum() / result.moves.sum()) if result.moves.sum() else None,
            "stall_s": known(result.stall_s.sum()),
            "off_node": known(result.off_node.mean()),
            "activated": known(result.activated.mean()),
            "step_s": known(self.step_seconds(result) / self.num_steps.sum()) if self.num_steps.any() else None,
            "tokens_per_s": known(self.tokens.sum() / total) if total else None,
            "windows": windows,
        }
