"""What every split of a batch has in common: counts in, rows of every slot out.

Whole numbers in, whole numbers out: every rank that knows the same counts derives the same table. Serving, replay and
simulation use the same policies; ep/device_split.py has their twins on accelerators.

Shape words: E = num_logical, R = num_ranks, P = num_slots, S = sources: R, or 1 where sources are not known.
"""

from abc import ABC, abstractmethod

import numpy as np

from moe_serve.eplb.split.layer_slots import Int64s, LayerSlots
from moe_serve.eplb.split.native import NativeSplit


class SplitPolicy(ABC):
    """Shares batch after batch of one layer over the slots of its experts.

    native:   the same in C, which `split` then uses; None = plain
    outcomes: [3] int64, batches whose largest rank load was proven the smallest possible at once, after repair, or not
              at all; only the exact split counts them
    """

    def __init__(self, name: str, layer: LayerSlots, native: NativeSplit | None = None):
        self.name, self.layer, self.native = name, layer, native
        self.outcomes: Int64s = np.zeros(3, dtype=np.int64) if native is None else native.outcomes

    def split(self, counts: Int64s) -> Int64s:
        """Returns the rows of each slot: counts [E] -> [P], or by source rank [R, E] -> [R, P]; int64.

        Raises PlacementError where an expert has tokens but no slot, or shapes do not fit.
        """
        table = self.layer.check(counts)
        rows = self.split_plainly(table) if self.native is None else self.native.split(table)
        return rows if counts.ndim == 2 else rows[0]

    @abstractmethod
    def split_plainly(self, counts: Int64s) -> Int64s:
        """Returns the rows of each slot by numpy: [S, E] -> [S, P] int64."""
