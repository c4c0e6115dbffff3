"""How one rank goes on when another is lost, and how it comes back when it was itself the one that came too late.

    a wait ends in PeerError      in the exchange, the counts, a dispatch or combine, or the reduction of a load record
    regroup                       what the step has counted is forgotten; all that are left agree on who takes part
                                  (dispatch/shm/membership.py says how, and why that neither splits the group nor hangs)
    activate                      the placement without the ranks that are out: same tables, other entries
    exchange                      the first of the group; its plan has the highest step of all, and ends the load record
    the step runs again           of the same proposal or a newer one: no request was touched by the one that was voided

A rank that had all its rows before another one missed some has finished its part: its tokens are right, are kept, and
perhaps sent. So steps may differ by one when a group begins; nothing else that ranks know of each other may.

A rank that was left out drops its requests (the front end has given them to others), shows that it would like to come
back, and waits. The others say in their states whom they see waiting; when all see it, the plan makes that step the one
in which they regroup with it, and the placement of all ranks is active again.

Where an expert had its only slots on the lost ranks, serving cannot go on: every rank finds that out alone, from the
same placement and the same mask, and ends the epoch with the same error.
"""

from collections.abc import Sequence

from moe_serve.config import ServeConfig
from moe_serve.dispatch.shm.membership import Membership
from moe_serve.engine.exchange import Exchange, ShmExchange
from moe_serve.engine.served_model import ServedModel
from moe_serve.engine.step import mask_of
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PeerError

_NAMED_EXPERTS = 5  # of those that are lost, in an error


class Recovery:
    """One rank's way on without others, and back to them."""

    def __init__(self, rank: int, membership: Membership, served: ServedModel):
        self._rank = rank
        self._membership = membership
        self._served = served
        self._everybody = served.placement  # where experts are while nobody is out
        self._known_masked: Sequence[int] = ()

    @property
    def members(self) -> list[int]:
        """The ranks that take part, ascending."""
        return self._membership.members

    @property
    def group_epoch(self) -> int:
        """Counts the groups; the same on all ranks that take part."""
        return self._membership.epoch

    @property
    def masked(self) -> int:
        """The ranks that are out, as bits."""
        return mask_of(self._membership.masked)

    @property
    def wanting_back(self) -> int:
        """The ranks that this one sees waiting outside, as bits."""
        return mask_of(self._membership.wanting_back())

    @property
    def helps(self) -> bool:
        """Whether this group is over, so that a new one mends an error; some errors have other reasons."""
        return self._membership.is_void or self.is_left_out

    @property
    def is_left_out(self) -> bool:
        """Whether the others go on without this rank."""
        return self._membership.is_left_out

    def regroup(self, joining: Sequence[int] = ()) -> None:
        """Voids the running step, agrees with all that are left on a new group, and serves with its placement.

        joining: ranks to take back, the same on all ranks
        Raises PeerError when the others have left this rank out, and when experts are lost.
        """
        self._served.void_step()
        self._membership.regroup(joining=joining)
        self._activate()

    def ask_back(self) -> None:
        """Shows the others that this rank, which they have left out, would like to come back."""
        self._membership.ask_back()

    def taken_back(self) -> bool:
        """Returns whether the others have taken this rank back; to be asked again until they have.

        Raises PeerError when nobody is left to do so.
        """
        if not self._membership.taken_back():
            return False
        self._activate()
        return True

    def _activate(self) -> None:
        masked = self._membership.masked
        placement, lost = self._everybody.without_ranks(masked)
        if lost:
            newest = next(rank for rank in masked if rank not in self._known_masked)
            raise PeerError(_what_is_lost(placement, masked, lost), newest, "regroup", self._membership.epoch)
        self._served.activate(placement)
        self._known_masked = masked


def make_recovery(config: ServeConfig, rank: int, served: ServedModel, exchange: Exchange) -> Recovery | str:
    """Returns this rank's way on when another one is lost, or why there is none: then that ends the epoch."""
    num_ranks = served.placement.num_ranks
    if num_ranks == 1:
        return "there is one rank"
    if config.engine.on_lost_rank == "end":
        return "engine.on_lost_rank is end"
    membership = served.membership
    if membership is None:
        name = type(served.all_to_all).__name__
        return f"{name} cannot go on without a rank (dispatch.backend: low_latency on CPUs can)"
    if not isinstance(exchange, ShmExchange):
        return "the exchange cannot go on without a rank (engine.exchange: shm can)"
    exchange.follow(membership)
    return Recovery(rank, membership, served)


def spareable_ranks(placement: Placement) -> list[int]:
    """Returns the ranks each of which serving can go on without: every expert has a slot on another one."""
    return [rank for rank in range(placement.num_ranks) if not placement.without_ranks([rank])[1]]


def _what_is_lost(placement: Placement, masked: Sequence[int], lost: Sequence[tuple[int, int]]) -> str:
    row = lost[0][0]
    experts = [str(expert) for lost_row, expert in lost if lost_row == row]
    named = ", ".join(experts[:_NAMED_EXPERTS]) + (", …" if len(experts) > _NAMED_EXPERTS else "")
    ranks = " and ".join(f"rank {rank}" for rank in masked) + (" together" if len(masked) > 1 else "")
    layers = len({lost_row for lost_row, _ in lost})
    over = f" over {layers} layers" if layers > 1 else ""
    return (
        f"{ranks} cannot be spared: {len(lost)} experts{over} had their only slots there (layer "
        f"{placement.moe_layer_ids[row]}: {named}); start the ranks again, and give every expert slots on two ranks to "
        "go on without one: raise eplb.num_redundant_experts, or change the file in eplb.init_expert_location"
    )
