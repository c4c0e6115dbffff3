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

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.cost.measured import MeasuredCost, PriorPrices
from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.migration.moves import MigrationRound, RoundLimits, apply_round
from moe_serve.eplb.migration.plan import MigrationPlan, migration_to, plan_migration
from moe_serve.eplb.placement import Placement, count_moves
from moe_serve.eplb.policies.policy import PlanRequest, PlanRules, planned_split
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
    StartRound,
    SwitchOff,
    WindowClosed,
)
from moe_serve.eplb.rebalance.gate import ClosedWindow, Gate
from moe_serve.eplb.rebalance.settings import BalancerSettings, RebalanceSettings, SystemFacts
from moe_serve.eplb.repair import with_second_slots
from moe_serve.eplb.split.limit import where_no_split_helps
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]
# Where prices are learned from windows, the next plan waits for a window without a move after this many with moves.
MOST_WITHOUT_WHOLE = 4
MAX_DECISIONS = 10_000  # that are remembered
State = Literal["watching", "planning", "moving", "off"]
# move: a plan that pays; restore: second slots for experts on one rank; manual: a person's placement
_Cause = Literal["move", "restore", "manual"]


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
        self._running: _RunningMigration | None = None
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
        _check_fit(record, self._placement)
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
        request = _request_for(self._placement, rows, self._gate.planning_load(), self.topology, rules)
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
            target = _with_rows(self._placement, move.target, asked.layer_rows)
        except PlacementError as error:
            return self._fail(event.step, f"the plan is not legal: {error}")
        gains = self._gate.planned_gains(self._placement, target)
        costs, price = _costs_by_layer(self.cost, move, self._placement, target, self.topology)
        revert_costs = price * _arrivals(target, self._gate.baseline, self.topology, self.cost.off_node_weight)
        rows = self._gate.choose_layers(gains, costs, revert_costs, self._placement, target)
        if not len(rows):
            self._keep(event.step, target, gains, costs)
            return ()
        return self._start(event.step, target, rows, gains, costs)

    def _keep(self, step: int, target: Placement, gains: Floats, costs: Floats) -> None:
        """Keeps the placement and notes why: the gate chose no layer of `target`. gains, costs: as for `_start`"""
        worth = gains * self._gate.reach
        pays = bool((worth[costs > 0] >= self._settings.gain_margin * costs[costs > 0]).any())
        reason = "worth it, but the regret bound does not cover the risk" if pays else "no layer is worth its move"
        no_split = where_no_split_helps(self._gate.planning_load()[0], target)
        if no_split is not None:
            reason += f". As planned: {no_split}"
        self.journal.add(Decision(step, "keep", reason, (), float(worth[worth > 0].sum()), float(costs.sum())))
        self._watch.rest()
        self.journal.succeed()

    def _revert(self, step: int) -> tuple[Action, ...]:
        """Reverts the layers that lose against the baseline, once the regret bound is used up."""
        baseline = self._gate.baseline
        move = self._exact_migration(baseline)
        costs, _ = _costs_by_layer(self.cost, move, self._placement, baseline, self.topology)
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

    def _run(self, step: int, move: MigrationPlan, cause: _Cause) -> tuple[Action, ...]:
        self._running = _RunningMigration(move, self._placement, cause)
        return (self._running.start_round(step),)

    def _round_activated(self, event: RoundActivated) -> tuple[Action, ...]:
        running = self._running
        if running is None:
            raise PlacementError(
                f"round of version {event.version} is active at step {event.step}, but no round is running"
            )
        finished = running.activate(event.step, event.version)
        self._placement = running.placement
        self.cost.learn_round(finished, self.topology, event.move_s, event.pause_s)
        if not running.is_done and not self.journal.alarm:
            return (running.start_round(event.step),)
        self._running = None
        self._watch.complete(event.step)
        self._watch.rest()
        if not running.is_done:
            self.journal.add(Decision(event.step, "failed", "the rest of the move is dropped: switched off"))
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
        wanted = with_second_slots(self._placement, self.topology.num_nodes)
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
        wanted = _placed_as(self._placement, event.table)
        self.journal.switch_on()
        return self._move_at_once(event.step, wanted, "manual", "set by hand")

    def _move_at_once(
        self, step: int, wanted: Placement, cause: Literal["restore", "manual"], why: str
    ) -> tuple[Action, ...]:
        """Begins to move to this placement without weighing the cost."""
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


