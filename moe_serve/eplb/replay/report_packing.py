"""How arrays become small enough for a page: windows in groups, tables as bytes in base64."""

import base64

import numpy as np
from numpy.typing import NDArray

_MAX_COLUMNS = 600  # of a picture or line over windows


def page_groups(num_windows: int) -> list[NDArray[np.int64]]:
    """Returns the windows that each column of a page averages, in order; at most 600 columns, none without windows."""
    return np.array_split(np.arange(num_windows), min(num_windows, _MAX_COLUMNS)) if num_windows else []


def packed(table: NDArray[np.generic]) -> str:
    """Returns the bytes of an array in base64, row by row."""
    return base64.b64encode(np.ascontiguousarray(table).tobytes()).decode()
