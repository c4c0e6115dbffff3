"""How eager a rebalancer is."""

from dataclasses import dataclass, field

from moe_serve.eplb.migration.limits import RoundLimits
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.relabel import Relabel
from moe_serve.errors import ConfigError


@dataclass(frozen=True)
class RebalanceSettings:
    """How eager a rebalancer is. Windows are counted in closed windows, everything else carries its unit.

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
    bytes_per_expert:    weights of one expert of one layer
    bytes_per_step:      what a rank may send or receive beside a step's own traffic; None = a round takes one step
    relabel:             which ranks a plan may exchange, see plan_migration
    rules:               fields of every PlanRequest
    min_replicas:        ranks that plans keep every expert on, as far as the slots of the ranks that take part suffice
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
    bytes_per_expert: int = 1
    bytes_per_step: int | None = None
    relabel: Relabel = "nodes"
    rules: PlanRules = field(default_factory=PlanRules)
    min_replicas: int = 1
    max_failures: int = 3

    def __post_init__(self) -> None:
        for name, least in (
            ("warmup_windows", 0),
            ("history_windows", 1),
            ("cooldown_windows", 1),
            ("horizon_windows", 1),
            ("bytes_per_expert", 1),
            ("bytes_per_step", 1),
            ("min_replicas", 1),
            ("max_failures", 1),
        ):
            value = getattr(self, name)
            if value is not None and (int(value) != value or value < least):
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
