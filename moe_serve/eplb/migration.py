"""From one placement to another with the fewest bytes over the slowest links, in rounds that are each legal.

Shape words: L = MoE layers, P = slots, R = ranks.
"""

from dataclasses import dataclass

from moe_serve.eplb.placement import Placement


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Writes one slot: the expert that src_slot held before the round. Slots are counted over all ranks (0 .. P-1).

    layer: row of the placement.   src_rank == dst_rank: a copy inside the rank, no network.
    src_rank = src_slot = -1: nothing is copied, the slot becomes empty.
    """

    layer: int
    src_rank: int
    src_slot: int
    dst_rank: int
    dst_slot: int


@dataclass(frozen=True)
class MigrationRound:
    """Moves that take effect together: every source is read as it was before the round."""

    moves: tuple[SlotMove, ...]


@dataclass(frozen=True)
class MigrationPlan:
    """Rounds that lead from one placement to another.

    from_version: version of the placement that the first round starts from; round i leads to from_version + i + 1
    rounds:       in order
    target:       the placement after the last round
    """

    from_version: int
    rounds: tuple[MigrationRound, ...]
    target: Placement
