"""Decides when to move experts: a pure state machine between load records and placement changes.

It never plans, waits, reads a clock or uses a network: events come in through `handle`, actions go out, and the same
events always give the same actions. The live system, the replay and the simulator drive this one class; they differ
only in who turns RequestPlan into PlanReady and StartRound into RoundActivated, and after how many steps.

    rebalancer = Rebalancer(placement, topology, settings, cost)
    for action in rebalancer.handle(WindowClosed(step, record)):
        match action:
            case RequestPlan(): ...   # ask a policy; later: rebalancer.handle(PlanReady(step, action.request_id, plan))
            case StartRound(): ...    # transfer; later: rebalancer.handle(RoundActivated(step, action.version))

Carry out every returned action, and call handle() in step order. At most one plan and one migration run at a time, and
no plan is requested while a migration runs.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.model import GateCost
from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.migration.plan import MigrationPlan, plan_migration
from moe_serve.eplb.migration.relabel import Relabel
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import (
    Action,
    Decision,
    DecisionKind,
    Event,
    MigrationFailed,
    PlanFailed,
    PlanReady,
    RequestPlan,
    RoundActivated,
    WindowClosed,
)
from moe_serve.eplb.rebalance.gate import Gate
from moe_serve.eplb.rebalance.requests import arrivals, ranks_without_experts, request_for, with_plan
from moe_serve.eplb.rebalance.running import RunningMigration
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]
State = Literal["watching", "planning", "moving"]


class Rebalancer:
    """Decides when a plan is worth asking for, which of its layers are worth moving, and in which rounds they move."""

    def __init__(self, placement: Placement, topology: Topology, settings: RebalanceSettings, cost: GateCost) -> None:
        """placement: in use at the start, and the baseline of the regret bound;  cost: predicts times for the gate."""
        if topology.num_ranks != placement.num_ranks:
            raise PlacementError(
                f"topology has {topology.num_ranks} ranks, the placement {placement.num_ranks}; give its own"
            )
        self._settings = settings
        self._topology = topology
        self._placement = placement
        self._gate = Gate(placement, cost, settings)
        self._before = placement  # in use at the beginning of the running window
        self._live_step = 0  # when the placement in use was complete
        self._num_windows = 0
        self._rest = 0  # whole windows to skip before the next plan
        self._request: RequestPlan | None = None
        self._next_request_id = 0
        self._running: RunningMigration | None = None
        self._decisions: list[Decision] = []

    @property
    def placement(self) -> Placement:
        """The placement in use; its version counts activated rounds."""
        return self._placement

    @property
    def state(self) -> State:
        """watching: neither a plan nor a migration runs; planning: waits for PlanReady; moving: for RoundActivated."""
        if self._running is not None:
            return "moving"
        return "watching" if self._request is None else "planning"

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions so far, oldest first."""
        return tuple(self._decisions)

    @property
    def migration(self) -> MigrationPlan | None:
        """The running migration, or None."""
        return None if self._running is None else self._running.plan

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Takes one event and returns what to do now, in order; () = nothing.

        Raises PlacementError when a record does not fit the placement, or a RoundActivated names another version
        than the running StartRound. An invalid plan is no error: it ends as a "failed" decision.
        """
        match event:
            case WindowClosed():
                return self._window_closed(event.step, event.record)
            case PlanReady():
                return self._plan_ready(event)
            case PlanFailed():
                if self._request is not None and event.request_id == self._request.request_id:
                    self._request = None
                    self._fail(event.step, f"no plan: {event.reason}")
                return ()
            case RoundActivated():
                return self._round_activated(event)
            case MigrationFailed():
                if self._running is not None:
                    number = self._running.num_started
                    self._running, self._live_step = None, event.step
                    self._fail(event.step, f"round {number} was abandoned: {event.reason}")
                return ()

    def _window_closed(self, step: int, record: LoadRecord) -> tuple[Action, ...]:
        shape = (self._placement.num_layers, self._placement.num_logical)
        if record.tokens.shape != shape:
            raise PlacementError(
                f"the record of step {record.first_step} has shape {record.tokens.shape}, the placement {shape}; feed "
                "records of the model that is served"
            )
        before, self._before = self._before, self._placement
        if not record.num_steps or not record.tokens.any():
            return ()  # an idle window says nothing
        whole = record.first_step >= self._live_step and self._running is None
        self._gate.close_window(record, before, self._placement, whole)
        self._num_windows += 1
        if self.state != "watching" or not whole or self._num_windows <= self._settings.warmup_windows:
            return ()
        self._rest -= 1
        if self._rest > 0:
            return ()
        learned = self._gate.judge()
        if learned:
            self._decide(step, "watch", learned)
        return self._revert(step) if self._gate.capital_s < 0 else self._ask(step)

    def _ask(self, step: int) -> tuple[Action, ...]:
        load, current = self._gate.planning_load(), self._placement
        live = np.setdiff1d(np.arange(current.num_ranks), ranks_without_experts(current))
        balance = balancedness(rank_load(load[0], current), live)
        free = self._gate.free_layers(current)
        worst = float(balance[free].min(initial=1.0))
        if worst >= self._settings.trigger:
            return ()
        rows = np.flatnonzero(free & (balance < self._settings.release))
        request = request_for(current, rows, load, self._topology, self._settings.rules)
        self._request = RequestPlan(step, self._next_request_id, tuple(rows.tolist()), request)
        self._next_request_id += 1
        self._decide(step, "plan", f"balancedness is down to {worst:.3f}; {len(rows)} layers to plan", rows)
        return (self._request,)

    def _plan_ready(self, event: PlanReady) -> tuple[Action, ...]:
        asked = self._request
        if asked is None or event.request_id != asked.request_id:
            return ()
        self._request = None
        try:
            move = self._migration_to(with_plan(self._placement, event.plan, asked.layer_rows))
        except PlacementError as error:
            self._fail(event.step, f"the plan is not legal: {error}")
            return ()
        gains = self._gate.gains(self._placement, move.target)
        costs, price = self._costs(move)
        revert_costs = price * arrivals(move.target, self._gate.baseline)
        rows = self._gate.choose_layers(gains, costs, revert_costs, self._placement, move.target)
        if not len(rows):
            worth = gains * self._gate.reach
            pays = bool((worth[costs > 0] >= self._settings.gain_margin * costs[costs > 0]).any())
            reason = "worth it, but the regret bound does not cover the risk" if pays else "no layer is worth its move"
            self._decide(event.step, "keep", reason, (), float(np.maximum(worth, 0).sum()), float(costs.sum()))
            self._rest = self._settings.cooldown_windows
            return ()
        return self._start(event.step, move.target, rows, gains, costs)

    def _revert(self, step: int) -> tuple[Action, ...]:
        """Reverts the layers that lose against the baseline, once the regret bound is used up."""
        baseline = self._gate.baseline
        costs, _ = self._costs(self._migration_to(baseline, "exact"))
        rows = self._gate.worth_reverting(self._placement, costs)
        if not len(rows):
            return ()
        failed = np.zeros(len(costs), dtype=bool)
        failed[rows] = True
        gains = self._gate.gains(self._placement, baseline)
        self._gate.back_off(failed)
        return self._start(step, baseline, rows, gains, costs, why="the regret bound is used up; going back ")

    def _start(
        self, step: int, wanted: Placement, rows: NDArray[np.int64], gains: Floats, costs: Floats, why: str = ""
    ) -> tuple[Action, ...]:
        """Begins to move these rows. gains: [L] seconds per window; costs: [L] seconds; why: beyond the gain"""
        table = self._placement.physical_to_logical.copy()
        table[rows] = wanted.physical_to_logical[rows]
        move = self._migration_to(replace(self._placement, physical_to_logical=table), "exact")
        if not move.rounds:
            return ()
        self._gate.start_move(self._placement, rows, gains, costs)
        self._running = RunningMigration(move, self._placement, self._settings)
        gain_s, cost_s = float(gains[rows].sum()), float(costs[rows].sum())
        reason = (
            f"{len(rows)} layers, {move.num_transfers} experts in {len(move.rounds)} rounds: {why}saves {gain_s:.3g} s "
            f"a window for {cost_s:.3g} s"
        )
        self._decide(step, "move", reason, rows, float((gains * self._gate.reach)[rows].sum()), cost_s)
        return (self._running.start_round(step),)

    def _round_activated(self, event: RoundActivated) -> tuple[Action, ...]:
        if self._running is None:
            raise PlacementError(
                f"round of version {event.version} was activated at step {event.step}, but no round is running; "
                "activate rounds in the order of StartRound"
            )
        self._running.activate(event.step, event.version)
        self._placement = self._running.placement
        if not self._running.is_done:
            return (self._running.start_round(event.step),)
        self._running = None
        self._rest, self._live_step = self._settings.cooldown_windows, event.step
        self._decide(event.step, "done", f"placement {self._placement.version} is live")
        return ()

    def _migration_to(self, wanted: Placement, relabel: Relabel | None = None) -> MigrationPlan:
        return plan_migration(
            self._placement, wanted, self._topology, self._settings.max_incoming, relabel or self._settings.relabel
        )

    def _costs(self, move: MigrationPlan) -> tuple[Floats, float]:
        """Returns the cost of a migration in seconds, shared out over layers by transfers [L], and that of one."""
        seconds = self._gate.cost.migration_seconds(move, self._topology)
        received = arrivals(self._placement, move.target)
        price = seconds / max(float(received.sum()), 1.0)
        return price * received, price

    def _fail(self, step: int, reason: str) -> None:
        self._gate.back_off(np.ones(self._placement.num_layers, dtype=bool))
        self._decide(step, "failed", reason)

    def _decide(
        self,
        step: int,
        kind: DecisionKind,
        reason: str,
        rows: NDArray[np.int64] | tuple[int, ...] = (),
        gain_s: float = 0.0,
        cost_s: float = 0.0,
    ) -> None:
        self._decisions.append(Decision(step, kind, reason, tuple(int(r) for r in rows), gain_s, cost_s))
