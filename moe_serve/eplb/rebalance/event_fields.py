"""The events of a rebalancer as lines of a trace, and back, so that a replay can repeat what a live system saw.

Windows are records of the trace, so they have no event of their own; `plan_requested` and `balancer_started` tell what
the balancer did, and are no events for a rebalancer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan
from moe_serve.eplb.rebalance.events import (
    Event,
    GroupChanged,
    MigrationFailed,
    PlaceAt,
    PlanFailed,
    PlanNow,
    PlanReady,
    RoundActivated,
    SwitchOff,
    WindowClosed,
)
from moe_serve.errors import PlacementError, TraceError

STARTED = "balancer_started"
REQUESTED = "plan_requested"
_TABLE = "physical_to_logical_map"  # as in records


def placement_fields(placement: Placement) -> dict[str, Any]:
    """Returns a placement as fields of an event."""
    return {"version": placement.version, _TABLE: placement.physical_to_logical.tolist()}


def placement_in(fields: dict[str, Any], like: Placement) -> Placement:
    """Returns the placement in the fields of an event. like: of the same model and ranks; errors as `event_of`."""
    try:
        table = np.array(fields[_TABLE], dtype=np.int32)
        return replace(like, physical_to_logical=table, version=int(fields["version"]), allow_lost=False)
    except (KeyError, TypeError, ValueError, PlacementError) as problem:
        raise TraceError(f"event {fields.get('event')}: not a placement of this trace ({problem})") from None


def fields_of(event: Event) -> tuple[str, dict[str, Any]]:
    """Returns the name and the fields of an event, beside its step."""
    match event:
        case PlanReady():
            return "plan_ready", {"request_id": event.request_id, "plan_s": event.plan.elapsed_s}
        case PlanFailed():
            return "plan_failed", {"request_id": event.request_id, "reason": event.reason}
        case RoundActivated():
            return "round_activated", {"version": event.version, "move_s": event.move_s, "pause_s": event.pause_s}
        case MigrationFailed():
            return "round_cancelled", {"reason": event.reason}
        case GroupChanged():
            return "group_changed", placement_fields(event.placement)
        case PlanNow():
            return "plan_now", {}
        case PlaceAt():
            return "place_at", {_TABLE: [list(row) for row in event.table]}
        case SwitchOff():
            return "switched_off", {"reason": event.reason}
        case WindowClosed():
            raise ValueError("a closed window is a record of the trace, not an event")


def event_of(fields: dict[str, Any], like: Placement, plan: Callable[[int], Plan]) -> Event | None:
    """Returns the event in a line of a trace; None where it is none for a rebalancer.

    plan: returns the plan of a request; a trace does not hold plans, since the same policy makes them again
    Raises TraceError for an event that lacks something.
    """
    try:
        step = int(fields["step"])
        match fields["event"]:
            case "plan_ready":
                number = int(fields["request_id"])
                return PlanReady(step, number, plan(number))
            case "plan_failed":
                return PlanFailed(step, int(fields["request_id"]), str(fields["reason"]))
            case "round_activated":
                return RoundActivated(step, int(fields["version"]), float(fields["move_s"]), float(fields["pause_s"]))
            case "round_cancelled":
                return MigrationFailed(step, str(fields["reason"]))
            case "group_changed":
                return GroupChanged(step, placement_in(fields, like))
            case "plan_now":
                return PlanNow(step)
            case "place_at":
                return PlaceAt(step, fields[_TABLE])
            case "switched_off":
                return SwitchOff(step, str(fields["reason"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise TraceError(f"event {fields.get('event')!r} of the trace lacks something ({problem!r})") from None
    return None
