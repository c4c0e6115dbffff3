"""pairs.c, built at first use with the machine's C compiler. Without one, pair_search.py does the same, more slowly."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import load_c_library
from moe_serve.eplb.policies.pair_search import THRESHOLDS, Effort, Ints, PairLayer
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

_SOURCE = Path(__file__).with_name("pairs.c")
# A fused multiply-add rounds once where the plain form rounds twice.
_FLAGS = ("-ffp-contract=off",)


def build_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """Returns pairs.c, built where no earlier build is found; see c_library.py for where, and what it raises."""
    return load_c_library(_SOURCE, {"search_pairs": 1}, _FLAGS, cache_dir)[0]


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns pairs.c, or None where it cannot be built, which the log says once."""
    try:
        return build_library()
    except ConfigError as error:
        get_logger(__name__).warning("plans for two slots per rank are searched by Python, with less effort: %s", error)
        return None


def search_pairs_compiled(library: ctypes.CDLL, layer: PairLayer, effort: Effort) -> tuple[Ints, Ints]:
    """Same contract as pair_search.search_pairs, and the same result to the bit."""
    num_ranks, num_experts = len(layer.table), len(layer.most)
    broken, pool = np.empty(num_ranks, dtype=np.int64), np.empty(2 * num_ranks, dtype=np.int64)
    numbers = np.empty(8 * num_ranks + 4 * (num_experts + 1), dtype=np.int64)
    room = np.empty(4 * num_ranks + num_experts + 1)
    reals = layer.values, effort.temperatures, THRESHOLDS, np.array([effort.price])
    arrays: list[NDArray[np.number]] = [
        np.ascontiguousarray(a) for a in (layer.table, layer.start, layer.least, layer.most)
    ]
    arrays += [np.ascontiguousarray(array) for array in reals]
    arrays += [broken, pool, numbers, room]
    task = np.array(
        [
            num_ranks, num_experts, effort.max_broken, effort.blocks, effort.steps // effort.blocks,
            effort.seed, *(array.ctypes.data for array in arrays),
        ],
        dtype=np.int64,
    )  # fmt: skip
    num_broken = library.search_pairs(task.ctypes.data)
    return broken[:num_broken], pool[: 2 * num_broken]
