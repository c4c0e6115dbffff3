"""Writes the load records of a running server, and what its balancer does, to the trace file of eplb.record_path."""

from collections.abc import Callable
from typing import Any

from moe_serve.dispatch.shm.membership import Membership
from moe_serve.eplb.files.rolling_trace import RollingTrace
from moe_serve.eplb.load import LoadRecord
from moe_serve.errors import TraceError
from moe_serve.log import get_logger

log = get_logger(__name__)


class TraceWriter:
    """Appends records and events to a trace. When a write fails, the trace ends and serving continues.

    Every rank has a writer and hears of all records; the lowest rank that takes part writes, so that the trace
    continues when rank 0 is masked.
    """

    def __init__(self, trace: RollingTrace, rank: int, membership: Membership | None):
        """membership: None where no rank can be masked"""
        self._trace = trace
        self._rank = rank
        self._membership = membership
        self._group_epoch = 0
        self._next_step = 0  # after the last record, whichever rank has written it
        self._has_failed = False

    def add(self, record: LoadRecord) -> None:
        """Writes a record if this rank is the one that writes."""
        self._next_step = record.first_step
        self._write(lambda: self._trace.add(record))
        self._next_step = record.first_step + record.num_steps

    def rejoin(self, step: int) -> None:
        """Goes on at a step: this rank has not heard of the records before."""
        self._next_step = step

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Writes what happened at a step if this rank is the one that writes. fields: JSON values"""
        self._write(lambda: self._trace.event(name, step, **fields))

    def close(self) -> None:
        """Closes the file and gives up its lock; the next record opens it again."""
        self._trace.close()

    def _write(self, append: Callable[[], None]) -> None:
        membership = self._membership
        first, group_epoch = (0, 0) if membership is None else (membership.members[0], membership.epoch)
        if self._has_failed or first != self._rank:
            return
        try:
            if not self._trace.is_open or group_epoch != self._group_epoch:
                self._trace.open(self._next_step)
                self._group_epoch = group_epoch
            append()
        except (OSError, TraceError) as error:
            self._has_failed = True  # the last line may be incomplete, so nothing may follow it
            reason = error.strerror if isinstance(error, OSError) else error
            log.error("eplb.record_path: the trace %s ends here (%s); serving continues", self._trace.path, reason)
