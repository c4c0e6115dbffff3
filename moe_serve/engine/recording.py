"""Load records of one rank: when each begins, when it is final, and the trace file that it is written to.

A reduction over all ranks closes a record. The next exchange makes it final: a rank that completes the exchange knows
that all ranks have completed the reduction. If a rank is lost before that, all remaining ranks drop the record and its
counts go into the next one. So every token is in exactly one record, whichever rank writes it.
"""

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moe_serve.dispatch.shm.membership import Membership
from moe_serve.engine.step import StepPlan
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.eplb.files.jsonl_writer import JsonlWriter
from moe_serve.eplb.files.trace_jsonl import read_jsonl
from moe_serve.eplb.files.trace_meta import TraceMeta
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError, TraceError
from moe_serve.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class _Window:
    """Where a load record began, and where experts were."""

    first_step: int
    start_s: float
    placement: Placement


class LoadWindows:
    """The record that is being counted, and those that are closed but not yet final.

    placement: where experts are now
    on_record: called with each record once it is final
    """

    def __init__(
        self,
        recorder: LoadRecorder,
        placement: Placement,
        model_id: str,
        on_record: Callable[[LoadRecord], None] | None = None,
    ):
        self.placement = placement
        self.on_record = on_record
        self._recorder = recorder
        self._model_id = model_id
        self._closed: list[LoadRecord] = []
        self._window = self._confirmed = _Window(0, time.monotonic(), placement)

    def begin_step(self, plan: StepPlan) -> None:
        """Confirms the closed records, and closes the running one where the group changes. Collective in that case.

        Raises PeerError when a peer does not take part: the record goes on.
        """
        self.confirm()
        if plan.regrouped or plan.rejoining:
            self.close(plan.step)
        if plan.rejoining:
            self.confirm()  # a rank that could not close it does not regroup, so no rank rejoins now

    def end_step(self, plan: StepPlan) -> None:
        """Closes the record after the step where the plan says so. Collective in that case; raises as `begin_step`."""
        if plan.close_window:
            self.close(plan.step + 1)
        if plan.stop:
            self.confirm()

    def close(self, step: int) -> None:
        """Closes the record, whose last step is the one before `step`. Collective; raises as `begin_step`."""
        now_s, window = time.monotonic(), self._window
        num_steps = step - window.first_step
        tokens = self._recorder.take(begins_anew=num_steps > 0)
        if num_steps == 0:
            return  # this rank has just begun its record, and others close theirs
        self._window = _Window(step, now_s, self.placement)
        self._closed.append(
            LoadRecord(
                first_step=window.first_step,
                num_steps=num_steps,
                phase="mixed",
                tokens=tokens,
                step_time_s=(now_s - window.start_s) / num_steps,
                model_id=self._model_id,
                placement_version=window.placement.version,
                placement=window.placement,
            )
        )

    def confirm(self) -> None:
        """Passes the closed records on: all ranks have completed their reductions."""
        if not self._closed:
            return
        self._recorder.confirm()
        self._confirmed = self._window
        closed, self._closed = self._closed, []
        if self.on_record is not None:
            for record in closed:
                self.on_record(record)

    def void(self) -> None:
        """Drops what was counted since the last finished step, and the records closed since `confirm`."""
        self._recorder.void_step()
        self._window, self._closed = self._confirmed, []

    def rejoin(self, first_step: int) -> None:
        """Begins the record of a rank that rejoins at first_step, where the other ranks' record begins."""
        self._recorder.rejoin()
        self._window = self._confirmed = _Window(first_step, time.monotonic(), self.placement)


def begin_trace(path: Path, meta: TraceMeta) -> None:
    """Creates the trace file, or checks that an existing one holds the load of the same model and can be continued.

    Raises ConfigError when the file cannot be written or holds anything else; it never overwrites a file.
    """
    try:
        if not path.exists() or path.stat().st_size == 0 or _is_unfinished_header(path, meta):
            JsonlWriter(path, meta).close()
            return
        found = TraceMeta.of(read_jsonl(path))
        end_of_trace(path)
    except OSError as error:
        raise ConfigError(
            f"eplb.record_path: {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None
    except TraceError as error:
        raise ConfigError(
            f"eplb.record_path: {path} exists and is not a .jsonl load trace that can be continued ({error}); "
            "name another file, or move this one away"
        ) from None
    if found != meta:
        raise ConfigError(
            f"eplb.record_path: {path} holds the load of {_shape(found)}, and this server runs {_shape(meta)}; "
            "name another file, or move this one away"
        )


def end_of_trace(path: Path) -> int:
    """Returns the step after the last record of a trace, 0 without records, and removes an unfinished last line.

    A process that ends while it writes leaves one. Raises OSError, and TraceError for lines that are not of a trace.
    """
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = text.rfind(b"\n") + 1
            step = _step_after(text, end, path)
        file.truncate(end)
    return step


class TraceWriter:
    """Appends records to a trace file. When a write fails, the trace ends and serving continues.

    Every rank has a writer; the lowest rank that takes part writes, so that the trace continues when rank 0 is masked.
    """

    def __init__(self, path: Path, meta: TraceMeta, rank: int, membership: Membership | None):
        """membership: None where no rank can be masked"""
        self._path = path
        self._meta = meta
        self._rank = rank
        self._membership = membership
        self._writer: JsonlWriter | None = None
        self._group_epoch = 0
        self._has_failed = False

    def add(self, record: LoadRecord) -> None:
        """Writes a record if this rank is the one that writes."""
        membership = self._membership
        first, group_epoch = (0, 0) if membership is None else (membership.members[0], membership.epoch)
        if self._has_failed or first != self._rank:
            return
        try:
            if self._writer is None or group_epoch != self._group_epoch:
                self._writer = self._open_to_append(record)
                self._group_epoch = group_epoch
            self._writer.add(record)
        except (OSError, TraceError) as error:
            self._has_failed = True  # the last line may be incomplete, so nothing may follow it
            reason = error.strerror if isinstance(error, OSError) else error
            log.error("eplb.record_path: the trace %s ends here (%s); serving continues", self._path, reason)

    def _open_to_append(self, record: LoadRecord) -> JsonlWriter:
        """Opens the file to append to what an earlier run or another rank has written.

        Steps of a run count from 0, steps of the trace continue: the first record tells where the run begins in it.
        """
        if self._writer is not None:
            self._writer.close()
        run_begins = max(0, end_of_trace(self._path) - record.first_step)
        return JsonlWriter(self._path, self._meta, append=True, step_zero=run_begins)


def _is_unfinished_header(path: Path, meta: TraceMeta) -> bool:
    header = msgspec.json.encode(meta.to_json())
    return path.stat().st_size <= len(header) and header.startswith(path.read_bytes())


def _step_after(text: mmap.mmap, end: int, path: Path) -> int:
    """Returns the step after the last record in the lines before byte `end`."""
    while end > 0:
        start = text.rfind(b"\n", 0, end - 1) + 1
        try:
            content = msgspec.json.decode(text[start:end]) if text[start:end].strip() else {}
            if "first_step" in content:
                return int(content["first_step"]) + int(content["num_steps"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, byte {start}: not a line of a load trace ({error!r})") from None
        end = start
    return 0


def _shape(meta: TraceMeta) -> str:
    layers = meta.moe_layer_ids
    return (
        f"{meta.model_id or 'an unnamed model'} ({len(layers)} MoE layers from {layers[0]} to {layers[-1]}, "
        f"{meta.num_logical} experts, topk {meta.topk})"
    )
