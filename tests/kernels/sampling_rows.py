"""Parameters of sampling for tests."""

from collections.abc import Mapping, Sequence

import numpy as np

from moe_serve.kernels.sampling import SAMPLING_ROW, SamplingRows

PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1, "seed": 0, "output_index": 0}


def rows_of(each: Sequence[Mapping[str, float]], banned: Sequence[Sequence[int]] | None = None) -> SamplingRows:
    """Returns one row for each mapping, of PLAIN where it says nothing. banned: ids of each row"""
    banned = banned or [()] * len(each)
    assert all(parameters.keys() <= PLAIN.keys() for parameters in each)
    rows = np.array([tuple({**PLAIN, **parameters}.values()) for parameters in each], SAMPLING_ROW)
    starts = np.cumsum([0, *map(len, banned)], dtype=np.int64)
    return SamplingRows(rows, starts, np.array([token for ids in banned for token in ids], np.int64))


def one_row(**parameters: float) -> SamplingRows:
    return rows_of([parameters])
