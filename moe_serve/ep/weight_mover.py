"""Brings the experts of migration rounds into the slots of this rank while it serves.

    start      a round begins; nothing is copied
    advance    between two steps: carries a few pieces into staging slots, and out of this rank's slots
    activate   at a step boundary, the same on all ranks: moves inside the rank, then staging slots into slots
    cancel     instead of activate: as if the round had never been

Slots change in `activate` alone, so a round that fails leaves no trace. All sources are read as they were before the
round: they do not change before all ranks have staged all experts. Addresses and shapes never change.

Where slots only name experts that all ranks map, a round is staged as soon as it is known, and the placement that is
activated with it says what they name: `NamedExperts`.
"""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.shm.memory import STORE_ORDER
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.expert_transfer import ExpertCarrier, IncomingExpert, NoCarrier, OutgoingExpert, Transfers, pieces_of
from moe_serve.eplb.migration.moves import MigrationRound, SlotMove
from moe_serve.errors import LostConnectionError

Reason = Literal["checksum", "late", "unreadable"]

IDLE_S = 0.005  # of work between two steps without rows: a request that arrives meanwhile waits so long at most
MOST_S = 0.05  # of work between two steps, however long they are
_LONGEST_GAP_S = 2.0  # counted between two turns: after a longer one this process was stopped, and nobody else was late
_FIRST_GUESS_S = 1e-9  # for a byte, before anything was measured
_MEMORY = 0.9  # share of the older measurements that each new one leaves


@dataclass(frozen=True)
class MoveSettings:
    """The limits on moves of experts.

    staging_slots: most experts that a rank sends, or receives, in a round
    step_share:    how much longer a step may be while experts move
    deadline_s:    a round that takes longer is given up
    """

    staging_slots: int = 1
    step_share: float = 0.05
    deadline_s: float = 60.0


@dataclass(frozen=True)
class MoveFault:
    """Why this rank gives a round up.

    reason:    "checksum": an expert arrived with other bytes than were sent;  "late": it did not arrive in time;
               "unreadable": the connection to another rank broke
    layer_row: of the expert, in the placement
    """

    reason: Reason
    layer_row: int


class Mover(Protocol):
    """Brings experts into the slots of this rank, one round at a time: WeightMover, NamedExperts.

    staged: version of the round whose experts this rank has staged and checked, 0 = none
    fault:  why this rank gives the running round up; None = it does not
    """

    staged: int
    fault: MoveFault | None

    def start(self, migration_round: MigrationRound, version: int) -> None:
        """Begins a round that leads to this version of the placement, > 0. Copies nothing."""
        ...

    def advance(self, step_s: float) -> None:
        """Carries a part of the round, if one runs, as much as fits between two steps, and checks what is complete.

        Never waits. To be called between any two steps.
        step_s: measured seconds of the last step with rows; 0 = the engine is idle
        """
        ...

    def activate(self, version: int) -> None:
        """Writes the experts of a round into the slots, at a step boundary. All ranks have staged it."""
        ...

    def cancel(self) -> None:
        """Ends the running round, if one runs, without effect on any slot."""
        ...

    def close(self) -> None:
        """Gives buffers back. All ranks call it."""
        ...


class NamedExperts:
    """The part of a rank whose slots name experts: none."""

    fault: MoveFault | None = None

    def __init__(self) -> None:
        self.staged = 0

    def start(self, migration_round: MigrationRound, version: int) -> None:
        self.staged = version

    def advance(self, step_s: float) -> None:
        pass

    def activate(self, version: int) -> None:
        assert version == self.staged, f"round {version} is not staged; round {self.staged} is"
        self.staged = 0

    def cancel(self) -> None:
        self.staged = 0

    def close(self) -> None:
        pass


