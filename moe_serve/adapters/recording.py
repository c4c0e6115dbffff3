"""Writes the expert load that an engine counts to a .jsonl trace, for `moe-serve replay`, `advise` and `plan`.

All ranks of an engine see the same load, so the first process that gets the file writes it; the others on its machine
do not. A file that exists is continued.
"""

from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.files.trace_jsonl import RollingTrace, TraceMeta, begin_trace, is_written
from moe_serve.eplb.load import LoadRecord
from moe_serve.errors import ConfigError, TraceError
from moe_serve.log import get_logger

MAX_BYTES = 1 << 30
logger = get_logger(__name__)


class LoadRecording:
    """The trace of one process. Whatever goes wrong ends the recording with a warning, never the engine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trace: RollingTrace | None = None
        self._lock: IO[bytes] | None = None
        self._layers: NDArray[np.intp] | None = None
        self._num_logical = 0
        self._next_step = 0
        self._ended = False

    def add(self, load: NDArray[np.number], num_steps: int) -> None:
        """Appends a window: load [L, E] tokens of num_steps steps. Layers without load in the first one are left out.

        A load of another shape is of another model, such as a draft model, and is not recorded.
        """
        if self._ended or not load.any():
            return
        try:
            if self._trace is None:
                self._begin(load)
            if self._trace is None or self._layers is None:
                return
            if load.shape[1] != self._num_logical or len(load) <= self._layers.max():
                return
            tokens = np.rint(load[self._layers]).astype(np.int64)
            self._trace.add(LoadRecord(self._next_step, num_steps, "mixed", tokens))
            self._next_step += num_steps
        except (ConfigError, TraceError, OSError) as error:
            self._ended = True
            logger.warning("the load is not recorded in %s: %s", self._path, error)

    def close(self) -> None:
        """Ends the recording, so that another one may go on; the end of a process does so too."""
        self._ended = True
        if self._trace is not None:
            self._trace.close()

    def _begin(self, load: NDArray[np.number]) -> None:
        if is_written(self._path):
            self._ended = True  # by another process of this engine
            return
        layers = np.flatnonzero(load.any(axis=1))
        meta = TraceMeta(load.shape[1], tuple(layers.tolist()))
        self._lock = begin_trace(self._path, meta)
        self._trace = RollingTrace(self._path, meta, MAX_BYTES, self._lock)
        self._trace.open(0)
        self._layers, self._num_logical = layers, load.shape[1]
        logger.info("the load of %d layers x %d experts is recorded in %s", len(layers), load.shape[1], self._path)
