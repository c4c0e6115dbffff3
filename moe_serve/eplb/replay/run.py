"""What one policy would have done on a trace, window after window.

A run names the placement that serves a window before it sees the window. StaticRun never moves. PlannedRun plans every
`interval` windows and moves at once, as engines with a fixed interval do. GatedRun lets the Rebalancer decide, and
moves in rounds.
"""

import heapq
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.load import Floats, LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlacementPolicy, PlanRequest
from moe_serve.eplb.rebalance.events import (
    Event,
    PlanFailed,
    PlanReady,
    RequestPlan,
    RoundActivated,
    StartRound,
    WindowClosed,
)
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.eplb.replay.arrivals import Arrivals, arrivals
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.errors import ConfigError, PlacementError

GATE = "gate:"


@dataclass(frozen=True, eq=False)
class Served:
    """What serves the next window, and what happened since the last one.

    fit, bound: [L] of the newest plan; None = no plan yet
    moved:      experts received; None = none
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


class Run(Protocol):
    """A policy that is being replayed."""

    name: str

    def before(self, first_step: int) -> Served:
        """Returns what serves the window that begins at this step."""
        ...

    def after(self, record: LoadRecord) -> None:
        """Shows the window that was just served."""
        ...

    @property
    def decisions(self) -> tuple[tuple[int, str, str], ...]:
        """The decisions of a gated run: (step, kind, reason)."""
        ...


@dataclass
class StaticRun:
    """Keeps a placement: the floor of every table."""

    name: str
    placement: Placement
    decisions: tuple[tuple[int, str, str], ...] = ()

    def before(self, first_step: int) -> Served:
        return Served(self.placement)

    def after(self, record: LoadRecord) -> None:
        pass


@dataclass
class PlannedRun:
    """Plans every `interval` windows on the sum of the last `history` ones, and moves everything at once."""

    name: str
    policy: PlacementPolicy
    placement: Placement
    settings: ReplaySettings
    decisions: tuple[tuple[int, str, str], ...] = ()
    _recent: deque[LoadRecord] = field(default_factory=deque)
    _seen: int = 0
    _next: Served | None = None
    _shares: Floats | None = None
    _fit: tuple[Floats, Floats] | None = None

    def before(self, first_step: int) -> Served:
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
            self.placement, self._shares, plan.balancedness, plan.bound, moved, int(moved.num_moves > 0), plan_s=plan_s
        )

    def _request(self) -> PlanRequest:
        s = self.settings
        tokens = np.sum([record.tokens for record in self._recent], axis=0)
        sources = [record.by_source for record in self._recent if record.by_source is not None]
        active = [record.activations for record in self._recent if record.activations is not None]
        steps = sum(record.num_steps for record in self._recent)
        whole = len(self._recent)
        return s.plan_rules.request(
            tokens,
            s.topology,
            s.num_slots,
            current=self.placement,
            by_source=np.sum(sources, axis=0) if len(sources) == whole else None,
            activations=np.sum(active, axis=0) / steps if len(active) == whole and steps else None,
            moe_layer_ids=self.placement.moe_layer_ids,
        )


class GatedRun:
    """Lets the Rebalancer decide: it plans when the load calls for it, and moves experts when that pays.

    A plan arrives `settings.latency_steps` after its request. A round counts from the first whole window after its
    activation.
    """

    def __init__(
        self, name: str, policy: PlacementPolicy, placement: Placement, settings: ReplaySettings, cost: GateCost
    ) -> None:
        self.name = name
        self._policy, self._topology, self._cost = policy, settings.topology, cost
        self._latency = settings.latency_steps
        self._rebalancer = Rebalancer(placement, settings.topology, settings.gate, cost)
        self._events: list[tuple[int, int, Event]] = []
        self._order = itertools.count()
        self._fit: tuple[Floats, Floats] | None = None
        self._last = placement
        self._num_rounds = 0
        self._stall_s = 0.0
        self._plan_s = 0.0

    @property
    def decisions(self) -> tuple[tuple[int, str, str], ...]:
        return tuple((d.step, d.kind, d.reason) for d in self._rebalancer.decisions)

    def before(self, first_step: int) -> Served:
        while self._events and self._events[0][0] <= first_step:
            self._handle(heapq.heappop(self._events)[2])
        placement = self._rebalancer.placement
        moved = None if placement is self._last else arrivals(self._last, placement, self._topology)
        fit, bound = self._fit or (None, None)
        served = Served(placement, None, fit, bound, moved, self._num_rounds, self._stall_s, self._plan_s)
        self._last, self._num_rounds, self._stall_s, self._plan_s = placement, 0, 0.0, 0.0
        return served

    def after(self, record: LoadRecord) -> None:
        self._handle(WindowClosed(record.first_step + record.num_steps, record))

    def _handle(self, event: Event) -> None:
        if isinstance(event, RoundActivated):
            self._num_rounds += 1
        moving = self._rebalancer.migration
        for action in self._rebalancer.handle(event):
            match action:
                case RequestPlan():
                    self._push(self._answer(action))
                case StartRound():
                    self._push(RoundActivated(action.step + max(action.num_steps, 1), action.version))
        started = self._rebalancer.migration
        if started is not None and started is not moving:
            self._stall_s += self._cost.migration_seconds(started, self._topology)

    def _answer(self, action: RequestPlan) -> PlanReady | PlanFailed:
        begin = time.process_time()
        try:
            plan = self._policy.plan(action.request)
        except PlacementError as problem:
            return PlanFailed(action.step + self._latency, action.request_id, str(problem))
        self._plan_s += time.process_time() - begin
        layers = self._rebalancer.placement.num_layers
        fit, bound = self._fit or (np.full(layers, np.nan), np.full(layers, np.nan))
        fit, bound = fit.copy(), bound.copy()
        rows = list(action.layer_rows)
        fit[rows], bound[rows] = plan.balancedness, plan.bound
        self._fit = (fit, bound)
        return PlanReady(action.step + self._latency, action.request_id, plan)

    def _push(self, event: Event) -> None:
        heapq.heappush(self._events, (event.step, next(self._order), event))


def make_run(policy: str | PlacementPolicy, start: Placement, settings: ReplaySettings) -> Run:
    """Returns the run of a policy. policy: a name of `make_policy`, "gate:<name>" behind the gate, or a policy itself.

    Raises ConfigError for an unknown name, or a gated run without `settings.gate_cost`.
    """
    if not isinstance(policy, str):
        return PlannedRun(policy.name, policy, start, settings)
    chosen = make_policy(policy.removeprefix(GATE))
    if not policy.startswith(GATE):
        return PlannedRun(chosen.name, chosen, start, settings)
    if settings.gate_cost is None:
        raise ConfigError(
            f"policy {policy!r} weighs gains against costs, which needs predicted times; name --model and --hardware"
        )
    return GatedRun(f"{GATE}{chosen.name}", chosen, start, settings, settings.gate_cost)