class WeightMover:
    """Moves experts between the slots of this rank and those of others.

    running: version of the running round, 0 = none
    """

    def __init__(self, stores: Sequence[ExpertStore], rank: int, carrier: ExpertCarrier, settings: MoveSettings):
        """stores: by row of the placement;  rank: of the placement"""
        self._stores = stores
        self._rank = rank
        self._carrier = carrier
        self._settings = settings
        by_shapes = {store.shapes: store for store in stores}  # layers of one form share the staging slots
        made = {shapes: store.staging(settings.staging_slots) for shapes, store in by_shapes.items()}
        self._staging = [made[store.shapes] for store in stores]  # by row of the placement
        self._budget = MoveBudget(settings.step_share)
        self._moves: RankMoves
        self._incoming: list[IncomingExpert] = []
        self._deadline: MoveDeadline
        self.running = self.staged = 0
        self.fault: MoveFault | None = None

    def start(self, migration_round: MigrationRound, version: int) -> None:
        assert version > 0, f"version {version} cannot be told from no round"
        assert not self.running, f"round {version} starts while round {self.running} runs"
        moves = moves_of_rank(migration_round, self._rank, self._stores[0].num_slots)
        room = self._settings.staging_slots
        assert max(len(moves.incoming) + moves.needs_spare, len(moves.outgoing)) <= room, (
            f"round {version} needs more than {room} staging slots on rank {self._rank}"
        )
        self._moves = moves
        self._incoming = [
            IncomingExpert(move.layer, move.src_rank, index, self._pieces(self._staging[move.layer], staging_slot))
            for staging_slot, (move, index) in enumerate(moves.incoming)
        ]
        outgoing = [
            OutgoingExpert(move.dst_rank, self._pieces(self._stores[move.layer], self._local_slot(move.src_slot)))
            for move in moves.outgoing
        ]
        num_pieces = max(len(self._pieces(each, 0)) for each in self._staging) if moves.crosses else 0
        self._carrier.start(Transfers(round_id(migration_round, version), num_pieces, outgoing, self._incoming))
        self._deadline = MoveDeadline(self._settings.deadline_s, time.monotonic())
        self.running = version
        self.staged = 0 if self._incoming else version

    def advance(self, step_s: float) -> None:
        if not self.running or self.fault is not None:
            return
        started_s = time.perf_counter()
        num_bytes, is_lost = 0, False
        try:
            num_bytes = self._carrier.carry(self._budget.allowance(step_s))
        except LostConnectionError:
            is_lost = True
        if not self.staged:  # what was staged stays so: the others may have been told already
            self._check(is_lost)
        self._budget.record(num_bytes, time.perf_counter() - started_s)

    def activate(self, version: int) -> None:
        assert version == self.running == self.staged, f"round {version} is not staged; round {self.running} runs"
        self._carrier.end()
        self._move_inside()
        for staging_slot, (move, _) in enumerate(self._moves.incoming):
            store = self._stores[move.layer]
            store.write_slot(self._local_slot(move.dst_slot), self._staging[move.layer].slot(staging_slot))
        self.running = self.staged = 0

    def cancel(self) -> None:
        self._carrier.end()
        self.running = self.staged = 0
        self.fault = None

    def close(self) -> None:
        self.cancel()
        self._carrier.close()

    def _check(self, is_lost: bool) -> None:
        """Sees whether all experts have arrived as they were sent, or something went wrong."""
        is_late = self._deadline.has_passed(time.monotonic())
        rights = [expert.is_right() for expert in self._incoming]
        if False in rights:
            self.fault = MoveFault("checksum", self._incoming[rights.index(False)].layer_row)
        elif None not in rights:
            self.staged = self.running
        elif is_lost or is_late:
            self.fault = MoveFault("unreadable" if is_lost else "late", self._incoming[rights.index(None)].layer_row)

    def _move_inside(self) -> None:
        """Does the moves inside this rank. The staging slot behind the received experts is the spare one."""
        for move in self._moves.local:
            store, staging = self._stores[move.layer], self._staging[move.layer]
            if move.parks:
                staging.write_slot(len(self._incoming), store.slot(move.dst_slot))
            source = staging.slot(len(self._incoming)) if move.from_spare else store.slot(move.src_slot)
            store.write_slot(move.dst_slot, source)

    def _pieces(self, store: ExpertStore, slot: int) -> list[Tensor]:
        return pieces_of(store.slot(slot), self._carrier.piece_bytes)

    def _local_slot(self, slot: int) -> int:
        """Returns a slot of this rank, counted from its first."""
        return slot - self._rank * self._stores[0].num_slots


@dataclass(frozen=True)
class LocalMove:
    """A copy between two slots of this rank, and of one layer; slots are counted from the rank's first.

    from_spare:  reads the spare slot instead of src_slot, whose expert was parked there
    parks:       the expert of dst_slot goes to the spare slot first, since the last move of the ring still reads it
    """

    layer: int
    src_slot: int
    dst_slot: int
    from_spare: bool = False
    parks: bool = False


@dataclass(frozen=True)
class RankMoves:
    """The part of one rank in a round.

    local:    in an order in which each move can be done directly; needs_spare: a closed ring of them needs a spare slot
    outgoing: experts that it sends, in the order of the round
    incoming: experts that it receives, each with its index among those that the source rank sends
    crosses:  whether an expert travels between any two ranks
    """

    local: tuple[LocalMove, ...]
    outgoing: tuple[SlotMove, ...]
    incoming: tuple[tuple[SlotMove, int], ...]
    crosses: bool

    @property
    def needs_spare(self) -> bool:
        return any(move.parks for move in self.local)


