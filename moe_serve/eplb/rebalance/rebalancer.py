"""When to move experts: a pure state machine between load records and placement changes.

It never plans, waits, reads a clock or talks to a network: events come in through `handle`, actions go out, and the
same events always give the same actions. So the live system, the replay tool and the simulator drive this one object;
they differ only in who turns RequestPlan into PlanReady, and StartRound into RoundActivated, and after how many steps.

    rebalancer = Rebalancer(placement, topology, settings, model)
    for action in rebalancer.handle(WindowClosed(step, record)):
        match action:
            case RequestPlan(): ...   # ask a policy; later: rebalancer.handle(PlanReady(step, action.request_id, plan))
            case StartRound(): ...    # transfer; later: rebalancer.handle(RoundActivated(step, action.version))

Every returned action must be carried out; handle() is called in step order. At most one plan and one migration are
under way at a time, and a plan is never requested while rounds are.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.migration.moves import apply_round
from moe_serve.eplb.migration.plan import MigrationPlan, plan_migration
from moe_serve.eplb.migration.relabel import Relabel
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.rebalance.events import (
    Action,
    Event,
    MigrationFailed,
    PlanFailed,
    PlanReady,
    RequestPlan,
    RoundActivated,
    StartRound,
    WindowClosed,
)
from moe_serve.eplb.rebalance.gate import Gate, GateModel
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

__all__ = ["Decision", "GateModel", "RebalanceSettings", "Rebalancer"]

Floats = NDArray[np.float64]
State = Literal["watching", "planning", "moving"]


@dataclass(frozen=True)
class Decision:
    """Why the rebalancer did or did not act at a step; reports and logs print it.

    kind:       "watch", "plan", "move", "keep", "failed", "done"
    reason:     in words
    layer_rows: the layers it is about
    gain_s:     predicted gain over the horizon in seconds of serving time; 0 where none was computed
    cost_s:     predicted cost of moving
    """

    step: int
    kind: Literal["watch", "plan", "move", "keep", "failed", "done"]
    reason: str
    layer_rows: tuple[int, ...] = ()
    gain_s: float = 0.0
    cost_s: float = 0.0


class Rebalancer:
    """Decides when a plan is worth asking for, which layers of it are worth moving, and in which rounds they move."""

    def __init__(self, placement: Placement, topology: Topology, settings: RebalanceSettings, model: GateModel) -> None:
        """placement: in use at the start, and the "do nothing" that the regret bound compares with."""
        if topology.num_ranks != placement.num_ranks:
            raise PlacementError(
                f"topology has {topology.num_ranks} ranks, the placement {placement.num_ranks}; give its own"
            )
        self._settings = settings
        self._topology = topology
        self._placement = placement
        self._gate = Gate(
            placement,
            model,
            settings.history_windows,
            settings.decay,
            settings.horizon_windows,
            settings.gain_margin,
            settings.max_regret,
        )
        self._before = placement  # in use when the window began that is now running
        self._live_step = 0  # when the placement in use was complete
        self._num_windows = 0
        self._rest = 0  # whole windows to let pass before the next plan
        self._request: RequestPlan | None = None
        self._next_request_id = 0
        self._migration: MigrationPlan | None = None
        self._next_round = 0
        self._decisions: list[Decision] = []

    @property
    def placement(self) -> Placement:
        """The placement in use; its version counts activated rounds."""
        return self._placement

    @property
    def state(self) -> State:
        """watching: no plan and no round under way; planning: waits for PlanReady; moving: for RoundActivated."""
        if self._migration is not None:
            return "moving"
        return "watching" if self._request is None else "planning"

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions so far, oldest first."""
        return tuple(self._decisions)

    @property
    def migration(self) -> MigrationPlan | None:
        """The migration under way, or None."""
        return self._migration

    @property
    def capital_s(self) -> float:
        """What moves may still lose against "do nothing", in seconds that count costs gain_margin times."""
        return self._gate.capital_s

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Takes one event and returns what to do now, in order; () = nothing.

        Raises PlacementError when a record does not fit the placement, or a RoundActivated names another version
        than the running StartRound. An invalid plan is no error here: it ends as a "failed" decision.
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
                if self._migration is not None:
                    self._migration, self._live_step = None, event.step
                    self._fail(event.step, f"round {self._next_round} was given up: {event.reason}")
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
            return ()  # an idle window teaches nothing
        whole = record.first_step >= self._live_step and self._migration is None
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
        return self._go_home(step) if self._gate.capital_s < 0 else self._ask(step)

    def _ask(self, step: int) -> tuple[Action, ...]:
        tokens, by_source, activations = self._gate.planning_load()
        balance = balancedness(rank_load(tokens, self._placement), self._live_ranks())
        free = self._gate.free_layers(self._placement)
        worst = float(balance[free].min(initial=1.0))
        if worst >= self._settings.trigger:
            return ()
        rows = np.flatnonzero(free & (balance < self._settings.release))
        settings, current = self._settings, self._placement
        part = replace(
            current,
            physical_to_logical=current.physical_to_logical[rows],
            moe_layer_ids=tuple(current.moe_layer_ids[row] for row in rows),
        )
        request = PlanRequest(
            tokens=tokens[rows],
            topology=self._topology,
            num_slots=current.num_slots,
            current=part,
            num_groups=settings.num_groups,
            off_home=settings.off_home,
            max_moves=settings.max_moves,
            time_budget_s=settings.time_budget_s,
            seed=settings.seed,
            objective=settings.objective,
            by_source=None if by_source is None else by_source[rows],
            activations=None if activations is None else activations[rows],
            cost=settings.cost,
            excluded_ranks=self._excluded_ranks(),
            planned_split=settings.planned_split,
        )
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
            wanted = self._merged(event.plan, asked.layer_rows)
            move = self._migration_to(wanted)
        except PlacementError as error:
            self._fail(event.step, f"the plan is not legal: {error}")
            return ()
        gains = self._gate.gains(self._placement, move.target)
        costs, price = self._costs(move)
        returns = price * _arrivals(move.target, self._gate.home)
        rows = self._gate.choose_layers(gains, costs, returns, self._placement, move.target)
        if not len(rows):
            worth = gains * self._gate.reach
            pays = bool((worth[costs > 0] >= self._settings.gain_margin * costs[costs > 0]).any())
            reason = (
                "worth it, but the bound on regret has no room for the risk" if pays else "no layer is worth its move"
            )
            self._decide(event.step, "keep", reason, (), float(np.maximum(worth, 0).sum()), float(costs.sum()))
            self._rest = self._settings.cooldown_windows
            return ()
        return self._start(event.step, move.target, rows, gains, costs, "promise")

    def _go_home(self, step: int) -> tuple[Action, ...]:
        """Takes back the layers that lose, once the regret bound is used up."""
        home = self._gate.home
        costs, _ = self._costs(self._migration_to(home, "exact"))
        rows = self._gate.worth_going_home(self._placement, costs)
        if not len(rows):
            return ()
        gains = self._gate.gains(self._placement, home)
        failed = np.zeros(len(gains), dtype=bool)
        failed[rows] = True
        self._gate.back_off(failed)
        return self._start(step, home, rows, gains, costs, "the bound on regret is used up; going back home saves")

    def _start(
        self, step: int, wanted: Placement, rows: NDArray[np.int64], gains: Floats, costs: Floats, why: str
    ) -> tuple[Action, ...]:
        """Begins to move these rows. gains: [L] seconds per window; costs: [L]"""
        table = self._placement.physical_to_logical.copy()
        table[rows] = wanted.physical_to_logical[rows]
        move = self._migration_to(replace(self._placement, physical_to_logical=table), "exact")
        if not move.rounds:
            return ()
        self._gate.start_move(self._placement, rows, gains, costs)
        self._migration, self._next_round = move, 0
        gain_s, cost = float(gains[rows].sum()), float(costs[rows].sum())
        self._decide(
            step,
            "move",
            f"{len(rows)} layers, {move.num_transfers} experts in {len(move.rounds)} rounds: {why} {gain_s:.3g} s a "
            f"window for {cost:.3g} s",
            rows,
            float((gains * self._gate.reach)[rows].sum()),
            cost,
        )
        return (self._round(step),)

    def _round(self, step: int) -> StartRound:
        assert self._migration is not None
        migration_round = self._migration.rounds[self._next_round]
        self._next_round += 1
        num_bytes = migration_round.busiest() * self._settings.bytes_per_expert
        budget = self._settings.bytes_per_step
        return StartRound(
            step,
            migration_round,
            self._placement.version + 1,
            num_bytes,
            max(1, -(-num_bytes // budget)) if budget else 1,
            self._next_round == len(self._migration.rounds),
        )

    def _round_activated(self, event: RoundActivated) -> tuple[Action, ...]:
        move, expected = self._migration, self._placement.version + 1
        if move is None or event.version != expected:
            raise PlacementError(
                f"round of version {event.version} was activated at step {event.step}, but "
                + ("no round is running" if move is None else f"version {expected} is the running one")
                + "; activate rounds in the order of StartRound"
            )
        self._placement = apply_round(self._placement, move.rounds[self._next_round - 1])
        if self._next_round < len(move.rounds):
            return (self._round(event.step),)
        self._migration = None
        self._rest, self._live_step = self._settings.cooldown_windows, event.step
        self._decide(event.step, "done", f"placement {self._placement.version} is live")
        return ()

    def _merged(self, plan: Plan, rows: tuple[int, ...]) -> Placement:
        current = self._placement
        have = (plan.placement.num_layers, plan.placement.num_logical, plan.placement.num_slots)
        need = (len(rows), current.num_logical, current.num_slots)
        if have != need:
            raise PlacementError(f"(layers, experts, slots) are {have}, asked was for {need}")
        table = current.physical_to_logical.copy()
        table[list(rows)] = plan.placement.physical_to_logical
        return replace(current, physical_to_logical=table)

    def _migration_to(self, wanted: Placement, relabel: Relabel | None = None) -> MigrationPlan:
        return plan_migration(
            self._placement, wanted, self._topology, self._settings.max_incoming, relabel or self._settings.relabel
        )

    def _costs(self, move: MigrationPlan) -> tuple[Floats, float]:
        """Returns [L], the cost of a migration shared out by transfers, and the price of one transfer."""
        seconds = self._gate.model.migration_seconds(move, self._topology)
        arrivals = _arrivals(self._placement, move.target)
        price = seconds / max(float(arrivals.sum()), 1.0)
        return price * arrivals, price

    def _excluded_ranks(self) -> tuple[int, ...]:
        """Ranks without any expert, such as those that are lost; they stay without."""
        used = (self._placement.physical_to_logical >= 0).reshape(
            -1, self._placement.num_ranks, self._placement.slots_per_rank
        )
        return tuple(np.flatnonzero(~used.any(axis=(0, 2))).tolist())

    def _live_ranks(self) -> NDArray[np.int64]:
        return np.setdiff1d(np.arange(self._placement.num_ranks), np.array(self._excluded_ranks(), dtype=np.int64))

    def _fail(self, step: int, reason: str) -> None:
        self._gate.back_off(np.ones(self._placement.num_layers, dtype=bool))
        self._decide(step, "failed", reason)

    def _decide(
        self,
        step: int,
        kind: Literal["watch", "plan", "move", "keep", "failed", "done"],
        reason: str,
        rows: NDArray[np.int64] | tuple[int, ...] = (),
        gain_s: float = 0.0,
        cost_s: float = 0.0,
    ) -> None:
        self._decisions.append(Decision(step, kind, reason, tuple(int(r) for r in rows), gain_s, cost_s))


def _arrivals(old: Placement, new: Placement) -> Floats:
    """Returns [L], experts that some rank of each layer must receive on the way."""
    out = np.zeros(old.num_layers)
    changed = np.flatnonzero((old.physical_to_logical != new.physical_to_logical).any(axis=1))
    held, wanted = (
        p.physical_to_logical[changed].reshape(len(changed), p.num_ranks, p.slots_per_rank) for p in (old, new)
    )
    present = (wanted[:, :, :, None] == held[:, :, None, :]).any(axis=3)
    out[changed] = (~present & (wanted >= 0)).sum(axis=(1, 2))
    return out