def make_rebalancer(placement: Placement, settings: BalancerSettings, facts: SystemFacts) -> Rebalancer:
    """Returns the rebalancer of one system; the prices that it has learned are still those of the facts."""
    topology = Topology(facts.num_nodes, placement.num_ranks // facts.num_nodes)
    eagerness = RebalanceSettings(
        trigger=settings.trigger,
        release=max(settings.trigger, RebalanceSettings.release),
        horizon_windows=settings.horizon_windows,
        round_limits=RoundLimits(settings.staging_slots, settings.pair_moves, settings.node_moves),
        rules=PlanRules(planned_split=planned_split(facts.split), two_nodes=facts.survives_loss),
        min_replicas=2 if facts.survives_loss else 1,
        expert_time=facts.expert_time,
    )
    prices = PriorPrices(facts.token_s, facts.expert_s, facts.off_node_s)
    cost = MeasuredCost(prices, settings.move_step_share, facts.expert_time)
    return Rebalancer(placement, topology, eagerness, cost)


class WindowWatch:
    """Decides what each closed window measures and when the next plan is due, from the steps of plans and moves."""

    def __init__(self, placement: Placement, cooldown_windows: int, learns: bool) -> None:
        """cooldown_windows: see RebalanceSettings;  learns: prices are learned from whole windows"""
        self._before = placement  # in use at the beginning of the running window
        self._cooldown, self._learns = cooldown_windows, learns
        self._live_step = 0  # when the placement in use was complete
        self._asked_step = 0  # when the last plan was asked for: later load is new to it
        self._rest = 0  # unseen windows to skip before the next plan
        self._num_partial = 0  # windows since the last whole one
        self.num_windows = 0

    def plan_asked(self, step: int) -> None:
        """Notes that a plan is asked for at this step."""
        self._asked_step = step

    def rest(self) -> None:
        """Begins the cooldown."""
        self._rest = self._cooldown

    def complete(self, step: int) -> None:
        """Notes that the placement in use is complete from this step on: its migration ended, or was given up."""
        self._live_step = step

    def begin_anew(self, step: int, placement: Placement) -> None:
        """Notes that another group of ranks serves from this step on."""
        self._before, self._live_step = placement, step
        self.rest()

    def close(self, record: LoadRecord, placement: Placement, is_moving: bool) -> ClosedWindow | None:
        """Returns what the window that has just closed measures; None without load."""
        before, self._before = self._before, placement
        if not record.num_steps or not record.tokens.any():
            return None
        self.num_windows += 1
        whole = not is_moving and record.first_step >= self._live_step
        self._num_partial = 0 if whole else self._num_partial + 1
        return ClosedWindow(before, placement, whole, not is_moving and record.first_step >= self._asked_step)

    def is_due(self) -> bool:
        """Counts an unseen window. Returns whether the cooldown is over, so that a plan may be asked for."""
        self._rest -= 1
        return self._rest <= 0 and not (self._learns and self._num_partial >= MOST_WITHOUT_WHOLE)


def _request_for(
    current: Placement,
    rows: NDArray[np.int64],
    load: tuple[Floats, Floats | None, Floats | None],
    topology: Topology,
    settings: RebalanceSettings,
) -> PlanRequest:
    """Returns the request for these rows of the placement. load: of all layers, as from `Gate.planning_load`."""
    tokens, by_source, activations = load
    part = replace(
        current,
        physical_to_logical=current.physical_to_logical[rows],
        moe_layer_ids=tuple(current.moe_layer_ids[row] for row in rows),
    )
    lost = np.setdiff1d(np.arange(current.num_ranks), current.live_ranks)
    rules = replace(settings.rules, min_replicas=_replicas_that_fit(current, settings.min_replicas))
    return rules.request(
        tokens[rows],
        topology,
        current.num_slots,
        current=part,
        by_source=None if by_source is None else by_source[rows],
        activations=None if activations is None else activations[rows],
        excluded_ranks=tuple(lost.tolist()),
    )


def _replicas_that_fit(placement: Placement, wanted: int) -> int:
    """Returns on how many ranks each expert can be, at most as many as wanted."""
    num_live = len(placement.live_ranks)
    return max(1, min(wanted, num_live, num_live * placement.slots_per_rank // placement.num_logical))


def _with_rows(current: Placement, part: Placement, rows: tuple[int, ...]) -> Placement:
    """Returns the placement with another one's layers in these rows. Raises PlacementError where they do not fit."""
    have = (part.num_layers, part.num_logical, part.num_slots)
    need = (len(rows), current.num_logical, current.num_slots)
    if have != need:
        raise PlacementError(f"the plan has (layers, experts, slots) = {have}, the request {need}")
    table = current.physical_to_logical.copy()
    table[list(rows)] = part.physical_to_logical
    return replace(current, physical_to_logical=table)


def _check_fit(record: LoadRecord, placement: Placement) -> None:
    """Raises PlacementError where the record is of another model than the placement."""
    shape = (placement.num_layers, placement.num_logical)
    if record.tokens.shape != shape:
        raise PlacementError(
            f"the record of step {record.first_step} has shape {record.tokens.shape}, the placement {shape}; feed "
            "records of the model that is served"
        )


def _placed_as(current: Placement, table: Sequence[Sequence[int]]) -> Placement:
    """Returns the placement with these rows: [layers][slots] logical experts, -1 = empty.

    Raises PlacementError, saying why, where it does not fit: another shape, an expert without a slot, a slot of a rank
    that takes no part.
    """
    have = (len(table), sorted({len(row) for row in table}))
    need = (current.num_layers, [current.num_slots])
    if have != need:
        raise PlacementError(
            f"the placement has {have[0]} layers of {have[1]} slots, the one in use {need[0]} of {need[1]}; give "
            "[layers][slots] of logical experts, as GET /eplb/placement shows them"
        )
    # The placement in use may be one of a group without lost ranks, which lets experts be lost; a new one must not.
    wanted = replace(current, physical_to_logical=np.array(table, dtype=np.int64), allow_lost=False)
    lost = np.setdiff1d(wanted.live_ranks, current.live_ranks)
    if len(lost):
        raise PlacementError(
            f"ranks {lost.tolist()} take no part now, and their slots must stay empty (-1); the others are ranks "
            f"{current.live_ranks.tolist()}"
        )
    return wanted


def _costs_by_layer(
    cost: GateCost, move: MigrationPlan, current: Placement, target: Placement, topology: Topology
) -> tuple[Floats, float]:
    """Returns the cost of a migration in seconds, shared out over layers by transfers [L], and that of one in a node.

    move: from current to target; of all layers, or only of those that change
    """
    received = _arrivals(current, target, topology, cost.off_node_weight)
    price = cost.migration_seconds(move, topology) / max(float(received.sum()), 1.0)
    return price * received, price


def _arrivals(old: Placement, new: Placement, topology: Topology, off_node_weight: float) -> Floats:
    """Returns [L], how many experts ranks of each layer must receive to get from old to new.

    off_node_weight: of one that its node has not
    """
    out = np.zeros(old.num_layers)
    changed = np.flatnonzero((old.physical_to_logical != new.physical_to_logical).any(axis=1))
    before, after = old.by_rank[changed], new.by_rank[changed]
    out[changed] = count_moves(before, after)
    if off_node_weight > 1 and topology.num_nodes > 1:
        of_nodes = before.reshape(len(changed), topology.num_nodes, -1).repeat(topology.ranks_per_node, axis=1)
        out[changed] += (off_node_weight - 1) * count_moves(of_nodes, after)
    return out


class _RunningMigration:
    """Hands out the rounds of a plan in order and applies each to the placement once it is active."""

    def __init__(self, plan: MigrationPlan, placement: Placement, cause: _Cause) -> None:
        self.plan = plan
        self.cause = cause
        self.placement = placement  # after the rounds that are active
        self.num_started = 0

    @property
    def is_done(self) -> bool:
        """Whether the rounds handed out so far are all there are."""
        return self.num_started == len(self.plan.rounds)

    def start_round(self, step: int) -> StartRound:
        """Returns the next round to carry out."""
        following = self.plan.rounds[self.num_started]
        self.num_started += 1
        return StartRound(step, following, self.placement.version + 1)

    def activate(self, step: int, version: int) -> MigrationRound:
        """Applies the round that was started last, and returns it.

        Raises PlacementError when `version` is not that of this round.
        """
        if version != self.placement.version + 1:
            raise PlacementError(
                f"round of version {version} was activated at step {step}, but version {self.placement.version + 1} is "
                "the running one; activate rounds in the order of StartRound"
            )
        finished = self.plan.rounds[self.num_started - 1]
        self.placement = apply_round(self.placement, finished)
        return finished


class Journal:
    """The decisions of one rebalancer, oldest first; the newest MAX_DECISIONS are kept.

    alarm: why the rebalancer is switched off; "" = it is not
    """

    def __init__(self, max_failures: int) -> None:
        """max_failures: failures in a row after which the rebalancer switches itself off"""
        self.alarm = ""
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._num_decisions = 0
        self._max_failures = max_failures
        self._failures = 0

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions that are remembered."""
        return tuple(self._decisions)

    def since(self, number: int) -> tuple[list[Decision], int]:
        """Returns the decisions after the first `number` ones, and how many there are now."""
        num_new = min(self._num_decisions - number, len(self._decisions))
        return [self._decisions[index] for index in range(-num_new, 0)], self._num_decisions

    def add(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._num_decisions += 1

    def fail(self, step: int, reason: str) -> None:
        """Notes a plan or a move that came to nothing; switches off after too many in a row."""
        self.add(Decision(step, "failed", reason))
        self._failures += 1
        if self._failures >= self._max_failures and not self.alarm:
            self.switch_off(step, f"{self._failures} plans or moves in a row came to nothing, the last one: {reason}")

    def switch_off(self, step: int, reason: str) -> None:
        self.alarm = f"the balancer is switched off: {reason}"
        self.add(Decision(step, "off", f"{self.alarm}; POST /eplb/rebalance switches it on again"))

    def succeed(self) -> None:
        """Forgets the failures so far: something worked, or there is a reason why it may work now."""
        self._failures = 0

    def switch_on(self) -> None:
        self._failures, self.alarm = 0, ""
