"""The moves of a migration round as one rank sees them: inside the rank, out of it and into it."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from moe_serve.eplb.migration.moves import MigrationRound, SlotMove


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
    """What one rank does in a round.

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
