"""Runs of one policy over a trace, window after window.

A run names the placement that serves a window before it sees the window. StaticRun never moves. PlannedRun plans every
`interval` windows and moves at once, as engines with a fixed interval do. In a GatedRun the Rebalancer decides: it
plans when the load calls for it, and moves experts when that pays. A LiveRun repeats a server's own balancer.
"""

import heapq
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from moe_serve.eplb.load import Floats, LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlacementPolicy, Plan, Unkept
from moe_serve.eplb.rebalance.events import (
    REQUESTED,
    STARTED,
    Action,
    Decision,
    Event,
    PlanFailed,
    PlanReady,
    RequestPlan,
    RoundActivated,
    StartRound,
    WindowClosed,
    event_of,
    placement_in,
)
from moe_serve.eplb.rebalance.rebalancer import Rebalancer, make_rebalancer
from moe_serve.eplb.rebalance.settings import RebalanceSettings, SystemFacts
from moe_serve.eplb.replay.costs import Arrivals, arrivals
from moe_serve.eplb.replay.settings import ROUND_ENDS, WORLD_EVENTS, ReplaySettings, ServerReplay
from moe_serve.errors import ConfigError, PlacementError

GATE = "gate:"  # before the name of a policy
LIVE = "live"  # the name of the policy of a server


@dataclass(frozen=True, eq=False)
class Served:
    """The placement that serves the next window, and the events since the last one.

    fit, bound: [L] of the newest plan; None = no plan yet
    moved:      experts received; None = none
    earlier:    the placement of the window's first steps where experts moved in it, and the share of these steps
    unkept:     rules that plans made since the last window do not keep
    stall_s:    predicted pause of a gated run's migrations; None = ask the costs about `moved`
    """

    placement: Placement
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
    interval: int
    decisions: tuple[Decision, ...] = ()
    _recent: deque[LoadRecord] = field(default_factory=deque)
    _seen: int = 0
    _next: Served | None = None
    _fit: tuple[Floats, Floats] | None = None

    def before(self, first_step: int, num_steps: int) -> Served:
        next_up, self._next = self._next, None
        fit, bound = self._fit or (None, None)
        return next_up or Served(self.placement, fit, bound)

    def after(self, record: LoadRecord) -> None:
        self._recent.append(record)
        if len(self._recent) > self.settings.history:
            self._recent.popleft()
        self._seen += 1
        if self._seen < self.settings.history or self._seen % self.interval:
            return
        begin = time.process_time()
        like = self.placement
        plan = self.policy.plan(
            self.settings.request(tuple(self._recent), current=like, moe_layer_ids=like.moe_layer_ids)
        )
        plan_s = time.process_time() - begin
        moved = arrivals(self.placement, plan.placement, self.settings.topology)
        self.placement = plan.placement
        self._fit = (plan.balancedness, plan.bound)
        self._next = Served(
            self.placement,
            plan.balancedness,
            plan.bound,
            moved,
            int(moved.num_moves > 0),
            plan_s=plan_s,
            unkept=plan.unkept,
        )

    def end(self) -> Placement:
        return self.placement


