"""Repeats what a server's own balancer did, from the records and events of its trace.

Plans are made again, since the same policy gives the same plan; when each was ready, when rounds were live, what was
given up and what a person did come from the trace. So decisions fall into the same windows as on the server. Other
settings decide otherwise at some point: from there on the recorded plans and rounds no longer fit, and plans and rounds
take as long as they do in any other replay.
"""

from collections import deque
from typing import Any, cast

import numpy as np

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.rebalance.event_fields import REQUESTED, STARTED, event_of, placement_in
from moe_serve.eplb.rebalance.events import Action, Decision, RequestPlan, StartRound
from moe_serve.eplb.rebalance.rebalancer import make_rebalancer
from moe_serve.eplb.rebalance.settings import SystemFacts
from moe_serve.eplb.replay.gated_run import GatedRun
from moe_serve.eplb.replay.run import Served
from moe_serve.eplb.replay.server_replay import ROUND_ENDS, WORLD_EVENTS, ServerReplay
from moe_serve.errors import PlacementError

LIVE = "live"  # the name of this policy


class LiveRun(GatedRun):
    """Drives the rebalancer of a server with the events of its trace, as long as they fit what it decides."""

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
        """Leaves the recorded plans and rounds from here on, and takes up itself what is open."""
        if self._parted is not None:
            return
        self._parted = Decision(step, "replay", f"{why}; from here on plans and rounds are not those of the trace")
        if self._open is not None and self._rebalancer.state in ("planning", "moving"):
            super()._act(self._open)
