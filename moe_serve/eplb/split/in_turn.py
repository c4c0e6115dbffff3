"""The even and the nearest split: every source's tokens go in turn to the slots within its reach.

A reach is a group of neighbouring ranks. A source uses the first of its reaches that holds a slot of the expert: the
even split knows one, all ranks; the nearest split its own rank, then its node, then all. Sources of a group take their
turns one after the other, so the slots of a group differ by one row at most. The first turn rotates with expert and
layer, or the odd rows of all experts would pile up on the lowest slots.

Shape words: K = reaches; E, P, R, S as in policy.py.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.split.layer import Int64s, LayerSlots
from moe_serve.eplb.split.policy import NativeSplit, SplitPolicy
from moe_serve.errors import PlacementError


@dataclass(frozen=True, eq=False)
class TurnTables:
    """The slots of one layer that take turns; see `turn_tables`.

    size:   [K, P] int64, slots that the expert of a slot has within that slot's group
    turn:   [K, P] int64, which of them the slot is, less the rotation
    uses:   [K, R, E] bool, whether this is the first reach of a source that holds the expert
    serves: [K, R, P] bool, whether a slot takes tokens of a source
    """

    size: Int64s
    turn: Int64s
    uses: NDArray[np.bool_]
    serves: NDArray[np.bool_]


class TurnSplit(SplitPolicy):
    """Slots take tokens in turn. reaches: ranks of a group, ascending, each a multiple of the one before."""

    def __init__(self, name: str, layer: LayerSlots, reaches: tuple[int, ...], library: ctypes.CDLL | None = None):
        super().__init__(name, layer, None if library is None else NativeSplit(library, layer, reaches))
        self.reaches = reaches

    @cached_property
    def _tables(self) -> TurnTables:
        return turn_tables(self.layer, self.reaches)

    def split(self, counts: Int64s) -> Int64s:
        if counts.ndim != 2 and len(self.reaches) > 1:
            raise PlacementError(
                f"the {self.name} split needs counts by source rank [num_ranks, num_logical], not shape "
                f"{counts.shape}; give them, or use even or exact"
            )
        return super().split(counts)

    def split_plainly(self, counts: Int64s) -> Int64s:
        tables, num_sources = self._tables, len(counts)
        rows = np.zeros((num_sources, self.layer.num_slots), dtype=np.int64)
        for k, width in enumerate(self.reaches):
            tokens = np.where(tables.uses[k, :num_sources], counts, 0)
            group = tokens.reshape(-1, min(width, num_sources), tokens.shape[1])
            ahead = (group.cumsum(axis=1) - group).reshape(tokens.shape)  # tokens of lower ranks of the group
            both = np.pad(np.stack([tokens, ahead]), ((0, 0), (0, 0), (0, 1)))  # a column for empty slots
            mine, before = both[:, :, self.layer.physical_to_logical]
            share = mine // tables.size[k] + ((tables.turn[k] - before) % tables.size[k] < mine % tables.size[k])
            rows += np.where(tables.serves[k, :num_sources], share, 0)
        return rows


def turn_tables(layer: LayerSlots, reaches: tuple[int, ...]) -> TurnTables:
    """Returns the tables of one layer; reaches as of TurnSplit."""
    logical, num_columns = layer.physical_to_logical, layer.num_logical + 1  # the last one: empty slots
    ranks = np.arange(layer.topology.num_ranks)
    size, turn, uses, serves = [], [], [], []
    served = np.zeros((len(ranks), num_columns), dtype=bool)
    served[:, -1] = True
    for width in reaches:
        keys = layer.slot_rank // width * num_columns + logical  # equal for slots that take turns
        order = np.argsort(keys, kind="stable")
        ordinal = np.empty_like(order)
        ordinal[order] = np.arange(len(order)) - np.searchsorted(keys[order], keys[order])
        held = np.bincount(keys, minlength=len(ranks) // width * num_columns)
        near = held.reshape(-1, num_columns)[ranks // width] > 0
        used = near & ~served
        served |= near
        size.append(held[keys])
        turn.append(ordinal - logical - layer.layer_row)
        uses.append(used[:, :-1])
        serves.append(used[:, logical] & (ranks[:, None] // width == layer.slot_rank // width))
    return TurnTables(*(np.stack(table) for table in (size, turn, uses, serves)))
