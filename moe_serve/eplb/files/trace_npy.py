"""Counts in a plain .npy file: [T, L, E], or [L, E] for one window. Mapped, so memory is needed for one record only."""

import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_serve.eplb.files.counts import check_table_size
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

NPY_MAGIC = b"\x93NUMPY"
# What numpy raises for a damaged header, which is a piece of Python, and for a shape that the file does not hold.
_NPY_ERRORS = (
    ValueError, SyntaxError, tokenize.TokenError, EOFError, OSError, TypeError, OverflowError, MemoryError,
    RecursionError,
)  # fmt: skip


def read_npy(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a .npy file; its layers count from 0."""
    try:
        counts = np.load(path, mmap_mode="r", allow_pickle=False)
    except _NPY_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0]
        raise TraceError(f"{path} is not a complete .npy of numbers ({reason:.120}); write it again") from None
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or not counts.size or counts.dtype.kind not in "iuf":
        raise TraceError(
            f"{path}: shape {list(counts.shape)} of {counts.dtype}, expected counts [records, layers, experts]"
        )
    num_records, num_layers, num_experts = counts.shape
    check_table_size(num_layers, num_experts, str(path))
    return LoadTrace(
        _Reader(counts, path, progress),
        num_experts,
        tuple(range(num_layers)),
        source=f"{path} (npy)",
        num_records=num_records,
    )


@dataclass(frozen=True, eq=False)
class _Reader:
    counts: np.ndarray
    path: Path
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        for index, table in enumerate(self.counts):
            try:
                yield LoadRecord(index, 1, "mixed", table)
            except TraceError as problem:
                raise TraceError(f"{self.path}, record {index}: {problem}") from None
            if self.progress is not None:
                self.progress(index + 1, len(self.counts))
