"""edits.c, built at first use with the machine's C compiler and called through ctypes.

Never required: without a compiler the numpy form makes the same edits, more slowly.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import load_c_library, processor_flags
from moe_serve.eplb.policies.edits import EditState
from moe_serve.eplb.policies.legal import HomeRule
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_SOURCE = Path(__file__).with_name("edits.c")
_UNFUSED = "-ffp-contract=off"  # fused multiply-adds round once where numpy rounds twice


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns edits.c, built where no earlier build is found; None, said once, where it cannot be built."""
    flags = (*processor_flags(), _UNFUSED)
    try:
        return load_c_library(_SOURCE, {"edit_layer": 1}, flags)[0]
    except ConfigError as error:
        get_logger(__name__).warning("plans are edited by numpy, about ten times slower: %s", error)
        return None


class NativeEdits:
    """Edits the layers of one state, each in one call."""

    def __init__(
        self, library: ctypes.CDLL, state: EditState, rule: HomeRule | None, num_heavy: int, min_gain: float
    ) -> None:
        """num_heavy, min_gain: see `edit_layers`"""
        self._edit, self._state, self._rule = library.edit_layer, state, rule
        assert num_heavy <= 64, "edits.c keeps the heaviest ranks in an array of 64"
        self._num_heavy, self._min_gain = num_heavy, min_gain
        zeros = np.zeros(state.unit.shape[1])
        self._fixed = [zeros] * len(state.unit) if state.fixed is None else state.fixed

    def edit(self, layer: int, target: float, budget: int, max_edits: int) -> tuple[Ints, Floats]:
        """Edits one layer of the state's table in place, and the rule's homes; `refresh` the state afterwards.

        Returns one line for each edit, [n, 4] (slot, other slot, expert or -1 for a swap, moves so far), and gains [n].
        """
        state, rule = self._state, self._rule
        num_ranks, slots = state.table.shape[1:]
        log, gains = np.empty((max_edits, 4), dtype=np.int64), np.empty(max_edits)
        numbers = np.array([state.steepness, target, self._min_gain, 0.0 if rule is None else rule.budget])
        home = np.zeros(0, dtype=np.int64) if rule is None else rule.homes[layer]
        node_of = home if rule is None else np.ascontiguousarray(rule.node_of, dtype=np.int64)
        arrays = [numbers, np.ascontiguousarray(state.unit[layer]), np.ascontiguousarray(self._fixed[layer]),
                  state.table[layer], np.ascontiguousarray(state.was_here[layer]), home, node_of, log,
                  gains]  # fmt: skip
        assert state.table[layer].flags.c_contiguous
        assert state.table.dtype == np.int32
        assert home.flags.c_contiguous
        assert home.dtype == np.int64
        sizes = [state.unit.shape[1], num_ranks, slots, self._num_heavy, state.min_replicas, budget, max_edits]
        most = slots if state.max_rank_moves is None else state.max_rank_moves
        kind = 0 if rule is None else 1 + rule.singles
        call = np.array([*sizes, kind, most, *(array.ctypes.data for array in arrays)], dtype=np.int64)
        done = self._edit(call.ctypes.data)
        if done < 0:
            raise MemoryError("no memory to edit a placement")
        return log[:done], gains[:done]
