"""One rank's part of a recording that clients start, stop and dump. `load_dump.py` says what the files hold."""

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import environ
from pathlib import Path

from moe_serve.config.sections import EplbConfig
from moe_serve.engine.balancing.load_dump import ModelRows, Recording, passes_content, stat_content, write_dump
from moe_serve.engine.step import RecorderStates, StepPlan
from moe_serve.ep.pass_recorder import PassRecorder
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.log import get_logger

log = get_logger(__name__)
GROUP_CHANGED = "ranks were lost or have rejoined"


@dataclass(frozen=True)
class RecorderSettings:
    """mode: "stat", "per_pass" or "per_token";  folder: of the dumps;  max_bytes: of one recording on one rank"""

    mode: str
    folder: Path
    max_bytes: int

    @classmethod
    def of(cls, config: EplbConfig) -> "RecorderSettings":
        """Returns the settings; where eplb.recorder_dir names no folder, it is the one that SGLang would use."""
        folder = config.recorder_dir or environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR") or tempfile.gettempdir()
        return cls(config.recorder_mode, Path(folder), int(config.recorder_max_mib * 2**20))


@dataclass(frozen=True)
class Dump:
    """A dump of all ranks, of which this one may write a file.

    paths: of the files of all ranks;  text: what they hold;  done: of the own file; raises OSError where it could not
    be written
    """

    paths: tuple[Path, ...]
    text: str
    done: Future[None]


class DumpRecorder:
    """Keeps what a rank has to dump. All ranks start, stop and dump between the same two steps."""

    def __init__(self, rank: int, settings: RecorderSettings, rows: ModelRows, passes: PassRecorder | None):
        """passes: None in mode stat, in which each rank keeps the windows of all, so that any of them can write"""
        self._rank = rank
        self._settings = settings
        self._rows = rows
        self._passes = passes
        self._recording: Recording | None = None
        # Files are written beside the steps, one after the other.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dump")

    @property
    def holds_recording(self) -> bool:
        return self._recording is not None

    def forget(self) -> None:
        """Drops the recording of a masked rank: the others go on or end without it, and hold what was recorded."""
        self._recording = None
        if self._passes is not None:
            self._passes.is_on = False

    def end_step(self, plan: StepPlan, placement: Placement) -> None:
        """Keeps the forward of a step. Ends the recording when the group changes: masked ranks have missed a part."""
        recording = self._recording
        if recording is None or recording.until is not None:
            return
        if plan.regrouped or plan.rejoining:
            recording.end(plan.step, GROUP_CHANGED)
        elif self._passes is not None and plan.runs_forward:
            recording.add_pass(plan.step, plan.phase, self._passes.take(), placement)
        self._ended(recording)

    def add(self, record: LoadRecord) -> None:
        """Keeps a window that is final."""
        recording = self._recording
        if self._passes is None and recording is not None:
            was_running = recording.until is None
            recording.add_window(record)
            if was_running:
                self._ended(recording)

    def start(self) -> str:
        """Begins a recording; drops the one before. Returns what it does, in words."""
        self._recording = Recording(self._settings.max_bytes)
        if self._passes is not None:
            self._passes.is_on = True
        return f"mode {self._settings.mode}, into {self._settings.folder}"

    def stop(self, step: int) -> str:
        """Ends the recording before a step. Returns what it holds, in words."""
        if self._recording is None:
            return "nothing was being recorded"
        self._recording.end(step)
        self._ended(self._recording)
        return self._recording.text

    def dump(self, states: RecorderStates, placement: Placement) -> Dump | None:
        """Begins to write the recording, and begins anew if it runs; None where no rank holds one.

        placement: in use now. In mode stat the lowest of the ranks that hold the recording writes for all.
        """
        if not states.holders:
            return None
        recording, rank = self._recording, self._rank
        name = f"expert_distribution_recorder_{states.time_us / 1e6}"
        if self._passes is None:
            paths = {states.holders[0]: self._settings.folder / f"{name}.pt"}
        else:
            paths = {holder: self._settings.folder / f"{name}_{holder}.pt" for holder in states.holders}
        done: Future[None] = Future()
        text = f"recorded without rank {rank}, which has rejoined since"
        if recording is not None:
            self._recording = Recording(recording.max_bytes) if recording.until is None else None
            text = recording.text
        if recording is not None and rank in paths:
            done = self._writer.submit(self._write, paths[rank], recording, placement)
        else:
            done.set_result(None)
        return Dump(tuple(paths.values()), text, done)

    def _write(self, path: Path, recording: Recording, placement: Placement) -> None:
        if self._passes is None:
            write_dump(path, stat_content(recording, self._rank, self._rows))
        else:
            write_dump(path, passes_content(recording, self._rank, self._rows, placement))
        log.info("%s: %s", path, recording.text)

    def _ended(self, recording: Recording) -> None:
        """Stops collecting once the recording has ended."""
        if recording.until is None:
            return
        if self._passes is not None:
            self._passes.is_on = False
        if recording.why_ended:
            log.warning("the recording of expert load ends with %s", recording.text)
