"""The settings of a replay, and what a server's trace adds to them."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.load import PHASES, LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlanRequest, PlanRules, planned_split
from moe_serve.eplb.rebalance.events import REQUESTED, STARTED
from moe_serve.eplb.rebalance.settings import BalancerSettings, RebalanceSettings, SystemFacts, planned_time
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.errors import ConfigError, TraceError
from moe_serve.topology import Topology

SPLIT_CHANGED = "split_changed"  # the event


@dataclass(frozen=True)
class EvenSteps:
    """Steps that a server split evenly by its own choice, because its split did not pay in their phase.

    A trace holds the choice as events, {"event": "split_changed", "step", "phases"}: from this step on, batches of
    these phases are split evenly, others exactly, or by time with the event's weight_rows and tile_rows. A server with
    one of these splits writes one when it begins and one at each change. Without changes: none.

    steps:  of the changes, ascending
    phases: of each change, those that are split evenly from that step on
    time:   of the split by time; None = the server split otherwise
    """

    steps: tuple[int, ...] = ()
    phases: tuple[frozenset[str], ...] = ()
    time: ExpertTime | None = None

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> "EvenSteps":
        """Returns the steps that the events of a trace name. Raises TraceError for a change without step or phases."""
        changes: dict[int, frozenset[str]] = {}
        time: ExpertTime | None = None
        for event in events:
            if event.get("event") != SPLIT_CHANGED:
                continue
            step, phases = event.get("step"), event.get("phases")
            if not isinstance(step, int) or not isinstance(phases, list) or not all(name in PHASES for name in phases):
                raise TraceError(
                    f"event {SPLIT_CHANGED} has step {step!r} and phases {phases!r}; expected a whole number and names "
                    f"among {', '.join(PHASES)}"
                )
            changes[step] = frozenset(phases)
            if "weight_rows" in event:
                time = ExpertTime.from_event(SPLIT_CHANGED, event)
        steps = sorted(changes)
        return cls(tuple(steps), tuple(changes[step] for step in steps), time)

    def __contains__(self, step_and_phase: tuple[int, str]) -> bool:
        step, phase = step_and_phase
        index = bisect_right(self.steps, step) - 1
        return index >= 0 and phase in self.phases[index]


NO_STEPS = EvenSteps()


WORLD_EVENTS = frozenset({"group_changed", "plan_now", "place_at"})  # whatever the balancer decides
ROUND_ENDS = frozenset({"round_activated", "round_cancelled", "group_changed", "switched_off", STARTED})
BALANCER_EVENTS = WORLD_EVENTS | ROUND_ENDS | {REQUESTED, "plan_ready", "plan_failed"}


@dataclass(frozen=True, eq=False)
class ServerReplay:
    """Settings and facts that a server's balancer began with, and the events that its trace recorded.

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


