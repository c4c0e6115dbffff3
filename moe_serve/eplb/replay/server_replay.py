"""What a replay of a server's balancer needs beside the load: settings, facts of the system, recorded events."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moe_serve.eplb.rebalance.event_fields import REQUESTED, STARTED
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts
from moe_serve.errors import TraceError

WORLD_EVENTS = frozenset({"group_changed", "plan_now", "place_at"})  # whatever the balancer decides
ROUND_ENDS = frozenset({"round_activated", "round_cancelled", "group_changed", "switched_off", STARTED})
BALANCER_EVENTS = WORLD_EVENTS | ROUND_ENDS | {REQUESTED, "plan_ready", "plan_failed"}


@dataclass(frozen=True, eq=False)
class ServerReplay:
    """What a server's balancer began with.

    facts:  of the system, until an event balancer_started of the trace tells the server's own
    events: of the trace, in order, each with the number of records before it; () = none was recorded
    """

    settings: BalancerSettings
    facts: SystemFacts
    events: tuple[tuple[int, dict[str, Any]], ...] = ()

    @classmethod
    def of(
        cls, settings: BalancerSettings, facts: SystemFacts, events: Iterable[tuple[int, dict[str, Any]]]
    ) -> "ServerReplay":
        """Returns the replay of a server. facts: where the trace has none. Raises TraceError for broken events."""
        kept = tuple((number, fields) for number, fields in events if fields["event"] in BALANCER_EVENTS)
        for _, fields in kept:
            if not isinstance(fields.get("step"), int):
                raise TraceError(
                    f"event {fields['event']} of the trace has step {fields.get('step')!r}; expected a number"
                )
        return cls(settings, facts, kept)
