"""Settings of a rebalancer: the choices of a person, the facts of the system, and all that follows from them.

The live balancer writes the facts into its trace, so that a replay on any machine begins with the same ones.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Self, get_args

from moe_serve.eplb.migration.moves import RoundLimits
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.relabel import Relabel
from moe_serve.eplb.split.make import ServedSplit
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.errors import ConfigError, TraceError


@dataclass(frozen=True)
class RebalanceSettings:
    """Settings that make a rebalancer eager or slow. Windows are closed windows, everything else carries its unit.

    warmup_windows:      windows that are only watched before the first plan
    history_windows:     windows that a plan is made from and scored on
    decay:               weight of a window against the next newer one when a plan is made, 0 .. 1
    trigger:             a layer whose balancedness falls below this is planned anew ...
    release:             ... and every layer below this is planned along with it (>= trigger: hysteresis)
    cooldown_windows:    windows before the next plan. One counts if it begins after the last plan was asked for, and
                         ends after its migration: its load is new to the plan, and measures what the move gains
    horizon_windows:     windows over which a gain must pay for its move
    gain_margin:         how far the prices may be off: costs count this many times, gains one over its root
    max_regret:          share of the serving time (of at least horizon_windows) that all moves together may lose
                         against "do nothing"
    round_limits:        what one round of a migration may move
    relabel:             which ranks a plan may exchange, see plan_migration
    rules:               fields of every PlanRequest
    min_replicas:        ranks that plans keep every expert on, as far as the slots of the ranks that take part suffice
    expert_time:         plans balance the time that an expert takes in a step; None = its tokens
    max_failures:        plans and moves in a row that may fail before the rebalancer switches itself off
    Raises ConfigError for values that cannot work.
    """

    warmup_windows: int = 1
    history_windows: int = 4
    decay: float = 0.5
    trigger: float = 0.95
    release: float = 0.98
    cooldown_windows: int = 1
    horizon_windows: int = 20
    gain_margin: float = 2.0
    max_regret: float = 0.01
    round_limits: RoundLimits = field(default_factory=RoundLimits)
    relabel: Relabel = "nodes"
    rules: PlanRules = field(default_factory=PlanRules)
    min_replicas: int = 1
    expert_time: ExpertTime | None = None
    max_failures: int = 3

    def __post_init__(self) -> None:
        for name, least in (
            ("warmup_windows", 0),
            ("history_windows", 1),
            ("cooldown_windows", 1),
            ("horizon_windows", 1),
            ("min_replicas", 1),
            ("max_failures", 1),
        ):
            value = getattr(self, name)
            if int(value) != value or value < least:
                raise ConfigError(f"{name} is {value!r}; give a whole number of at least {least}")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is {self.decay!r}; give a weight above 0 and up to 1")
        if not 0 <= self.trigger <= self.release <= 1:
            raise ConfigError(
                f"trigger is {self.trigger!r} and release {self.release!r}; give 0 <= trigger <= release <= 1"
            )
        if not self.gain_margin >= 1:
            raise ConfigError(f"gain_margin is {self.gain_margin!r}; give at least 1")
        if not 0 < self.max_regret < 1:
            raise ConfigError(f"max_regret is {self.max_regret!r}; give a share between 0 and 1, such as 0.01")


# (token, expert) pairs and expert bytes before anything is measured: FLOP/s and bytes/s of a rank, rough on purpose
_DEVICE_RATES = {"cpu": (2e10, 1e9), "cuda": (1e14, 1e10)}


@dataclass(frozen=True)
class SystemFacts:
    """Facts of the system that a balancer needs beside the placement.

    num_nodes:        machines; ranks divide evenly over them
    bytes_per_expert: weights of one expert of one layer, scales and all
    token_s, expert_s: see PriorPrices
    survives_loss:    serving goes on without a lost rank, so plans should keep every expert on two
    split:            how batches are shared over replicas, as the device decided it
    link_bytes_per_s, link_delay_s: of the network between nodes, the slowest way from one to another, as measured at
                      the start; 0: it was not measured
    expert_time:      what plans balance, see `planned_time`; None: tokens
    """

    num_nodes: int
    bytes_per_expert: int
    token_s: float
    expert_s: float
    survives_loss: bool
    split: ServedSplit
    link_bytes_per_s: float = 0.0
    link_delay_s: float = 0.0
    expert_time: ExpertTime | None = None

    @property
    def off_node_s(self) -> float:
        """See PriorPrices."""
        return self.link_delay_s + self.bytes_per_expert / self.link_bytes_per_s if self.link_bytes_per_s else 0.0

    @classmethod
    def of_model(
        cls,
        parameters: int,
        bytes_per_expert: int,
        device: str,
        num_nodes: int,
        survives_loss: bool,
        split: ServedSplit,
    ) -> Self:
        """Returns the facts of a model on a device ("cpu" or "cuda"), with prices from sizes alone.

        parameters: of an expert
        """
        flops_per_s, bytes_per_s = _DEVICE_RATES[device]
        token_s = 2.0 * parameters / flops_per_s
        return cls(num_nodes, bytes_per_expert, token_s, bytes_per_expert / bytes_per_s, survives_loss, split)

    @classmethod
    def from_event(cls, fields: dict[str, Any]) -> Self:
        """Returns the facts in a balancer_started event of a trace. Raises TraceError for missing or wrong ones."""
        if fields.get("split") not in get_args(ServedSplit):
            served = ", ".join(get_args(ServedSplit))
            raise TraceError(f"event balancer_started has split {fields.get('split')!r}; expected one of {served}")
        try:
            own_time = fields.get("expert_time")
            return cls(
                int(fields["num_nodes"]),
                int(fields["bytes_per_expert"]),
                float(fields["token_s"]),
                float(fields["expert_s"]),
                bool(fields["survives_loss"]),
                fields["split"],
                float(fields.get("link_bytes_per_s", 0.0)),
                float(fields.get("link_delay_s", 0.0)),
                None if own_time is None else ExpertTime.from_event("balancer_started", own_time),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise TraceError(f"an event balancer_started lacks facts of the system ({problem!r})") from None

    def to_event(self) -> dict[str, Any]:
        """Returns the fields of a balancer_started event."""
        return asdict(self)


LEAST_RANKS_BY_TIME = 16


def planned_time(time: ExpertTime | None, num_ranks: int, num_slots: int, num_logical: int) -> ExpertTime | None:
    """Returns what plans balance: the time of experts where that serves sooner; None: their tokens.

    time: what batches are split by; None: not by time

    On fewer ranks and without redundant experts it depends: with the times of a CPU core plans by time saved 1 to 2.5 %
    in some sizes and lost up to 0.6 % in others (benchmarks/results/plan_time.md).
    """
    return time if num_ranks >= LEAST_RANKS_BY_TIME and num_slots > num_logical else None


@dataclass(frozen=True)
class BalancerSettings:
    """Choices of a person, as in the section eplb of the configuration.

    policy:           plans placements, a name of `make_policy`
    trigger, horizon_windows: see RebalanceSettings
    staging_slots, pair_moves, node_moves: per_rank, per_pair and per_node of RoundLimits
    move_step_share:  how much longer steps may be while experts move
    plan_deadline_s, move_deadline_s: of a plan, and of a round of moves
    """

    policy: str = "incremental"
    trigger: float = 0.95
    horizon_windows: int = 20
    staging_slots: int = 1
    pair_moves: int | None = None
    node_moves: int | None = None
    move_step_share: float = 0.05
    plan_deadline_s: float = 60.0
    move_deadline_s: float = 60.0