@dataclass(frozen=True, eq=False)
class ReplaySettings:
    """The settings of a replay.

    topology, num_slots: the cluster; num_slots is a multiple of its ranks
    start:      placement before the first window; None: `starting_placement`
    history:    windows that a plan is made from
    intervals:  windows between two plans of an ungated policy; of several, each is a run of its own
    rules:      fields of every request of an ungated policy
    split:      how replicas share tokens when windows are scored, see Scorer;  even_steps: likewise
    costs:      predicts the time of steps and moves; None: no times
    gate_cost, latency_steps: of policies named "gate:<policy>"; latency_steps: from a request to its plan
    server:     of the policy "live": what a server's own balancer began with
    Raises ConfigError for values that cannot work.
    """

    topology: Topology
    num_slots: int
    start: Placement | None = None
    history: int = 1
    intervals: tuple[int, ...] = (1,)
    rules: PlanRules = field(default_factory=PlanRules)
    split: str = "window"
    even_steps: EvenSteps = NO_STEPS
    costs: ProfileCosts | None = None
    gate_cost: GateCost | None = None
    latency_steps: int = 0
    server: ServerReplay | None = None

    def __post_init__(self) -> None:
        for name, values in (("history", (self.history,)), ("interval", self.intervals)):
            for value in values:
                if value < 1:
                    raise ConfigError(f"{name} is {value} windows; give a whole number of at least 1")
        if self.num_slots % self.topology.num_ranks or self.num_slots < 1:
            ranks = self.topology.num_ranks
            raise ConfigError(
                f"{self.num_slots} slots do not divide over {ranks} ranks; use {self.num_slots // ranks * ranks} or "
                f"{-(-self.num_slots // ranks) * ranks}"
            )

    @property
    def plan_rules(self) -> PlanRules:
        """The rules of ungated policies; they plan for the split that windows are scored with."""
        return replace(self.rules, planned_split=planned_split(self.split))

    def planned_time(self, num_logical: int) -> ExpertTime | None:
        """Returns what plans balance, as on a server whose batches are split as windows are scored; None: tokens."""
        if self.split != "time":
            return None
        time = self.even_steps.time or (None if self.costs is None else self.costs.expert_time)
        return planned_time(time, self.topology.num_ranks, self.num_slots, num_logical)

    def request(self, records: Sequence[LoadRecord], **more: Any) -> PlanRequest:
        """Returns the request for a plan made from these windows, for the split that the next ones are scored with.

        more: fields of PlanRequest beside the load and the cluster
        """
        num, steps = len(records), sum(record.busy_steps for record in records)
        sources = [record.by_source for record in records if record.by_source is not None]
        active = [record.activations for record in records if record.activations is not None]
        return self.plan_rules.request(
            self._load(records),
            self.topology,
            self.num_slots,
            by_source=np.sum(sources, axis=0) if len(sources) == num else None,
            activations=np.sum(active, axis=0) / steps if len(active) == num and steps else None,
            series=np.array([self._load([record]) for record in records]) if num > 1 else None,
            series_weights=tuple(RebalanceSettings.decay**age for age in range(num)[::-1]) if num > 1 else None,
            **more,
        )

    def _load(self, records: Sequence[LoadRecord]) -> NDArray[np.number]:
        """Returns the tokens of these windows [L, E], or the time that they take, in rows."""
        tokens: NDArray[np.int64] = np.sum([record.tokens for record in records], axis=0)
        time, steps = self.planned_time(tokens.shape[1]), sum(record.busy_steps for record in records)
        if time is None or not steps:
            return tokens
        active = [steps_with for record in records if (steps_with := record.active_steps()) is not None]
        share = np.sum(active, axis=0) / steps if len(active) == len(records) else None
        return steps * time.mean_rows(tokens / steps, share)

    def start_of(self, trace: LoadTrace) -> Placement:
        """Returns the placement before the first window. Raises ConfigError when it does not fit the trace."""
        start = self.start or starting_placement(trace, self.topology, self.num_slots)
        have = (start.num_layers, start.num_logical, start.num_ranks, start.num_slots)
        want = (len(trace.moe_layer_ids), trace.num_logical, self.topology.num_ranks, self.num_slots)
        if have != want:
            raise ConfigError(
                f"the current placement has (layers, experts, ranks, slots) = {have}, the replay needs {want}; give "
                f"the placement of this model and cluster"
            )
        return start


def starting_placement(trace: LoadTrace, topology: Topology, num_slots: int) -> Placement:
    """Returns experts in order over the ranks, with the remaining slots filled round-robin."""
    if num_slots < trace.num_logical:
        raise ConfigError(
            f"{num_slots} slots are fewer than the {trace.num_logical} experts; use at least "
            f"{-(-trace.num_logical // topology.num_ranks) * topology.num_ranks}"
        )
    return Placement.trivial(
        len(trace.moe_layer_ids), trace.num_logical, topology.num_ranks, num_slots - trace.num_logical,
        trace.moe_layer_ids,
    )  # fmt: skip
