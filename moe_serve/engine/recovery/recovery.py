"""What a rank does about a lost one. Here nothing: the launch ends. `masking_recovery.py` goes on without it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.engine.exchange import Exchange
from moe_serve.engine.protocol.mailbox import Mailbox
from moe_serve.engine.recovery import full_placement
from moe_serve.engine.requests import OpenRequests
from moe_serve.engine.served_model import ServedModel
from moe_serve.engine.status import EngineCounters
from moe_serve.engine.step import StepPlan
from moe_serve.eplb.migration.moves import MigrationRound, apply_round
from moe_serve.errors import PeerError


class Recovery:
    """All ranks take part in all steps, and a lost rank ends the launch. `MaskingRecovery` goes on without it.

    why_end:      why a lost rank ends the launch; None where it does not
    members:      the ranks that take part, ascending
    regrouped:    1 before the first exchange of a group
    needs_placement: 1 from rejoining until `take_placement`
    masked, asking_to_rejoin: the masked ranks, and those of them that this rank sees waiting, as bits
    waits:        nothing can be computed until a lost rank rejoins
    """

    regrouped = 0
    needs_placement = 0
    waits = False

    def __init__(self, served: ServedModel, why_end: str | None):
        self.served = served
        self.why_end = why_end

    @property
    def members(self) -> Sequence[int]:
        return range(self.served.placement.num_ranks)

    @property
    def masked(self) -> int:
        return 0

    @property
    def asking_to_rejoin(self) -> int:
        return 0

    def begin(self, wait: Callable[[], bool]) -> bool:
        """Joins the others where this rank is started anew; returns False when it should end. wait: as in `recover`"""
        return True

    def begin_step(self, plan: StepPlan) -> None:
        """Closes the load record and regroups where the plan says so. Raises PeerError when a peer is missing."""
        self.served.windows.begin_step(plan)

    def activate_round(self, migration_round: MigrationRound) -> None:
        """Serves with the experts where a round has brought them. They are in their slots, on all ranks."""
        self.served.activate(apply_round(self.served.placement, migration_round))

    def placement_bytes(self) -> bytes:
        """Returns what this rank knows about where experts are."""
        return full_placement.encode(self.served.placement)

    def take_placement(self, data: bytes) -> None:
        """Serves with the placement that a rank has told all, after reading what own slots do not hold of it.

        Called on all ranks, where the plan names who tells (MovePlan.placement_from).
        Raises PeerError when it does not fit, ModelError when an expert cannot be read.
        """
        raise AssertionError("no rank is behind where none can be masked")

    def reload_lost_experts(self, plan: StepPlan) -> None:
        """Serves all experts again, in the first step of a group. Called after activation and `take_placement`.

        Raises ModelError when one cannot be read.
        """

    def recover(self, error: PeerError, wait: Callable[[], bool]) -> bool:
        """Goes on after a lost peer; returns False when this rank should end while it is masked.

        wait: waits a moment while this rank is masked; returns False when the rank should end
        Raises the error, or a PeerError with more detail, when the ranks cannot go on.
        """
        raise error


@dataclass(frozen=True)
class Rank:
    """What recovery needs of a rank beside the model: its requests, its counters, its connections."""

    rank: int
    launch_id: int
    exchange: Exchange
    mailbox: Mailbox
    requests: OpenRequests
    counters: EngineCounters
