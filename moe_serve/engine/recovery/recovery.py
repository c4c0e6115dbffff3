"""Goes on without a lost rank, or ends the launch, and lets a late rank rejoin.

    a wait ends in PeerError      in the exchange, the counts, a dispatch or combine, or the reduction of a load record
    regroup                       the counts of the step are dropped; the remaining ranks agree on who takes part
                                  (dispatch/membership.py says how, and why the group neither splits nor hangs)
    activate                      the placement without the masked ranks: same tables, other entries
    exchange                      the first of the group; its plan has the highest step of all, and ends the load record
    take_placement                where ranks know different placements, one that knows the newest tells all
    reload_lost_experts           experts whose only slots were on lost ranks are read from the checkpoint by the others
    the step runs again           with the same proposal or a newer one: the voided step changed no request

A rank that had all its rows before another one missed some has finished its part: its tokens are right, are kept, and
may have been sent. So steps may differ by one when a group begins, but no other state that ranks share.

A masked rank that still runs drops its requests (the front end has moved them to other ranks), asks to rejoin, and
waits. The other ranks' states say which ranks they see waiting. When all of them see one, the step's plan is to regroup
with it. In the first step of that group it is told where experts are, reads those of its own slots that differ (it may
have been stopped before others activated a round, or before they gave one up), and serves again.

A launcher may start a rank whose process died anew, alone. The new process is a masked rank that rejoins, with an empty
cache and counts from 0 on.

Every rank computes the same reloads, from the same placement and the same mask, and reads those of its own slots. It
waits for the first exchange with that: only then do all know one placement. Where the remaining ranks have fewer slots
than there are experts, each concludes that alone: they keep their requests and wait until a lost rank rejoins, or,
where no launcher starts it anew, all end the launch with the same error.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from moe_serve.config import ServeConfig
from moe_serve.dispatch.capabilities import survivors
from moe_serve.dispatch.membership import Membership
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.engine.protocol.mailbox import Mailbox
from moe_serve.engine.protocol.messages import NEXT_STEP, Apart, Members, Wake
from moe_serve.engine.recovery import full_placement
from moe_serve.engine.step.exchange import Exchange
from moe_serve.engine.step.plan import StepPlan, mask_of
from moe_serve.eplb.migration.moves import MigrationRound, apply_round
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ModelError, PeerError
from moe_serve.log import get_logger
from moe_serve.models.weights import ExpertToRead

_WAKE_S = 0.1  # how often a rank that waits to rejoin wakes the others, which may sleep
_SAY_S = 10.0  # how often a rank that waits to rejoin says what it waits for
log = get_logger(__name__)


@dataclass(frozen=True)
class Rank:
    """One rank and its connections. drop_requests: drops all its requests, and returns how many there were"""

    rank: int
    launch_id: int
    exchange: Exchange
    mailbox: Mailbox
    drop_requests: Callable[[], int]


class Recovery:
    """All ranks take part in all steps, and a lost rank ends the launch. `MaskingRecovery` goes on without it.

    why_end:            why a lost rank ends the launch; None where it does not
    members:            the ranks that take part, ascending
    regrouped:          1 before the first exchange of a group
    needs_placement:    1 from rejoining until `take_placement`
    masked, asking_to_rejoin: the masked ranks, and those of them that this rank sees waiting, as bits
    waits:              nothing can be computed until a lost rank rejoins
    num_voided_steps:   steps of this rank that were abandoned because a peer was lost
    num_times_left_out: how often the others have masked this rank
    """

    regrouped = 0
    needs_placement = 0
    waits = False
    num_voided_steps = 0
    num_times_left_out = 0

    def __init__(self, served: ServedModel, why_end: str | None):
        self.served = served
        self.why_end = why_end
        self._full = served.placement  # the slots of masked ranks included: see full_placement.py

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
        """Serves with the placement after a round, whose experts are in their slots on all ranks."""
        self._serve(apply_round(self._full, migration_round))

    def placement_bytes(self) -> bytes:
        """Returns the placement that this rank knows, as bytes for a broadcast."""
        return full_placement.encode(self._full)

    def now_bytes(self) -> bytes:
        """Returns that placement and the ranks that take part, for a rank that is started beside them."""
        return full_placement.encode_now(self._full, self.members)

    def take_placement(self, data: bytes) -> None:
        """Serves with a placement that was broadcast, after reading the experts that its own slots lack.

        Called on all ranks, where the plan names a broadcast root (MovePlan.placement_from).
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

    def _serve(self, full: Placement) -> None:
        """Serves with a placement. full: the slots of masked ranks included"""
        self._full = full
        self.served.activate(full)


