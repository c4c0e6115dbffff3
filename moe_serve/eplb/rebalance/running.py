"""A migration that is being carried out, round by round."""

from typing import Literal

from moe_serve.eplb.migration.moves import MigrationRound, apply_round
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import StartRound
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.errors import PlacementError

# move: a plan that pays; restore: second slots for experts on one rank; manual: a person's placement
Cause = Literal["move", "restore", "manual"]


class RunningMigration:
    """Hands out the rounds of a plan in order and applies each to the placement once it is active."""

    def __init__(
        self, plan: MigrationPlan, placement: Placement, settings: RebalanceSettings, cause: Cause = "move"
    ) -> None:
        self.plan = plan
        self.cause = cause
        self.placement = placement  # after the rounds that are active
        self.num_started = 0
        self._settings = settings

    @property
    def is_done(self) -> bool:
        """Whether the rounds handed out so far are all there are."""
        return self.num_started == len(self.plan.rounds)

    def start_round(self, step: int) -> StartRound:
        """Returns the next round to carry out."""
        following = self.plan.rounds[self.num_started]
        self.num_started += 1
        num_bytes = following.busiest() * self._settings.bytes_per_expert
        budget = self._settings.bytes_per_step
        num_steps = max(1, -(-num_bytes // budget)) if budget else 1
        return StartRound(step, following, self.placement.version + 1, num_bytes, num_steps, self.is_done)

    def activate(self, step: int, version: int) -> MigrationRound:
        """Applies the round that was started last, and returns it.

        Raises PlacementError when `version` is not that of this round.
        """
        if version != self.placement.version + 1:
            raise PlacementError(
                f"round of version {version} was activated at step {step}, but version {self.placement.version + 1} is "
                "the running one; activate rounds in the order of StartRound"
            )
        finished = self.plan.rounds[self.num_started - 1]
        self.placement = apply_round(self.placement, finished)
        return finished
