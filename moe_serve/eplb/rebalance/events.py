"""Events, actions and decisions of a rebalancer, as plain data that the live system, replay and simulator share.

Events go in, actions come out; each carries the engine step it belongs to. In time order a rebalance is

    WindowClosed -> RequestPlan -> PlanReady -> StartRound -> RoundActivated -> StartRound -> ... -> RoundActivated

where RequestPlan and StartRound are actions of the rebalancer, and the others are events from its driver. A driver may
also say that ranks were lost or have rejoined, carry out a person's command, or switch the rebalancer off.

A live system writes its events into its trace, so that a replay can repeat what it saw. Windows are records of the
trace, so they have no line of their own; `plan_requested` and `balancer_started` tell what the balancer did, and are no
events for a rebalancer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import msgspec
import numpy as np

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.migration.moves import MigrationRound, RoundLimits
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.relabel import Relabel
from moe_serve.errors import PlacementError, TraceError

STARTED = "balancer_started"  # names of lines of a trace
REQUESTED = "plan_requested"
_TABLE = "physical_to_logical_map"  # as in records


@dataclass(frozen=True)
class WindowClosed:
    """A window of load is complete. step: the first step after the window, first_step + num_steps of the record."""

    step: int
    record: LoadRecord


@dataclass(frozen=True)
class PlanReady:
    """The planner has answered.

    request_id: of the RequestPlan it answers; an answer to an older one is dropped
    migration:  `migration_to` of the request and the plan, where the planner has made it too, since that takes as long
    """

    step: int
    request_id: int
    plan: Plan
    migration: MigrationPlan | None = None


@dataclass(frozen=True)
class PlanFailed:
    """The planner died, ran out of time, or gave no legal plan. reason: for the decision log."""

    step: int
    request_id: int
    reason: str


@dataclass(frozen=True)
class RoundActivated:
    """A round is active on all ranks from this step on.

    version: of its StartRound
    move_s:  measured seconds from its start to here;  pause_s: of them, those in which serving stood still
    """

    step: int
    version: int
    move_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class MigrationFailed:
    """All ranks abandoned the running round; the placement before it stays in use. reason: for the decision log."""

    step: int
    reason: str


@dataclass(frozen=True)
class GroupChanged:
    """Ranks were lost or have rejoined; nothing of the running migration counts any more.

    placement: in use from this step on; ranks that take no part hold no experts
    """

    step: int
    placement: Placement


@dataclass(frozen=True)
class PlanNow:
    """A person asks for a plan, however balanced the load is. Refused with PlacementError when none can be made."""

    step: int


@dataclass(frozen=True)
class PlaceAt:
    """A person says where experts should live, whatever it costs; refused with PlacementError when they cannot.

    table: [layers][slots] logical experts, -1 = empty
    """

    step: int
    table: Sequence[Sequence[int]]


@dataclass(frozen=True)
class SwitchOff:
    """Drops what was asked or started, and makes no more plans until a person or a new group begins anew."""

    step: int
    reason: str


Event = (
    WindowClosed
    | PlanReady
    | PlanFailed
    | RoundActivated
    | MigrationFailed
    | GroupChanged
    | PlanNow
    | PlaceAt
    | SwitchOff
)


@dataclass(frozen=True)
class RequestPlan:
    """Asks the planner; answer with PlanReady or PlanFailed of the same request_id, in any later step.

    layer_rows: rows of the full placement to plan; `request.tokens`, `request.current` and the plan hold only these
                rows, in this order
    limits, relabel: of the migration to the plan, see `plan_migration`
    """

    step: int
    request_id: int
    layer_rows: tuple[int, ...]
    request: PlanRequest
    limits: RoundLimits
    relabel: Relabel


@dataclass(frozen=True)
class StartRound:
    """Brings these experts into staging, then activates them on all ranks at one step boundary; answer RoundActivated.

    version: of the placement once the round is active; RoundActivated.step is after `step`
    """

    step: int
    round: MigrationRound
    version: int


Action = RequestPlan | StartRound
# watch: what the last move turned out to gain; plan, keep, move: a plan is asked for, is not worth it, is moved to;
# restore: second slots are put back; manual: a person's placement is moved to; group: other ranks take part;
# failed: no plan, or a move without effect; done: a move is live; off: the rebalancer is switched off;
# replay: a replay decides otherwise than the server that recorded its trace
DecisionKind = Literal["watch", "plan", "move", "restore", "manual", "keep", "failed", "done", "group", "off", "replay"]


@dataclass(frozen=True)
class Decision:
    """The reason why the rebalancer did or did not act at a step; reports and logs print it.

    reason:     in words
    layer_rows: the layers it is about
    gain_s:     predicted gain over the horizon in seconds of serving time; 0 where none was computed. Of "watch": what
                the last move had promised for the windows in which it was measured
    cost_s:     predicted cost of moving
    realised_s: of "watch": what the last move has gained in them
    """

    step: int
    kind: DecisionKind
    reason: str
    layer_rows: tuple[int, ...] = ()
    gain_s: float = 0.0
    cost_s: float = 0.0
    realised_s: float = 0.0


def placement_fields(placement: Placement) -> dict[str, Any]:
    """Returns a placement as fields of an event."""
    return {"version": placement.version, _TABLE: placement.physical_to_logical.tolist()}


def placement_in(line: dict[str, Any], like: Placement) -> Placement:
    """Returns the placement in the line of an event. like: of the same model and ranks; errors as `event_of`."""
    try:
        table = np.array(line[_TABLE], dtype=np.int32)
        return replace(like, physical_to_logical=table, version=int(line["version"]), allow_lost=False)
    except (KeyError, TypeError, ValueError, PlacementError) as problem:
        raise TraceError(f"event {line.get('event')}: not a placement of this trace ({problem})") from None


# Events whose fields stand in a trace as they are, by their name there.
_AS_THEY_ARE = {
    "plan_failed": PlanFailed,
    "round_activated": RoundActivated,
    "round_cancelled": MigrationFailed,
    "plan_now": PlanNow,
    "switched_off": SwitchOff,
}


def fields_of(event: Event) -> tuple[str, dict[str, Any]]:
    """Returns the name and the fields of an event, beside its step."""
    match event:
        case PlanReady():
            return "plan_ready", {"request_id": event.request_id, "plan_s": event.plan.elapsed_s}
        case GroupChanged():
            return "group_changed", placement_fields(event.placement)
        case PlaceAt():
            return "place_at", {_TABLE: [list(row) for row in event.table]}
        case WindowClosed():
            raise ValueError("a closed window is a record of the trace, not an event")
    name = next(name for name, kind in _AS_THEY_ARE.items() if isinstance(event, kind))
    return name, {field: value for field, value in vars(event).items() if field != "step"}


def event_of(line: dict[str, Any], like: Placement, plan: Callable[[int], Plan]) -> Event | None:
    """Returns the event in a line of a trace; None where the line is not for a rebalancer.

    plan: returns the plan of a request; a trace does not hold plans, since the same policy makes them again
    Raises TraceError for an event that lacks something.
    """
    name = line.get("event")
    try:
        step = int(line["step"])
        match name:
            case "plan_ready":
                number = int(line["request_id"])
                return PlanReady(step, number, plan(number))
            case "group_changed":
                return GroupChanged(step, placement_in(line, like))
            case "place_at":
                return PlaceAt(step, line[_TABLE])
        kind = _AS_THEY_ARE.get(str(name))
        return None if kind is None else msgspec.convert({each.name: line[each.name] for each in fields(kind)}, kind)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as problem:
        raise TraceError(f"event {name!r} of the trace lacks something ({problem!r})") from None
