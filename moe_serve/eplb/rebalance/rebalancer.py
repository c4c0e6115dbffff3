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
no plan is requested while a migration runs. When several plans or moves in a row fail, the rebalancer switches itself
off, and says so: `journal.alarm`.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.migration.plan import MigrationPlan, migration_to, plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import (
    Action,
    Decision,
    Event,
    GroupChanged,
    MigrationFailed,
    PlaceAt,
    PlanFailed,
    PlanNow,
    PlanReady,
    RequestPlan,
    RoundActivated,
    SwitchOff,
    WindowClosed,
)
from moe_serve.eplb.rebalance.gate import Gate
from moe_serve.eplb.rebalance.journal import Journal
from moe_serve.eplb.rebalance.keep_decision import keep_decision
from moe_serve.eplb.rebalance.move_costs import arrivals, costs_by_layer
from moe_serve.eplb.rebalance.requests import check_fit, placed_as, request_for, with_rows
from moe_serve.eplb.rebalance.running import Cause, RunningMigration
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.eplb.rebalance.window_watch import WindowWatch
from moe_serve.eplb.repair import with_second_slots
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]
State = Literal["watching", "planning", "moving", "off"]


class Rebalancer:
    """Decides when a plan is worth asking for, which of its layers are worth moving, and in which rounds they move."""

    def __init__(self, placement: Placement, topology: Topology, settings: RebalanceSettings, cost: GateCost) -> None:
        """placement: in use at the start, and the baseline of the regret bound;  cost: predicts times for the gate."""
        if topology.num_ranks != placement.num_ranks:
            raise PlacementError(f"topology has {topology.num_ranks} ranks, the placement {placement.num_ranks} ranks")
        self.cost = cost
        self._settings = settings
        self.topology = topology
        self._placement = placement
        self._gate = Gate(placement, cost, settings)
        self._watch = WindowWatch(placement, settings.cooldown_windows, cost.learns)
        self._request: RequestPlan | None = None
        self._next_request_id = 0
        self._running: RunningMigration | None = None
        self.journal = Journal(settings.max_failures)

    @property
    def placement(self) -> Placement:
        """The placement in use; its version counts activated rounds."""
        return self._placement

    @property
    def state(self) -> State:
        """watching: neither a plan nor a migration runs; planning: waits for PlanReady; moving: for RoundActivated.

        off: switched off, and no migration runs any more.
        """
        if self._running is not None:
            return "moving"
        if self.journal.alarm:
            return "off"
        return "watching" if self._request is None else "planning"

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.journal.decisions

    @property
    def migration(self) -> MigrationPlan | None:
        """The running migration, or None."""
        return None if self._running is None else self._running.plan

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Takes one event and returns what to do now, in order; () = nothing.

        Raises PlacementError when a record does not fit the placement, a RoundActivated names another version than the
        running StartRound, or a person's command cannot be carried out, which then changes nothing. An invalid plan is
        no error: it ends as a "failed" decision.
        """
        match event:
            case WindowClosed():
                return self._window_closed(event.step, event.record)
            case PlanReady():
                return self._plan_ready(event)
            case PlanFailed():
                if self._request is None or event.request_id != self._request.request_id:
                    return ()
                self._request = None
                return self._fail(event.step, f"no plan: {event.reason}")
            case RoundActivated():
                return self._round_activated(event)
            case MigrationFailed():
                return self._migration_failed(event)
            case GroupChanged():
                return self._group_changed(event)
            case PlanNow():
                return self._plan_now(event.step)
            case PlaceAt():
                return self._place_at(event)
            case SwitchOff():
                self._request = None
                self.journal.switch_off(event.step, event.reason)
                return ()

    def _window_closed(self, step: int, record: LoadRecord) -> tuple[Action, ...]:
        check_fit(record, self._placement)
        window = self._watch.close(record, self._placement, self._running is not None)
        if window is None:
            return ()
        self._gate.close_window(record, window)
        if self.state != "watching" or self._watch.num_windows <= self._settings.warmup_windows:
            return ()
        if not window.unseen:  # it measures no move, but it shows whether the load is still that of the plan
            return self._ask(step) if self._gate.has_shifted else ()
        if not self._watch.is_due():
            return ()
        verdict = self._gate.judge()
        if verdict is not None:
            promised_s, realised_s = verdict.totals_s
            self.journal.add(Decision(step, "watch", str(verdict), gain_s=promised_s, realised_s=realised_s))
        return self._revert(step) if self._gate.capital_s < 0 else self._ask(step)

    def _ask(self, step: int) -> tuple[Action, ...]:
        load, current = self._gate.planning_load(), self._placement
        balance = balancedness(rank_load(load[0], current), current.live_ranks)
        free = self._gate.free_layers(current)
        worst = float(balance[free].min(initial=1.0))
        if worst >= self._settings.trigger:
            return ()
        rows = np.flatnonzero(free & (balance < self._settings.release))
        return self._request_plan(step, rows, f"balancedness is down to {worst:.3f}; layers to plan: {len(rows)}")

    def _request_plan(self, step: int, rows: NDArray[np.int64], reason: str) -> tuple[Action, ...]:
        self._watch.plan_asked(step)
        number, rules = self._next_request_id, self._settings
        request = request_for(self._placement, rows, self._gate.planning_load(), self.topology, rules)
        layer_rows = tuple(rows.tolist())
        self._request = RequestPlan(step, number, layer_rows, request, rules.round_limits, rules.relabel)
        self._next_request_id += 1
        self.journal.add(Decision(step, "plan", reason, layer_rows))
        return (self._request,)

    def _plan_ready(self, event: PlanReady) -> tuple[Action, ...]:
        asked = self._request
        if asked is None or event.request_id != asked.request_id:
            return ()
        self._request = None
        try:
            move = event.migration or migration_to(asked.request, event.plan, asked.limits, asked.relabel)
            target = with_rows(self._placement, move.target, asked.layer_rows)
        except PlacementError as error:
            return self._fail(event.step, f"the plan is not legal: {error}")
        gains = self._gate.gains(self._placement, target)
        costs, price = costs_by_layer(self.cost, move, self._placement, target, self.topology)
        revert_costs = price * arrivals(target, self._gate.baseline)
        rows = self._gate.choose_layers(gains, costs, revert_costs, self._placement, target)
        if not len(rows):
            margin = self._settings.gain_margin
            self.journal.add(keep_decision(event.step, target, gains, costs, self._gate, margin))
            self._watch.rest()
            self.journal.succeed()
            return ()
        return self._start(event.step, target, rows, gains, costs)

    def _revert(self, step: int) -> tuple[Action, ...]:
        """Reverts the layers that lose against the baseline, once the regret bound is used up."""
        baseline = self._gate.baseline
        move = self._exact_migration(baseline)
        costs, _ = costs_by_layer(self.cost, move, self._placement, baseline, self.topology)
        rows = self._gate.worth_reverting(self._placement, costs)
        if not len(rows):
            return ()
        gains = self._gate.gains(self._placement, baseline)
        self._gate.back_off(np.isin(np.arange(len(costs)), rows))
        return self._start(step, baseline, rows, gains, costs, why="the regret bound is used up; going back ")

    def _start(
        self, step: int, wanted: Placement, rows: NDArray[np.int64], gains: Floats, costs: Floats, why: str = ""
    ) -> tuple[Action, ...]:
        """Begins to move these rows. gains: [L] seconds per window; costs: [L] seconds; why: beyond the gain"""
        table = self._placement.physical_to_logical.copy()
        table[rows] = wanted.physical_to_logical[rows]
        move = self._exact_migration(replace(self._placement, physical_to_logical=table))
        if not move.rounds:
            return ()
        self._gate.start_move(self._placement, rows, gains, costs)
        gain_s, cost_s = float(gains[rows].sum()), float(costs[rows].sum())
        reason = f"{move}: {why}saves {gain_s:.3g} s a window for {cost_s:.3g} s"
        worth_s = float((gains * self._gate.reach)[rows].sum())
        self.journal.add(Decision(step, "move", reason, tuple(rows.tolist()), worth_s, cost_s))
        return self._run(step, move, "move")

    def _run(self, step: int, move: MigrationPlan, cause: Cause) -> tuple[Action, ...]:
        self._running = RunningMigration(move, self._placement, self._settings, cause)
        return (self._running.start_round(step),)

    def _round_activated(self, event: RoundActivated) -> tuple[Action, ...]:
        running = self._running
        if running is None:
            raise PlacementError(
                f"round of version {event.version} is active at step {event.step}, but no round is running"
            )
        finished = running.activate(event.step, event.version)
        self._placement = running.placement
        self.cost.learn_round(finished, event.move_s, event.pause_s)
        if not running.is_done and not self.journal.alarm:
            return (running.start_round(event.step),)
        self._running = None
        self._watch.complete(event.step)
        self._watch.rest()
        if not running.is_done:
            self.journal.add(Decision(event.step, "failed", "the rest of the move is given up: it is switched off"))
            return ()
        self.journal.succeed()
        if running.cause != "move":
            self._gate.rebase(self._placement)
        self.journal.add(Decision(event.step, "done", f"placement {self._placement.version} is live"))
        return ()

    def _migration_failed(self, event: MigrationFailed) -> tuple[Action, ...]:
        running, self._running = self._running, None
        if running is None:
            return ()
        self._watch.complete(event.step)
        self._fail(event.step, f"round {running.num_started} was abandoned: {event.reason}")
        return self._restore(event.step) if running.cause == "restore" and not self.journal.alarm else ()

    def _group_changed(self, event: GroupChanged) -> tuple[Action, ...]:
        """Begins anew with the ranks that take part; whatever failed before may work with them."""
        self._request = self._running = None
        self._placement = event.placement
        self._watch.begin_anew(event.step, event.placement)
        self.journal.switch_on()
        self._gate.rebase(event.placement)
        reason = f"ranks {event.placement.live_ranks.tolist()} of {event.placement.num_ranks} hold the experts now"
        self.journal.add(Decision(event.step, "group", reason))
        return self._restore(event.step)

    def _restore(self, step: int) -> tuple[Action, ...]:
        """Puts a second slot back under experts that have only one, whatever it costs: the next loss would end them."""
        wanted = with_second_slots(self._placement)
        if wanted is self._placement:
            return ()
        return self._move_at_once(step, wanted, "restore", "experts on one rank only get a second one")

    def _plan_now(self, step: int) -> tuple[Action, ...]:
        self._check_idle()
        if not self._gate.has_load:
            raise PlacementError(
                "no load is recorded yet; send requests and wait for the end of a record (eplb.record_window_steps)"
            )
        self.journal.switch_on()
        self._gate.free_all()
        rows = np.arange(self._placement.num_layers)
        return self._request_plan(step, rows, f"a plan of all {len(rows)} layers is asked for by hand")

    def _place_at(self, event: PlaceAt) -> tuple[Action, ...]:
        self._check_idle()
        wanted = placed_as(self._placement, event.table)
        self.journal.switch_on()
        return self._move_at_once(event.step, wanted, "manual", "set by hand")

    def _move_at_once(
        self, step: int, wanted: Placement, cause: Literal["restore", "manual"], why: str
    ) -> tuple[Action, ...]:
        """Begins to move to this placement, whatever that costs."""
        move = self._exact_migration(wanted)
        self.journal.add(Decision(step, cause, f"{move}: {why}", move.layer_rows))
        return self._run(step, move, cause) if move.rounds else ()

    def _check_idle(self) -> None:
        if self._running is not None:
            raise PlacementError(f"a move is under way, {self._running.plan}; try again when it is done")
        if self._request is not None:
            raise PlacementError("a plan is being made; try again when it is ready")

    def _exact_migration(self, wanted: Placement) -> MigrationPlan:
        return plan_migration(self._placement, wanted, self.topology, self._settings.round_limits, "exact")

    def _fail(self, step: int, reason: str) -> tuple[Action, ...]:
        """Notes that a plan or a move came to nothing, and gives all layers a rest. The placement in use stays."""
        self._gate.back_off(np.ones(self._placement.num_layers, dtype=bool))
        self.journal.fail(step, reason)
        return ()