class MaskingRecovery(Recovery):
    """The remaining ranks go on without a lost one; a rank that was only late rejoins."""

    def __init__(
        self,
        own: Rank,
        served: ServedModel,
        membership: Membership,
        suspect_after_s: float,
        replacement_deadline_s: float | None = None,
    ):
        """
        suspect_after_s:        time without a sign of life after which a rank is masked, where it can be spared, and
                                without the hosts of most ranks after which this one is apart
        replacement_deadline_s: time for which they wait for its replacement where they cannot; None: it is not replaced
        """
        super().__init__(served, why_end=None)
        self._own = own
        self._suspect_after_s = suspect_after_s
        self._replacement_deadline_s = replacement_deadline_s
        self._waits_since_s = 0.0
        self._membership = membership
        self._lost: Sequence[tuple[int, int]] = ()  # experts that only masked ranks hold: (row, expert)
        self._known_masked: Sequence[int] = ()
        self._has_rejoined = False
        membership.apart_after_s = suspect_after_s
        self._suspect_where_spareable()

    @property
    def members(self) -> Sequence[int]:
        return self._membership.members

    @property
    def masked(self) -> int:
        return mask_of(self._membership.masked)

    @property
    def asking_to_rejoin(self) -> int:
        return mask_of(self._membership.waiting_to_rejoin())

    def begin(self, wait: Callable[[], bool]) -> bool:
        if not self._membership.is_masked:
            return True
        self._membership.ask_to_rejoin(is_new=True)
        return self._wait_for_group(wait)

    def begin_step(self, plan: StepPlan) -> None:
        if self._has_rejoined:
            self.served.rejoin(plan.step - 1)  # the others' record began with the step of the rejoin
        self._has_rejoined = False
        self.regrouped = 0
        self.served.windows.begin_step(plan)
        if self.waits and time.monotonic() - self._waits_since_s > (self._replacement_deadline_s or 0.0):
            self._end_for_want_of_slots()
        if plan.rejoining:
            self._regroup(f"rank {', '.join(map(str, plan.rejoining))} rejoined", plan.rejoining)

    def recover(self, error: PeerError, wait: Callable[[], bool]) -> bool:
        membership = self._membership
        if not (membership.is_void or membership.is_masked or membership.is_apart):
            raise error  # the group is intact, so a new one would not help
        self.num_voided_steps += 1
        if not (membership.is_masked or membership.is_apart):
            try:
                self._regroup(str(error))
            except PeerError as newer:
                if not (membership.is_masked or membership.is_apart):
                    raise
                error = newer
        if membership.is_apart and not self._wait_apart(str(error), wait):
            return False
        return not membership.is_masked or self._rejoin(wait)

    def _wait_apart(self, reason: str, wait: Callable[[], bool]) -> bool:
        """Drops all requests and waits until this rank is a member again, or masked; returns False when it should end.

        The others may go on without it, so it must not answer; and it cannot mask them.
        """
        own, membership = self._own, self._membership
        log.warning("%s; it has dropped its %d requests", reason, own.drop_requests())
        own.mailbox.send(Apart(own.rank, own.launch_id, membership.epoch, reason))
        while wait():
            if membership.try_return():
                if not membership.is_masked:
                    self.num_times_left_out += 1
                    self._serve(self._full)
                    self._begin_group(f"rank {own.rank} reaches the others again")
                return True
        return False

    def _regroup(self, reason: str, joining: Sequence[int] = ()) -> None:
        """Voids the running step, agrees with the remaining ranks on a new group, and serves with its placement.

        joining: ranks that rejoin, the same on all ranks
        Raises PeerError when the others have masked this rank, and when the ranks that are left have too few slots.
        """
        self.served.void_step()
        for rank in joining:
            if self._membership.is_new(rank):
                self.served.windows.begin_anew(rank)
        self._membership.regroup(joining=joining)
        self._serve(self._full)
        self._begin_group(reason)

    def _rejoin(self, wait: Callable[[], bool]) -> bool:
        """Drops all requests and waits until the others regroup with this rank; returns False when it should end.

        Raises PeerError when no other rank lives.
        """
        num_dropped = self._own.drop_requests()
        log.warning("this rank was late and is masked: it has dropped its %d requests and waits to rejoin", num_dropped)
        self.num_times_left_out += 1
        self._membership.ask_to_rejoin()
        return self._wait_for_group(wait)

    def _wait_for_group(self, wait: Callable[[], bool]) -> bool:
        own, woke_s = self._own, 0.0
        began_s = said_s = time.monotonic()
        while wait():
            if time.monotonic() - woke_s > _WAKE_S:  # again, since they hear this rank's heartbeat a moment later
                woke_s = time.monotonic()
                own.mailbox.wake_peers(Wake(own.launch_id, NEXT_STEP))
            if self._membership.try_rejoin():
                self._has_rejoined = True
                self.needs_placement = 1
                self._serve(self._full)
                self._begin_group(f"rank {own.rank} rejoined")
                return True
            now_s = time.monotonic()
            if now_s - said_s > _SAY_S:
                said_s = now_s
                why = self._membership.describe_rejoin()
                log.warning("rank %d has waited %.0f s to rejoin: %s", own.rank, now_s - began_s, why)
        return False

    def take_placement(self, data: bytes) -> None:
        told = full_placement.decode(data, self._full)
        if told.version == self._full.version and not self.needs_placement:
            if (told.physical_to_logical != self._full.physical_to_logical).any():
                text = (
                    f"rank {self._own.rank} was told another placement {told.version} than it knows; restart the engine"
                )
                raise PeerError(text, self._own.rank, "placement", told.version)
            return
        to_read = full_placement.slots_to_read(self._full, told, self._own.rank)
        if to_read:
            log.warning("%d of this rank's slots hold other experts than the others know: it reads them", len(to_read))
        with self.served.changing:
            self._read(to_read, told.without_ranks({*self._membership.masked, self._own.rank})[0])
            self.needs_placement = 0
            self._serve(told)

    def reload_lost_experts(self, plan: StepPlan) -> None:
        if self.waits or not self._lost or not plan.regrouped or plan.rejoining:
            return
        masked, rank = self._membership.masked, self._own.rank
        full, reloaded = full_placement.with_reloads(self._full, masked)
        to_read = full_placement.slots_to_read(self._full, full, rank)
        what = full_placement.what_is_lost(full, masked, self._lost)
        how = "takes %d of %d, which it maps" if self.served.names_experts else "reads %d of %d from the checkpoint"
        log.warning("%s: rank %d " + how, what, rank, len(to_read), len(reloaded))
        with self.served.changing:
            self._read(to_read)
            self._serve(full)

    def _read(self, experts: Sequence[ExpertToRead], held: Placement | None = None) -> None:
        try:
            self.served.read_experts(experts, held)
        except ModelError as error:
            # Not a PeerError: some slots may hold other experts now than this rank would tell.
            raise ModelError(
                f"rank {self._own.rank} must read {len(experts)} experts again to go on: {error}"
            ) from None

    def _serve(self, full: Placement) -> None:
        """Serves with a placement without the masked ranks, or leaves it to `reload_lost_experts` where experts lack.

        Where the ranks that take part have too few slots for all experts, they wait, or raise PeerError.
        """
        masked = self._membership.masked
        placement, lost = full.without_ranks(masked)
        waited, self.waits = self.waits, not full_placement.has_slots_without(full, len(masked))
        if self.waits and self._replacement_deadline_s is None:
            self._end_for_want_of_slots()
        if self.waits and not waited:
            self._waits_since_s = time.monotonic()
        self._full, self._lost = full, lost
        if self.waits:
            self.served.windows.placement = full  # no forward runs before all experts have slots again
        elif lost:
            self.served.windows.placement = placement  # no forward runs before `reload_lost_experts`
        else:
            self.served.activate(placement)
        self._known_masked = masked
        self._suspect_where_spareable()

    def _end_for_want_of_slots(self) -> NoReturn:
        masked = self._membership.masked
        newest = next((rank for rank in masked if rank not in self._known_masked), masked[0])
        raise PeerError(full_placement.too_few_slots(self._full, masked), newest, "regroup", self._membership.epoch)

    def _suspect_where_spareable(self) -> None:
        """Suspects late ranks only where the others can go on without one; otherwise they wait for it."""
        is_spareable = full_placement.has_slots_without(self._full, len(self._membership.masked) + 1)
        self._membership.suspect_after_s = self._suspect_after_s if is_spareable else None

    def _begin_group(self, reason: str) -> None:
        own, members = self._own, self._membership.members
        self.regrouped = 1
        log.debug("%s: ranks %s go on", reason, members)  # the front end or the launcher logs it once for all ranks
        ended = [rank for rank in own.exchange.dead_peers() if rank not in members]
        times, epoch = self.num_times_left_out, self._membership.epoch
        own.mailbox.send(Members(own.rank, own.launch_id, epoch, members, reason, times, ended, self.waits))


def make_recovery(config: ServeConfig, own: Rank, served: ServedModel, restarts: bool = False) -> Recovery:
    """Returns the recovery that the setting, the transport and the exchange allow.

    restarts: a launcher restarts a rank whose process has died
    """
    membership = served.membership
    if served.placement.num_ranks == 1:
        return Recovery(served, "there is one rank")
    if membership is not None:
        membership.begin_heartbeat()
    if config.engine.on_lost_rank == "end":
        return Recovery(served, "engine.on_lost_rank is end")
    if membership is None:
        name = type(served.all_to_all).__name__
        why_end = f"{name} cannot go on without a rank ({survivors()} can)"
        return Recovery(served, why_end)
    if not own.exchange.survives_lost_rank:
        return Recovery(served, "the exchange cannot go on without a rank (engine.exchange: shm can)")
    own.exchange.follow(membership)
    deadline_s = config.server.attach_deadline_s if restarts else None
    return MaskingRecovery(own, served, membership, config.engine.suspect_after_s, deadline_s)
