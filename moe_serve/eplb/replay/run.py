"""What one policy would have done on a trace, window after window.

A run names the placement that serves a window before it sees the window. StaticRun never moves. PlannedRun plans every
`interval` windows and moves at once, as engines with a fixed interval do. In gated_run.py and live_run.py the
Rebalancer decides.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moe_serve.eplb.load import Floats, LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlacementPolicy, PlanRequest, Unkept
from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.replay.arrivals import Arrivals, arrivals
from moe_serve.eplb.replay.settings import ReplaySettings


@dataclass(frozen=True, eq=False)
class Served:
    """What serves the next window, and what happened since the last one.

    fit, bound: [L] of the newest plan; None = no plan yet
    moved:      experts received; None = none
    earlier:    the placement of the window's first steps where experts moved in it, and the share of these steps
    unkept:     rules that plans made since the last window do not keep
    stall_s:    predicted pause of a gated run's migrations; None = ask the costs about `moved`
    """

    placement: Placement
    shares: Floats | None = None
    fit: Floats | None = None
    bound: Floats | None = None
    moved: Arrivals | None = None
    num_rounds: int = 0
    stall_s: float | None = None
    plan_s: float = 0.0
    earlier: tuple[Placement, float] | None = None
    unkept: tuple[Unkept, ...] = ()


class Run(Protocol):
    """A policy that is being replayed."""

    name: str

    def before(self, first_step: int, num_steps: int) -> Served:
        """Returns what serves the window of these steps."""
        ...

    def after(self, record: LoadRecord) -> None:
        """Shows the window that was just served."""
        ...

    def end(self) -> Placement:
        """Returns the placement after the last window."""
        ...

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of a rebalancer; () = none decides."""
        ...


@dataclass
class StaticRun:
    """Keeps a placement: the floor of every table."""

    name: str
    placement: Placement
    decisions: tuple[Decision, ...] = ()

    def before(self, first_step: int, num_steps: int) -> Served:
        return Served(self.placement)

    def after(self, record: LoadRecord) -> None:
        pass

    def end(self) -> Placement:
        return self.placement


@dataclass
class PlannedRun:
    """Plans every `interval` windows on the sum of the last `history` ones, and moves everything at once."""

    name: str
    policy: PlacementPolicy
    placement: Placement
    settings: ReplaySettings
    decisions: tuple[Decision, ...] = ()
    _recent: deque[LoadRecord] = field(default_factory=deque)
    _seen: int = 0
    _next: Served | None = None
    _shares: Floats | None = None
    _fit: tuple[Floats, Floats] | None = None

    def before(self, first_step: int, num_steps: int) -> Served:
        next_up, self._next = self._next, None
        fit, bound = self._fit or (None, None)
        return next_up or Served(self.placement, self._shares, fit, bound)

    def after(self, record: LoadRecord) -> None:
        self._recent.append(record)
        if len(self._recent) > self.settings.history:
            self._recent.popleft()
        self._seen += 1
        if self._seen < self.settings.history or self._seen % self.settings.interval:
            return
        begin = time.process_time()
        plan = self.policy.plan(self._request())
        plan_s = time.process_time() - begin
        moved = arrivals(self.placement, plan.placement, self.settings.topology)
        self.placement, self._shares = plan.placement, plan.shares
        self._fit = (plan.balancedness, plan.bound)
        self._next = Served(
            self.placement,
            self._shares,
            plan.balancedness,
            plan.bound,
            moved,
            int(moved.num_moves > 0),
            plan_s=plan_s,
            unkept=plan.unkept,
        )

    def end(self) -> Placement:
        return self.placement

    def _request(self) -> PlanRequest:
        s = self.settings
        tokens = np.sum([record.tokens for record in self._recent], axis=0)
        sources = [record.by_source for record in self._recent if record.by_source is not None]
        active = [record.activations for record in self._recent if record.activations is not None]
        steps = sum(record.busy_steps for record in self._recent)
        whole = len(self._recent)
        return s.plan_rules.request(
            tokens,
            s.topology,
            s.num_slots,
            current=self.placement,
            by_source=np.sum(sources, axis=0) if len(sources) == whole else None,
            activations=np.sum(active, axis=0) / steps if len(active) == whole and steps else None,
            series=np.array([record.tokens for record in self._recent]) if whole > 1 else None,
            series_weights=tuple(s.gate.decay**age for age in range(whole)[::-1]) if whole > 1 else None,
            moe_layer_ids=self.placement.moe_layer_ids,
        )
