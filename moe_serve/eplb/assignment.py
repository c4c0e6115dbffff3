"""Gives every row of a square table a column of its own, at the lowest price in all: an assignment problem.

Rows whose cheapest column is free take it; each other one finds the cheapest chain of rows that would change theirs
(Kuhn, Munkres; Jonker, Volgenant). Prices are whole numbers, so that every machine finds the same. assignment.c, built
at first use, is about a hundred times faster.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import load_c_library
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

Ints = NDArray[np.int64]
_SOURCE = Path(__file__).with_name("assignment.c")
_NEVER = np.iinfo(np.int64).max


def cheapest_columns(price: Ints) -> Ints:
    """Returns the column of each row, [n] int64: price [n, n] int64, at most 2^60 in size."""
    library = find_library()
    if library is None:
        return cheapest_columns_reference(price)
    price = np.ascontiguousarray(price, dtype=np.int64)
    column = np.empty(len(price), dtype=np.int64)
    if library.cheapest_columns(len(price), price.ctypes.data, column.ctypes.data):
        raise MemoryError("no memory to relabel a placement")
    return column


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns assignment.c, built where no earlier build is found; None, said once, where it cannot be built."""
    try:
        return load_c_library(_SOURCE, {"cheapest_columns": 3, "cheapest_parts": 1})[0]
    except ConfigError as error:
        get_logger(__name__).warning("ranks are relabelled by numpy, about a hundred times slower: %s", error)
        return None


def cheapest_columns_reference(price: Ints) -> Ints:
    """Like `cheapest_columns`, in numpy."""
    size = len(price)
    of_row, of_column = price.min(axis=1), np.zeros(size, dtype=np.int64)
    row, column = np.full(size, -1), np.full(size, -1)
    for i in range(size):
        free = np.flatnonzero((row < 0) & (price[i] == of_row[i]))
        if len(free):
            row[free[0]], column[i] = i, free[0]
    for start in np.flatnonzero(column < 0).tolist():
        least, before, reached = np.full(size, _NEVER), np.full(size, -1), np.zeros(size, dtype=bool)
        i, last = start, -1
        while i >= 0:
            rest = price[i] - of_row[i] - of_column
            nearer = ~reached & (rest < least)
            least[nearer], before[nearer] = rest[nearer], last
            last = int(np.where(reached, _NEVER, least).argmin())
            step = least[last]
            of_row[start] += step
            of_row[row[reached]] += step
            of_column[reached] -= step
            least[~reached] -= step
            reached[last] = True
            i = int(row[last])
        while last >= 0:
            previous = int(before[last])
            row[last] = start if previous < 0 else row[previous]
            column[row[last]] = last
            last = previous
    return column.astype(np.int64)
