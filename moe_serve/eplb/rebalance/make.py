"""How the live balancer and a replay of its trace make the same rebalancer.

A person's settings come from the configuration, facts of the system from the system itself: the live balancer writes
them into its trace, so that a replay on any machine begins with the same ones.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

from moe_serve.eplb.cost.measured import MeasuredCost, PriorPrices
from moe_serve.eplb.migration.limits import RoundLimits
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.errors import TraceError
from moe_serve.topology import Topology

# (token, expert) pairs and expert bytes before anything is measured: FLOP/s and bytes/s of a rank, rough on purpose
_DEVICE_RATES = {"cpu": (2e10, 1e9), "cuda": (1e14, 1e10)}


@dataclass(frozen=True)
class SystemFacts:
    """What a balancer must know of its system beside its placement.

    num_nodes:        machines; ranks divide evenly over them
    bytes_per_expert: weights of one expert of one layer, scales and all
    token_s, expert_s: see PriorPrices
    survives_loss:    serving goes on without a lost rank, so plans should keep every expert on two
    """

    num_nodes: int
    bytes_per_expert: int
    token_s: float
    expert_s: float
    survives_loss: bool

    @classmethod
    def of_model(
        cls, hidden: int, moe_intermediate: int, bytes_per_expert: int, device: str, num_nodes: int, survives_loss: bool
    ) -> Self:
        """Returns the facts of a model on a device ("cpu" or "cuda"), with prices from sizes alone."""
        flops_per_s, bytes_per_s = _DEVICE_RATES[device]
        token_s = 6.0 * hidden * moe_intermediate / flops_per_s
        return cls(num_nodes, bytes_per_expert, token_s, bytes_per_expert / bytes_per_s, survives_loss)

    @classmethod
    def from_event(cls, fields: dict[str, Any]) -> Self:
        """Returns the facts in a balancer_started event of a trace. Raises TraceError when some are missing."""
        try:
            return cls(
                int(fields["num_nodes"]),
                int(fields["bytes_per_expert"]),
                float(fields["token_s"]),
                float(fields["expert_s"]),
                bool(fields["survives_loss"]),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise TraceError(f"an event balancer_started lacks facts of the system ({problem!r})") from None

    def to_event(self) -> dict[str, Any]:
        """Returns the fields of a balancer_started event."""
        return asdict(self)


@dataclass(frozen=True)
class BalancerSettings:
    """What a person chooses, as in the section eplb of the configuration.

    policy:           plans placements, a name of `make_policy`
    trigger, horizon_windows: see RebalanceSettings
    staging_slots, pair_moves, node_moves: per_rank, per_pair and per_node of RoundLimits
    split:            "even", "nearest" or "exact": how batches are shared over replicas
    move_step_share:  how much longer steps may be while experts move
    plan_deadline_s, move_deadline_s: of a plan, and of a round of moves
    """

    policy: str = "incremental"
    trigger: float = 0.95
    horizon_windows: int = 20
    staging_slots: int = 1
    pair_moves: int | None = None
    node_moves: int | None = None
    split: str = "even"
    move_step_share: float = 0.05
    plan_deadline_s: float = 60.0
    move_deadline_s: float = 60.0


def make_rebalancer(placement: Placement, settings: BalancerSettings, facts: SystemFacts) -> Rebalancer:
    """Returns the rebalancer of one system; the prices that it has learned are still those of the facts."""
    topology = Topology(facts.num_nodes, placement.num_ranks // facts.num_nodes)
    eagerness = RebalanceSettings(
        trigger=settings.trigger,
        release=max(settings.trigger, RebalanceSettings.release),
        horizon_windows=settings.horizon_windows,
        round_limits=RoundLimits(settings.staging_slots, settings.pair_moves, settings.node_moves),
        bytes_per_expert=facts.bytes_per_expert,
        rules=PlanRules(planned_split="exact" if settings.split == "exact" else "even"),
        min_replicas=2 if facts.survives_loss else 1,
    )
    cost = MeasuredCost(PriorPrices(facts.token_s, facts.expert_s), settings.move_step_share)
    return Rebalancer(placement, topology, eagerness, cost)
