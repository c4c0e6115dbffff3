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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.events import Action, Event
from moe_serve.eplb.migration import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology

Floats = NDArray[np.float64]


class GateModel(Protocol):
    """Prices the two sides of the gate. `cost.GateCost` is the real one; tests use simpler ones."""

    def layer_seconds(self, tokens: Floats, placement: Placement) -> Floats:
        """Returns the time of each MoE layer of one step: tokens [L, E] routed in the whole step -> [L] seconds."""
        ...

    def migration_seconds(self, plan: MigrationPlan, topology: Topology) -> float:
        """Returns the serving time that carrying out all rounds of the plan costs."""
        ...


@dataclass(frozen=True)
class RebalanceSettings:
    """How eager a rebalancer is. Windows are counted in closed windows, everything else carries its unit.

    warmup_windows:      windows that are only watched before the first plan
    history_windows:     windows that a plan is made from and scored on
    decay:               weight of a window against the next newer one when a plan is made, 0 .. 1
    trigger:             a layer whose balancedness falls below this is planned anew ...
    release:             ... and every layer below this is planned along with it (>= trigger: hysteresis)
    cooldown_windows:    windows between the end of a migration and the next plan
    horizon_windows:     windows over which a gain must pay for its move
    gain_margin:         a move must be worth this many times its cost: the prices are only a model
    max_regret:          share of the serving time that all moves together may ever have lost against "do nothing"
    max_incoming:        staging slots: experts a rank receives in one round
    bytes_per_expert:    weights of one expert of one layer
    bytes_per_step:      what a rank may send or receive beside a step's own traffic; None = a round takes one step
    relabel:             which ranks a plan may exchange, see plan_migration
    num_groups, off_home, max_moves, time_budget_s, objective, planned_split, seed: passed on in every PlanRequest
    """

    warmup_windows: int = 1
    history_windows: int = 4
    decay: float = 0.5
    trigger: float = 0.95
    release: float = 0.98
    cooldown_windows: int = 0
    horizon_windows: int = 20
    gain_margin: float = 2.0
    max_regret: float = 0.01
    max_incoming: int = 1
    bytes_per_expert: int = 1
    bytes_per_step: int | None = None
    relabel: Literal["ranks", "nodes", "none"] = "nodes"
    num_groups: int | None = None
    off_home: float = 1.0
    max_moves: int | None = None
    time_budget_s: float | None = None
    objective: str | Mapping[str, float] = "tokens"
    planned_split: str = "even"
    seed: int = 0


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
        raise NotImplementedError

    @property
    def placement(self) -> Placement:
        """The placement in use; its version counts activated rounds."""
        raise NotImplementedError

    @property
    def state(self) -> Literal["watching", "planning", "moving"]:
        """watching: no plan and no round under way; planning: waits for PlanReady; moving: for RoundActivated."""
        raise NotImplementedError

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions so far, oldest first."""
        raise NotImplementedError

    @property
    def migration(self) -> MigrationPlan | None:
        """The migration under way, or None."""
        raise NotImplementedError

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Takes one event and returns what to do now, in order; () = nothing.

        Raises PlacementError when a record does not fit the placement, or a RoundActivated names another version
        than the running StartRound. An invalid plan is no error here: it ends as a "failed" decision.
        """
        raise NotImplementedError
