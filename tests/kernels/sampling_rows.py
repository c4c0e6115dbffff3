"""Parameters of sampling for tests."""

from collections.abc import Mapping, Sequence

import numpy as np

from moe_serve.kernels.sampling import SAMPLING_ROW, LogitChanges, SamplingRows

PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1, "seed": 0, "output_index": 0}


def rows_of(each: Sequence[Mapping[str, float]], changes: Sequence[LogitChanges | None] = ()) -> SamplingRows:
    """Returns one row for each mapping, of PLAIN where it says nothing. changes: of each row, or of none"""
    assert all(parameters.keys() <= PLAIN.keys() for parameters in each)
    return SamplingRows(np.array([tuple({**PLAIN, **one}.values()) for one in each], SAMPLING_ROW), list(changes))


def banned(*ids: int) -> LogitChanges:
    return LogitChanges(banned=np.array(ids, np.int64))


def one_row(**parameters: float) -> SamplingRows:
    return rows_of([parameters])
