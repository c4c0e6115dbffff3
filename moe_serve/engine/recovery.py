"""Which ranks take part in a step, what happens when one is lost, and how a late one rejoins.

    a wait ends in PeerError      in the exchange, the counts, a dispatch or combine, or the reduction of a load record
    regroup                       the counts of the step are dropped; the remaining ranks agree on who takes part
                                  (dispatch/shm/membership.py says how, and why the group neither splits nor hangs)
    activate                      the placement without the masked ranks: same tables, other entries
    exchange                      the first of the group; its plan has the highest step of all, and ends the load record
    the step runs again           with the same proposal or a newer one: the voided step changed no request

A rank that had all its rows before another one missed some has finished its part: its tokens are right, are kept, and
may have been sent. So steps may differ by one when a group begins, but no other state that ranks share.

A masked rank that still runs drops its requests (the front end has moved them to other ranks), asks to rejoin, and
waits. The other ranks' states say which ranks they see waiting. When all of them see one, the step's plan is to regroup
with it, and then the placement of all ranks is active again.

Where an expert had its only slots on lost ranks, serving cannot go on. Every rank concludes that alone, from the same
placement and the same mask, and ends the epoch with the same error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.config import ServeConfig
from moe_serve.dispatch.capabilities import survivors
from moe_serve.dispatch.shm.membership import Membership
from moe_serve.engine.exchange import Exchange
from moe_serve.engine.mailbox import Mailbox
from moe_serve.engine.messages import Members
from moe_serve.engine.requests import OpenRequests
from moe_serve.engine.served_model import ServedModel
from moe_serve.engine.status import EngineCounters
from moe_serve.engine.step import StepPlan, mask_of
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PeerError
from moe_serve.log import get_logger

log = get_logger(__name__)
_NAMED_EXPERTS = 5  # of those that are lost, in an error


class Recovery:
    """All ranks take part in all steps, and a lost rank ends the epoch. `MaskingRecovery` goes on without it.

    why_end:      why a lost rank ends the epoch; None where it does not
    members:      the ranks that take part, ascending
    regrouped:    1 before the first exchange of a group
    masked, asking_to_rejoin: the masked ranks, and those of them that this rank sees waiting, as bits
    """

    regrouped = 0

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

    def begin_step(self, plan: StepPlan) -> None:
        """Closes the load record and regroups where the plan says so. Raises PeerError when a peer is missing."""
        self.served.windows.begin_step(plan)

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
    epoch: int
    exchange: Exchange
    mailbox: Mailbox
    requests: OpenRequests
    counters: EngineCounters


class MaskingRecovery(Recovery):
    """The remaining ranks go on without a lost one; a rank that was only late rejoins."""

    def __init__(self, own: Rank, served: ServedModel, membership: Membership):
        super().__init__(served, why_end=None)
        self._own = own
        self._membership = membership
        self._full_placement = served.placement  # where experts are while no rank is masked
        self._known_masked: Sequence[int] = ()
        self._has_rejoined = False

    @property
    def members(self) -> Sequence[int]:
        return self._membership.members

    @property
    def masked(self) -> int:
        return mask_of(self._membership.masked)

    @property
    def asking_to_rejoin(self) -> int:
        return mask_of(self._membership.waiting_to_rejoin())

    def begin_step(self, plan: StepPlan) -> None:
        if self._has_rejoined:
            self.served.windows.rejoin(plan.step - 1)  # the others' record began with the step of the rejoin
        self._has_rejoined = False
        self.regrouped = 0
        self.served.windows.begin_step(plan)
        if plan.rejoining:
            self._regroup(f"rank {', '.join(map(str, plan.rejoining))} rejoined", plan.rejoining)

    def recover(self, error: PeerError, wait: Callable[[], bool]) -> bool:
        membership = self._membership
        if not (membership.is_void or membership.is_masked):
            raise error  # the group is intact, so a new one would not help
        self._own.counters.num_voided_steps += 1
        if not membership.is_masked:
            try:
                self._regroup(str(error))
            except PeerError:
                if not membership.is_masked:
                    raise
        return not membership.is_masked or self._rejoin(wait)

    def _regroup(self, reason: str, joining: Sequence[int] = ()) -> None:
        """Voids the running step, agrees with the remaining ranks on a new group, and serves with its placement.

        joining: ranks that rejoin, the same on all ranks
        Raises PeerError when the others have masked this rank, and when experts are lost.
        """
        self.served.void_step()
        self._membership.regroup(joining=joining)
        self._activate()
        self._begin_group(reason)

    def _rejoin(self, wait: Callable[[], bool]) -> bool:
        """Drops all requests and waits until the others regroup with this rank; returns False when it should end.

        Raises PeerError when no other rank lives.
        """
        own = self._own
        log.warning("this rank was late and is masked: it drops its %d requests and waits to rejoin", len(own.requests))
        own.counters.num_times_left_out += 1
        own.requests.drop_all()
        self._membership.ask_to_rejoin()
        while wait():
            if self._membership.try_rejoin():
                self._has_rejoined = True
                self._activate()
                self._begin_group(f"rank {own.rank} rejoined")
                return True
        return False

    def _activate(self) -> None:
        masked = self._membership.masked
        placement, lost = self._full_placement.without_ranks(masked)
        if lost:
            newest = next(rank for rank in masked if rank not in self._known_masked)
            raise PeerError(_what_is_lost(placement, masked, lost), newest, "regroup", self._membership.epoch)
        self.served.activate(placement)
        self._known_masked = masked

    def _begin_group(self, reason: str) -> None:
        own, members = self._own, self._membership.members
        self.regrouped = 1
        log.debug("%s: ranks %s go on", reason, members)  # the front end or the launcher logs it once for all ranks
        ended = [rank for rank in own.exchange.dead_peers() if rank not in members]
        times = own.counters.num_times_left_out
        own.mailbox.send(Members(own.rank, own.epoch, self._membership.epoch, members, reason, times, ended))


def make_recovery(config: ServeConfig, own: Rank, served: ServedModel) -> Recovery:
    """Returns what this rank does about a lost one, as the setting, the transport and the exchange allow."""
    membership = served.membership
    if served.placement.num_ranks == 1:
        return Recovery(served, "there is one rank")
    if config.engine.on_lost_rank == "end":
        return Recovery(served, "engine.on_lost_rank is end")
    if membership is None:
        name = type(served.all_to_all).__name__
        why_end = f"{name} cannot go on without a rank ({survivors()} can)"
        return Recovery(served, why_end)
    if not own.exchange.survives_lost_rank:
        return Recovery(served, "the exchange cannot go on without a rank (engine.exchange: shm can)")
    own.exchange.follow(membership)
    return MaskingRecovery(own, served, membership)


def spareable_ranks(placement: Placement) -> list[int]:
    """Returns the ranks of which any one can be lost: every expert has a slot on another rank."""
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
