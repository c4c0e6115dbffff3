"""How a trace is replayed."""

from dataclasses import dataclass, field, replace

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.even_steps import NO_STEPS, EvenSteps
from moe_serve.eplb.replay.server_replay import ServerReplay
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology


@dataclass(frozen=True, eq=False)
class ReplaySettings:
    """How to replay.

    topology, num_slots: the cluster; num_slots is a multiple of its ranks
    start:      placement before the first window; None: `starting_placement`
    history:    windows that a plan is made from;  interval: windows between two plans of an ungated policy
    rules:      fields of every request of an ungated policy
    split:      how replicas share tokens when windows are scored, see Scorer;  even_steps: likewise
    costs:      predicts the time of steps and moves; None: no times
    gate, gate_cost, latency_steps: of policies named "gate:<policy>"; latency_steps: from a request to its plan
    server:     of the policy "live": what a server's own balancer began with
    Raises ConfigError for values that cannot work.
    """

    topology: Topology
    num_slots: int
    start: Placement | None = None
    history: int = 1
    interval: int = 1
    rules: PlanRules = field(default_factory=PlanRules)
    split: str = "window"
    even_steps: EvenSteps = NO_STEPS
    costs: ProfileCosts | None = None
    gate: RebalanceSettings = field(default_factory=RebalanceSettings)
    gate_cost: GateCost | None = None
    latency_steps: int = 0
    server: ServerReplay | None = None

    def __post_init__(self) -> None:
        for name in ("history", "interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)} windows; give a whole number of at least 1")
        if self.num_slots % self.topology.num_ranks or self.num_slots < 1:
            ranks = self.topology.num_ranks
            raise ConfigError(
                f"{self.num_slots} slots do not divide over {ranks} ranks; use {self.num_slots // ranks * ranks} or "
                f"{-(-self.num_slots // ranks) * ranks}"
            )

    @property
    def plan_rules(self) -> PlanRules:
        """The rules of ungated policies; they plan for the split that windows are scored with."""
        return replace(self.rules, planned_split="exact" if self.split == "exact" else "even")

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