def moves_of_rank(migration_round: MigrationRound, rank: int, slots_per_rank: int) -> RankMoves:
    """Returns the part of a rank in a round, and what it must know of the others'."""
    inside = [move for move in migration_round.moves if move.src_rank == move.dst_rank == rank]
    crossing = [move for move in migration_round.moves if move.src_rank not in (move.dst_rank, -1)]
    num_sent: dict[int, int] = {}
    incoming = []
    for move in crossing:
        index = num_sent.get(move.src_rank, 0)
        num_sent[move.src_rank] = index + 1
        if move.dst_rank == rank:
            incoming.append((move, index))
    return RankMoves(
        local=_local_moves(inside, rank * slots_per_rank),
        outgoing=tuple(move for move in crossing if move.src_rank == rank),
        incoming=tuple(incoming),
        crosses=bool(crossing),
    )


def round_id(migration_round: MigrationRound, version: int) -> int:
    """Returns a number of 63 bits, > 0, that says which version a round leads to and by which moves."""
    words = [version]
    for move in migration_round.moves:
        words += [move.layer, move.src_slot, move.dst_slot]
    digest = blake2b(np.array(words, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1


def _local_moves(inside: list[SlotMove], first_slot: int) -> tuple[LocalMove, ...]:
    last_reader = {(move.layer, move.src_slot): i for i, move in enumerate(inside)}
    parked: tuple[int, int] | None = None  # rings come one after the other, so one spare slot serves them all
    moves = []
    for i, move in enumerate(inside):
        from_spare = (move.layer, move.src_slot) == parked
        written = (move.layer, move.dst_slot)
        parks = last_reader.get(written, -1) > i
        if parks:
            parked = written
        moves.append(LocalMove(move.layer, move.src_slot - first_slot, move.dst_slot - first_slot, from_spare, parks))
    return tuple(moves)


class MoveBudget:
    """The bytes that a turn may copy and sum so that a step becomes at most a given share longer.

    The speed is learned from the turns themselves: a moving average, weighted by bytes.
    """

    def __init__(self, step_share: float):
        """step_share: part of a step's time that moving may add"""
        self._step_share = step_share
        self._seconds = self._bytes = 0.0

    def allowance(self, step_s: float) -> int:
        """Returns the bytes of the next turn, at least 1: then one piece is carried, however small the share.

        step_s: seconds of the last step with rows; 0 = the engine is idle
        """
        per_byte = self._seconds / self._bytes if self._bytes else _FIRST_GUESS_S
        wanted_s = min(self._step_share * step_s, MOST_S) if step_s else IDLE_S
        return max(1, int(wanted_s / per_byte))

    def record(self, num_bytes: int, seconds: float) -> None:
        """Learns from a turn. num_bytes: that it handled;  seconds: that it took, > 0 where num_bytes is"""
        if num_bytes:
            self._bytes = _MEMORY * self._bytes + num_bytes
            self._seconds = _MEMORY * self._seconds + seconds


class MoveDeadline:
    """Whether a round has taken too long. The time in which this process was stopped itself does not count."""

    def __init__(self, deadline_s: float, now_s: float):
        self._left_s = deadline_s
        self._last_s = now_s

    def has_passed(self, now_s: float) -> bool:
        """To be called every turn. now_s: seconds of a clock that never goes back"""
        self._left_s -= min(now_s - self._last_s, _LONGEST_GAP_S)
        self._last_s = now_s
        return self._left_s < 0


def make_carrier(group: EpGroup, slot_bytes: int, staging_slots: int) -> ExpertCarrier:
    """Returns the carrier of a group; a collective call.

    slot_bytes:    of an expert of one layer;  staging_slots: most experts that a rank sends, or receives, in a round
    Raises CapacityError when shared memory is too small.
    """
    if group.num_ranks == 1:
        return NoCarrier()
    is_shared = group.num_nodes == 1 or group.link is not None
    if group.device.type == "cpu" and is_shared and platform.machine() in STORE_ORDER:
        from moe_serve.ep.expert_carrier_shm import make_shm_carrier

        return make_shm_carrier(group, slot_bytes, staging_slots)
    from moe_serve.ep.expert_carrier_collective import make_collective_carrier

    return make_collective_carrier(group, staging_slots)
