"""A migration's moves, one slot each, the rounds in which they take effect, and the limits of a round.

Shape words: L = MoE layers, P = slots, R = ranks.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Writes into dst_slot the expert that src_slot held before the round. Slots are counted over all ranks (0 .. P-1).

    layer: row of the placement
    src_rank == dst_rank: a copy inside the rank, without the network
    src_rank = src_slot = -1: nothing is copied; the slot becomes empty
    """

    layer: int
    src_rank: int
    src_slot: int
    dst_rank: int
    dst_slot: int


@dataclass(frozen=True)
class MigrationRound:
    """Moves that take effect together: every source is read as it was before the round.

    Moves inside a rank come first, in an order in which each can be done directly, before received experts are written.
    Only a closed ring of them (relabel="exact") needs a spare buffer, one of those that RoundLimits.per_rank counts.
    """

    moves: tuple[SlotMove, ...]

    @property
    def num_transfers(self) -> int:
        """Experts that cross from one rank to another."""
        return sum(move.src_rank not in (move.dst_rank, -1) for move in self.moves)

    def busiest(self) -> int:
        """Returns the most experts that one rank sends or receives."""
        return self._most(lambda rank: rank)

    def busiest_node(self, topology: Topology) -> int:
        """Returns the most experts that one node sends to others over its network, or receives."""
        return self._most(topology.node_of)

    def _most(self, place_of: Callable[[int], int]) -> int:
        """Returns the most experts that one place sends to others, or receives. place_of: of each rank"""
        sent, received = Counter[int](), Counter[int]()
        for move in self.moves:
            if move.src_rank >= 0 and (source := place_of(move.src_rank)) != (destination := place_of(move.dst_rank)):
                sent[source] += 1
                received[destination] += 1
        return max([0, *sent.values(), *received.values()])


def apply_round(placement: Placement, migration_round: MigrationRound) -> Placement:
    """Returns the placement after a round, one version higher.

    Raises PlacementError when a move names a slot twice, a rank that does not own its slot, an empty source, or when
    an expert would lose its last slot.
    """
    table = placement.physical_to_logical
    after = table.copy()
    written: set[tuple[int, int]] = set()
    for move in migration_round.moves:
        where = (move.layer, move.dst_slot)
        for rank, slot in ((move.src_rank, move.src_slot), (move.dst_rank, move.dst_slot)):
            if (rank, slot) != (-1, -1) and not (
                0 <= slot < placement.num_slots and slot // placement.slots_per_rank == rank
            ):
                raise PlacementError(f"{move} names slot {slot} on rank {rank}, which does not own it; check the ranks")
        if where in written or move.dst_slot < 0:
            raise PlacementError(f"{move} writes a slot that this round has written already; split the round")
        written.add(where)
        expert = -1 if move.src_slot < 0 else table[move.layer, move.src_slot]
        if move.src_slot >= 0 and expert < 0:
            raise PlacementError(f"{move} reads an empty slot; plan the migration from the placement in use")
        after[move.layer, move.dst_slot] = expert
    return replace(placement, physical_to_logical=after, version=placement.version + 1)


@dataclass(frozen=True)
class RoundLimits:
    """The limits of one round of a migration, over all layers. Raises PlacementError unless all are at least 1.

    per_rank: experts into one rank, and out of it; each takes a staging slot
    per_pair: experts from one rank to another; None = as many as per_rank allows
    per_node: experts into one node from others over its network, and out of it; None = no limit
    """

    per_rank: int = 1
    per_pair: int | None = None
    per_node: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (int(value) != value or value < 1):
                raise PlacementError(f"{name} of a round's limits is {value!r}; give a whole number of at least 1")