class GatedRun:
    """Replays what a rebalancer would have done.

    A plan arrives `latency_steps` after its request. A window in which rounds are activated is served by the placement
    of its first step up to the last of these rounds, and then by that round's.
    """

    def __init__(self, name: str, policy: PlacementPolicy, rebalancer: Rebalancer, latency_steps: int) -> None:
        self.name = name
        self._policy, self._rebalancer, self._latency = policy, rebalancer, latency_steps
        self._events: list[tuple[int, int, Event]] = []
        self._order = itertools.count()
        self._fit: tuple[Floats, Floats] | None = None
        self._last = rebalancer.placement
        self._num_rounds = 0
        self._stall_s = 0.0
        self._plan_s = 0.0
        self._unkept: tuple[Unkept, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self._rebalancer.decisions

    def before(self, first_step: int, num_steps: int) -> Served:
        self._play_until(first_step)
        at_first = self._rebalancer.placement
        changed_at = self._play_until(first_step + num_steps - 1)
        placement = self._rebalancer.placement
        earlier = None if changed_at is None else (at_first, (changed_at - first_step) / num_steps)
        moved = None if placement is self._last else arrivals(self._last, placement, self._rebalancer.topology)
        fit, bound = self._fit or (None, None)
        served = Served(
            placement, fit, bound, moved, self._num_rounds, self._stall_s, self._plan_s, earlier, self._unkept
        )
        self._last, self._num_rounds, self._stall_s, self._plan_s, self._unkept = placement, 0, 0.0, 0.0, ()
        return served

    def _play_until(self, step: int) -> int | None:
        """Handles the events up to a step; returns when a round was activated last, or None."""
        changed_at = None
        while self._events and self._events[0][0] <= step:
            event = heapq.heappop(self._events)[2]
            self._handle(event)
            if isinstance(event, RoundActivated):
                changed_at = event.step
        return changed_at

    def after(self, record: LoadRecord) -> None:
        self._handle(WindowClosed(record.first_step + record.num_steps, record))

    def end(self) -> Placement:
        return self._rebalancer.placement

    def _handle(self, event: Event) -> None:
        if isinstance(event, RoundActivated):
            self._num_rounds += 1
        moving = self._rebalancer.migration
        for action in self._rebalancer.handle(event):
            self._act(action)
        started = self._rebalancer.migration
        if started is not None and started is not moving:
            self._stall_s += self._rebalancer.cost.migration_seconds(started, self._rebalancer.topology)

    def _act(self, action: Action) -> None:
        match action:
            case RequestPlan():
                self._push(self._answer(action))
            case StartRound():
                self._push(RoundActivated(action.step + 1, action.version))

    def _answer(self, action: RequestPlan) -> PlanReady | PlanFailed:
        try:
            plan = self._plan(action)
        except PlacementError as problem:
            return PlanFailed(action.step + self._latency, action.request_id, str(problem))
        return PlanReady(action.step + self._latency, action.request_id, plan)

    def _plan(self, action: RequestPlan) -> Plan:
        """Returns the policy's plan, and notes how well it fits the load it was made for."""
        begin = time.process_time()
        plan = self._policy.plan(action.request)
        self._plan_s += time.process_time() - begin
        self._unkept += plan.unkept
        layers = self._rebalancer.placement.num_layers
        fit, bound = self._fit or (np.full(layers, np.nan), np.full(layers, np.nan))
        fit, bound = fit.copy(), bound.copy()
        rows = list(action.layer_rows)
        fit[rows], bound[rows] = plan.balancedness, plan.bound
        self._fit = (fit, bound)
        return plan

    def _push(self, event: Event) -> None:
        heapq.heappush(self._events, (event.step, next(self._order), event))


class LiveRun(GatedRun):
    """Repeats what a server's own balancer did, from the records and events of its trace.

    Plans are made again, since the same policy gives the same plan. When each was ready, when rounds were live, which
    were given up and what a person did come from the trace, so decisions fall into the same windows as on the server.
    Other settings decide otherwise at some point: from there on the recorded plans and rounds no longer fit, and plans
    and rounds take as long as they do in any other replay.
    """

    def __init__(self, start: Placement, server: ServerReplay, latency_steps: int) -> None:
        self._server = server
        self._earlier: tuple[Decision, ...] = ()  # decisions of balancers before the running one
        self._recorded = deque(server.events)
        self._num_records = 0  # so far
        self._open: RequestPlan | StartRound | None = None  # the newest action
        self._parted: Decision | None = None  # since when, and why, the events of the trace no longer fit
        rebalancer = make_rebalancer(start, server.settings, server.facts)
        super().__init__(LIVE, make_policy(server.settings.policy), rebalancer, latency_steps)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return (*self._earlier, *super().decisions, *([] if self._parted is None else [self._parted]))

    def before(self, first_step: int, num_steps: int) -> Served:
        self._play(first_step)
        return super().before(first_step, 0)  # what happens in the window is played behind it, in the trace's order

    def after(self, record: LoadRecord) -> None:
        self._play()
        self._num_records += 1
        super().after(record)

    def end(self) -> Placement:
        self._play()
        return super().end()

    def _play(self, until_step: float = np.inf) -> None:
        """Repeats the recorded events before the next record, up to a step."""
        while self._recorded and self._recorded[0][0] <= self._num_records:
            fields = self._recorded[0][1]
            if fields["step"] > until_step:
                return
            self._recorded.popleft()
            self._repeat(fields)

    def _repeat(self, fields: dict[str, Any]) -> None:
        name, like, asked = fields["event"], self._rebalancer.placement, self._open
        if name == STARTED:
            self._begin(placement_in(fields, like), SystemFacts.from_event(fields))
            return
        if self._parted is not None and name not in WORLD_EVENTS:
            return
        of_plan = name in (REQUESTED, "plan_ready", "plan_failed")
        if of_plan and not (isinstance(asked, RequestPlan) and asked.request_id == fields.get("request_id")):
            self._part(int(fields["step"]), f"the server has {name}, which does not follow from these settings")
            return
        if name == "group_changed":
            self._events = []  # what a run that has parted still expects
        event = event_of(fields, like, lambda _: self._plan(cast(RequestPlan, asked)))
        try:
            if event is not None:
                self._handle(event)
        except PlacementError as problem:
            self._part(int(fields["step"]), f"{name} of the server does not fit these settings: {problem}")

    def _begin(self, placement: Placement, facts: SystemFacts) -> None:
        """Begins with another balancer, as after a restart of the server."""
        self._earlier = self.decisions
        self._rebalancer = make_rebalancer(placement, self._server.settings, facts)
        self._events, self._open, self._parted = [], None, None

    def _act(self, action: Action) -> None:
        self._open = action
        if self._parted is not None:
            super()._act(action)
            return
        following = self._recorded[0][1] if self._recorded else {}
        name = following.get("event")
        match action:
            case RequestPlan():
                fits = name == REQUESTED and following.get("request_id") == action.request_id
            case StartRound():  # the last one of a trace may have no end
                fits = name is None or (
                    name in ROUND_ENDS and following.get("version", action.version) == action.version
                )
        if not fits:
            self._part(action.step, f"the server did not do this, but has {name or 'no events'} next")

    def _part(self, step: int, why: str) -> None:
        """Stops following the recorded plans and rounds, and carries out itself what is still open."""
        if self._parted is not None:
            return
        self._parted = Decision(step, "replay", f"{why}; from here on plans and rounds are not those of the trace")
        if self._open is not None and self._rebalancer.state in ("planning", "moving"):
            super()._act(self._open)


def make_runs(policy: str | PlacementPolicy, start: Placement, settings: ReplaySettings) -> list[Run]:
    """Returns the runs of a policy: one for each of `settings.intervals`, where it plans at intervals.

    policy: a name of `make_policy`, "gate:<name>" behind the gate, "live" for what the server's own settings do, or a
            policy itself
    Raises ConfigError for an unknown name, a gated run of series or without `settings.gate_cost`, a live run without
    `settings.server`.
    """
    if not isinstance(policy, str):
        return _planned_runs(policy, start, settings)
    if policy == LIVE:
        if settings.server is None:
            raise ConfigError("policy 'live' is what a server's own balancer does; name its file with --like-server")
        return [LiveRun(start, settings.server, settings.latency_steps)]
    chosen = make_policy(policy.removeprefix(GATE))
    if chosen.name == "series" and settings.history < 2:
        raise ConfigError("policy 'series' plans for several windows; give --history 2 or more")
    if not policy.startswith(GATE):
        return _planned_runs(chosen, start, settings)
    if chosen.name == "series":
        raise ConfigError(
            "policy 'series' plans for several windows, and the gate plans for one load; use series without the gate, "
            f"or {GATE}incremental"
        )
    if settings.gate_cost is None:
        raise ConfigError(
            f"policy {policy!r} weighs gains against costs, which needs predicted times; name --model and --hardware"
        )
    gate = RebalanceSettings(rules=settings.plan_rules, expert_time=settings.planned_time(start.num_logical))
    rebalancer = Rebalancer(start, settings.topology, gate, settings.gate_cost)
    return [GatedRun(f"{GATE}{chosen.name}", chosen, rebalancer, settings.latency_steps)]


def _planned_runs(policy: PlacementPolicy, start: Placement, settings: ReplaySettings) -> list[Run]:
    several = len(settings.intervals) > 1
    names = {
        interval: f"{policy.name}, every {interval}" if several else policy.name for interval in settings.intervals
    }
    return [PlannedRun(name, policy, start, settings, interval) for interval, name in names.items()]
