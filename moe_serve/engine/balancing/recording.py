"""Keeps a rank's part of a client's recording, and writes the files that SGLang's recorder would write.

stat:      one file, {"rank", "logical_count": [windows, model layers, E], …}, summed over ranks.
per_pass:  one file of each rank, {"records": [{"forward_pass_id", "rank", "gatherer_key", "global_physical_count":
           [model layers, P], "forward_mode"}], "last_physical_to_logical_map": [model layers, P]}.
per_token: the same with "topk_ids_of_layer" [model layers, tokens, K] (slots, -1 = none), "input_ids" and "positions"
           in place of the counts.

These files name one placement, the last one, and their readers apply it to all passes. So a pass from before a change
of placement is written as if the first slot of each expert in the last placement had served it: which rank sent how
many tokens to which expert stays exact, only the split over replicas of such passes is lost. Dense layers are zero (or
-1).
"""

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_serve.config.sections import EplbConfig
from moe_serve.engine.step.plan import RecorderStates, StepPlan
from moe_serve.ep.pass_recorder import ForwardPass, PassRecorder
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.log import get_logger

log = get_logger(__name__)
_GROUP_CHANGED = "ranks were lost or have rejoined"
_FORWARD_MODE = {"prefill": 1, "decode": 2, "mixed": 3}  # SGLang's ForwardMode


@dataclass(frozen=True)
class Dump:
    """A dump of all ranks, of which this one may write a file.

    paths: of the files of all ranks;  text: what they hold;  done: of the own file; raises OSError where it could not
    be written
    """

    paths: tuple[Path, ...]
    text: str
    done: Future[None]


@dataclass(frozen=True)
class RecordedPass:
    """A forward of one rank. placement: in use then"""

    step: int
    phase: str
    tokens: ForwardPass
    placement: Placement


