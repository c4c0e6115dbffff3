"""The message that tells all ranks the next round of a migration."""

import msgspec

from moe_serve.eplb.migration.moves import MigrationRound, SlotMove


class RoundMessage(msgspec.Struct, frozen=True, array_like=True):
    """A round. version: of the placement once it is active;  moves: the fields of each SlotMove, in order"""

    version: int
    moves: list[tuple[int, int, int, int, int]]

    @classmethod
    def of(cls, version: int, migration_round: MigrationRound) -> "RoundMessage":
        """Returns the message of a round."""
        moves = [(m.layer, m.src_rank, m.src_slot, m.dst_rank, m.dst_slot) for m in migration_round.moves]
        return cls(version, moves)

    @property
    def round(self) -> MigrationRound:
        return MigrationRound(tuple(SlotMove(*move) for move in self.moves))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "RoundMessage":
        """Returns the message in data. Raises msgspec.DecodeError for anything else."""
        return msgspec.msgpack.decode(data, type=cls)
