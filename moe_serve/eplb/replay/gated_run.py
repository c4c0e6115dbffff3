"""Runs in which the Rebalancer decides: it plans when the load calls for it, and moves experts when that pays."""

import heapq
import itertools
import time

import numpy as np

from moe_serve.eplb.load import Floats, LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlacementPolicy, Plan, Unkept
from moe_serve.eplb.rebalance.events import (
    Action,
    Decision,
    Event,
    PlanFailed,
    PlanReady,
    RequestPlan,
    RoundActivated,
    StartRound,
    WindowClosed,
)
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.eplb.replay.arrivals import arrivals
from moe_serve.eplb.replay.run import Served
from moe_serve.errors import PlacementError


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
            placement, None, fit, bound, moved, self._num_rounds, self._stall_s, self._plan_s, earlier, self._unkept
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
                self._push(RoundActivated(action.step + max(action.num_steps, 1), action.version))

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