@dataclass
class Recording:
    """The load since a client's start: windows in mode stat, passes in the others.

    max_bytes: beyond it the recording ends
    until:     the step at which it has ended; None: it runs.  why_ended: by itself; "" = a client has stopped it
    """

    max_bytes: int
    until: int | None = None
    why_ended: str = ""
    windows: list[LoadRecord] = field(default_factory=list)
    passes: list[RecordedPass] = field(default_factory=list)
    num_bytes: int = 0

    def add_window(self, record: LoadRecord) -> None:
        """Keeps a window that began before the recording ended."""
        if self.until is None or record.first_step < self.until:
            self.windows.append(record)
            self._count(record.tokens.nbytes, record.first_step + record.num_steps)

    def add_pass(self, step: int, phase: str, tokens: ForwardPass, placement: Placement) -> None:
        self.passes.append(RecordedPass(step, phase, tokens, placement))
        self._count(tokens.num_bytes, step + 1)

    def end(self, step: int, why: str = "") -> None:
        """Ends the recording before a step, if it runs."""
        if self.until is None:
            self.until, self.why_ended = step, why

    @property
    def text(self) -> str:
        """Its content, in words."""
        what = f"{len(self.passes)} passes" if self.passes else f"{len(self.windows)} windows"
        why = f"; it ended before step {self.until}: {self.why_ended}" if self.why_ended else ""
        return f"{what}, {self.num_bytes / 2**20:.1f} MiB{why}"

    def _count(self, num_bytes: int, next_step: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.max_bytes:
            self.end(next_step, "it has reached eplb.recorder_max_mib")


@dataclass(frozen=True)
class ModelRows:
    """The rows of a dump: SGLang counts all layers of a model, we count MoE layers."""

    num_layers: int
    moe_layer_ids: tuple[int, ...]

    def expand(self, rows: Tensor, fill: int) -> Tensor:
        """Returns rows [MoE layers, …] among those of all layers, [model layers, …]; the others hold fill."""
        whole = rows.new_full((self.num_layers, *rows.shape[1:]), fill)
        whole[list(self.moe_layer_ids)] = rows
        return whole


class DumpRecorder:
    """The recording of one rank. All ranks start, stop and dump between the same two steps."""

    def __init__(self, rank: int, config: EplbConfig, rows: ModelRows, passes: PassRecorder | None):
        """passes: None in mode stat, in which each rank keeps the windows of all, so that any of them can write"""
        self._rank = rank
        self._mode, self._folder = config.recorder_mode, dump_folder(config)
        self._max_bytes = int(config.recorder_max_mib * 2**20)
        self._rows = rows
        self._passes = passes
        self._recording: Recording | None = None
        # Files are written beside the steps, one after the other.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dump")

    @property
    def holds_recording(self) -> bool:
        return self._recording is not None

    def forget(self) -> None:
        """Drops the recording of a masked rank; the others keep theirs."""
        self._recording = None
        if self._passes is not None:
            self._passes.is_on = False

    def end_step(self, plan: StepPlan, placement: Placement) -> None:
        """Keeps the forward of a step. Ends the recording when the group changes: masked ranks have missed a part."""
        recording = self._recording
        if recording is None or recording.until is not None:
            return
        if plan.regrouped or plan.rejoining:
            recording.end(plan.step, _GROUP_CHANGED)
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
        """Begins a recording and drops the one before. Returns its mode and folder, in words."""
        self._recording = Recording(self._max_bytes)
        if self._passes is not None:
            self._passes.is_on = True
        return f"mode {self._mode}, into {self._folder}"

    def stop(self, step: int) -> str:
        """Ends the recording before a step. Returns its content, in words."""
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
            paths = {states.holders[0]: self._folder / f"{name}.pt"}
        else:
            paths = {holder: self._folder / f"{name}_{holder}.pt" for holder in states.holders}
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


def dump_folder(config: EplbConfig) -> Path:
    """Returns the folder of the dumps; where eplb.recorder_dir names none, it is the one that SGLang would use."""
    return Path(
        config.recorder_dir or os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR") or tempfile.gettempdir()
    )


def stat_content(recording: Recording, rank: int, rows: ModelRows) -> dict[str, Any]:
    """Returns the content of a stat dump."""
    counts = [rows.expand(torch.tensor(record.tokens), 0) for record in recording.windows]
    empty = torch.zeros(0, rows.num_layers, 0, dtype=torch.int64)
    return {
        "rank": rank,
        "logical_count": torch.stack(counts) if counts else empty,
        "average_utilization_rate_over_window": None,
    }


def passes_content(recording: Recording, rank: int, rows: ModelRows, last: Placement) -> dict[str, Any]:
    """Returns the content of a rank's per_pass or per_token dump. last: the placement in use now"""
    records = []
    for each in recording.passes:
        tokens = each.tokens
        record: dict[str, Any] = {
            "forward_pass_id": each.step,
            "rank": rank,
            "gatherer_key": "primary",
            "forward_mode": _FORWARD_MODE[each.phase],
        }
        if tokens.slot_counts is not None:
            counts = tokens.slot_counts
            if not _same_map(each.placement, last):
                counts = counts_in(last, counts, each.placement)
            record["global_physical_count"] = rows.expand(counts, 0)
        if tokens.slots is not None:
            slots = tokens.slots
            if not _same_map(each.placement, last):
                slots = slots_in(last, slots, each.placement)
            record["topk_ids_of_layer"] = rows.expand(slots, -1)
            record["input_ids"] = tokens.input_ids.tolist()
            record["positions"] = tokens.positions.tolist()
        records.append(record)
    # SGLang's readers scatter by this table and have no word for an empty slot; nothing is counted in one.
    table = torch.tensor(np.maximum(last.physical_to_logical, 0).astype(np.int64))
    return {"records": records, "last_physical_to_logical_map": rows.expand(table, 0)}


def counts_in(last: Placement, counts: Tensor, placement: Placement) -> Tensor:
    """Returns counts [L, P] of the slots of a placement as counts of the same experts' first slots in the last one."""
    out = torch.zeros_like(counts)
    slots = torch.arange(counts.shape[1]).expand(counts.shape)[:, :, None]
    return out.scatter_add_(1, slots_in(last, slots, placement)[:, :, 0].clamp(min=0).long(), counts)


def slots_in(last: Placement, slots: Tensor, placement: Placement) -> Tensor:
    """Returns slots [L, T, K] of a placement (-1 = none) as the first slots of the same experts in the last one."""
    experts = np.pad(placement.physical_to_logical, ((0, 0), (0, 1)), constant_values=-1)  # -1 reads the last entry
    first = np.pad(last.logical_to_physical[:, :, 0], ((0, 0), (0, 1)), constant_values=-1)
    rows = np.arange(len(experts))[:, None, None]
    return torch.from_numpy(first[rows, experts[rows, slots.numpy()]].astype(np.int32))


def write_dump(path: Path, content: dict[str, Any]) -> None:
    """Writes a .pt file, complete or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            torch.save(content, file)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _same_map(one: Placement, other: Placement) -> bool:
    return one is other or np.array_equal(one.physical_to_logical, other.physical_to_logical)
