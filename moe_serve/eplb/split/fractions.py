"""The exact split of a load in fractions of tokens: what the split of whole batches (`exact.py`) comes to on average.

One replicated expert after the other, heaviest first, is spread over its ranks up to a common level (water-filling).
Each step is exact for its expert and never raises the heaviest rank, so sweeps over all of them approach the optimum of
the linear program from above. Of several replicas of an expert on one rank the first serves.

`level_ranks` is the plain form of fractions.c: sums in the same order and ties, so the same bits.

Shape words: L = layers, E = experts, R = ranks, K = slots per rank, P = R x K.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import UNFUSED, find_c_library, processor_flags
from moe_serve.eplb.placement import Placement

Floats = NDArray[np.float64]
NUM_SWEEPS, LEAST_FALL = 12, 1e-4  # a sweep that lowers the heaviest rank by a smaller share is the last one
_SOURCE = Path(__file__).with_name("fractions.c")


def levelled_load(tokens: NDArray[np.number], placement: Placement) -> Floats:
    """Returns the load of each slot under the exact split: tokens [L, E] -> [L, P] float64."""
    load = np.ascontiguousarray(tokens, dtype=np.float64)
    tables = np.ascontiguousarray(placement.physical_to_logical, dtype=np.int32)
    num_ranks, slots = placement.num_ranks, placement.slots_per_rank
    library = find_library()
    if library is None:
        rows = [level_ranks(ids, each, num_ranks)[1] for ids, each in zip(tables.tolist(), load.tolist(), strict=True)]
        return np.array(rows).reshape(tables.shape)
    out = np.empty(tables.shape)
    arrays = [array.ctypes.data for array in (load, tables, out)]
    call = np.array([*shape_words(load.shape[1], num_ranks, slots), len(load), *arrays], dtype=np.int64)
    if library.level_layers(call.ctypes.data) < 0:
        raise MemoryError("no memory to split a load")
    return out


def shape_words(num_experts: int, num_ranks: int, slots: int) -> list[int]:
    """Returns the struct Shape of fractions.c, word by word."""
    return [num_experts, num_ranks, slots, NUM_SWEEPS, int(np.float64(LEAST_FALL).view(np.int64))]


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns fractions.c, or None where it cannot be built, which the log says once."""
    otherwise = "loads under the exact split are computed by Python, some hundred times slower"
    return find_c_library(_SOURCE, {"level_layers": 1}, otherwise, (*processor_flags(), UNFUSED))


def level_ranks(table: Sequence[int], load: Sequence[float], num_ranks: int) -> tuple[list[float], list[float]]:
    """Returns the load of each rank [R] and slot [P] under the split. table: [P], -1 = empty;  load: [E]"""
    slots = len(table) // num_ranks
    slots_of: dict[int, list[int]] = {}
    for slot, expert in enumerate(table):
        held = slots_of.setdefault(expert, [])
        if expert >= 0 and not (held and held[-1] // slots == slot // slots):
            held.append(slot)
    total, own = [0.0] * num_ranks, [0.0] * len(table)
    for expert in sorted(slots_of):
        at = slots_of[expert]
        for slot in at:
            own[slot] = load[expert] / len(at)
            total[slot // slots] += own[slot]
    replicated = sorted((e for e, at in slots_of.items() if len(at) > 1), key=lambda e: (-load[e], e))
    top = max(total)
    for _ in range(NUM_SWEEPS):
        for expert in replicated:
            at = slots_of[expert]
            rest = [total[slot // slots] - own[slot] for slot in at]
            level = _common_level(sorted(rest), load[expert])
            for slot, before in zip(at, rest, strict=True):
                own[slot] = max(level - before, 0.0)
                total[slot // slots] = before + own[slot]
        before, top = top, max(total)
        if not top < before * (1.0 - LEAST_FALL):
            break
    return total, own


def _common_level(lowest: list[float], amount: float) -> float:
    """Returns the level up to which an amount fills places; lowest: what is there, ascending."""
    filled, level = amount, 0.0
    for number, here in enumerate(lowest, 1):
        filled += here
        level = filled / number
        if number == len(lowest) or level <= lowest[number]:
            break
    return level
