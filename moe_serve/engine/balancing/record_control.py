"""The commands of clients to the recorder of expert load, and their answers.

    ask          a command arrives at all ranks; the leader, the lowest rank that takes part, keeps it
    to_show      the leader shows it in its row of the exchange
    end_step     the plan lists it: the load record ends with this step, on all ranks
    add          that record is final: every rank starts, stops or dumps, between the same two steps
    end_step     the leader answers a dump, once no rank shows that it is writing

A command whose record was dropped, because a rank was lost, is shown again. A masked rank drops its recording. Where it
rejoins as the leader, the others' rows say who holds one that ran without it: they write the files that it names.
`recording.py` says what a rank keeps, and what the files hold.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from moe_serve.config.sections import EplbConfig
from moe_serve.engine.balancing.recording import Dump, DumpRecorder, ModelRows
from moe_serve.engine.model.load_windows import LoadWindows
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.engine.protocol.messages import Answer, Message, RecordCommand
from moe_serve.engine.step.plan import (
    DUMP_FAILED,
    HOLDS_RECORDING,
    RECORD_COMMANDS,
    WRITES_DUMP,
    RecorderStates,
    StepPlan,
)
from moe_serve.eplb.load import LoadRecord
from moe_serve.log import get_logger

log = get_logger(__name__)
_MAX_WAITING = 16  # commands
_CLOSE_S = 10.0  # for a dump that is being written when the engine ends
_START_FIRST = "nothing is recorded: start a recording first (POST /start_expert_distribution_record)"


@dataclass(frozen=True)
class _Agreed:
    """A command in the plan. until: the first step after the record with which it is carried out"""

    command: str
    until: int
    call: RecordCommand | None  # on the leader
    states: RecorderStates


@dataclass(frozen=True)
class Shown:
    """The recorder's part of a rank's row: see RankState. command: 0 = none"""

    command: int
    time_us: int
    state: int


@dataclass(frozen=True)
class _RunningDump:
    """call: on the leader;  known_from: the first step in whose rows all ranks show whether they write"""

    call: RecordCommand | None
    dump: Dump
    known_from: int


@dataclass(frozen=True)
class Responder:
    """Answers the front end's commands for this rank. leader: returns the lowest rank that takes part: it answers"""

    rank: int
    launch_id: int
    leader: Callable[[], int]
    send: Callable[[Message], None]

    @property
    def is_leader(self) -> bool:
        return self.leader() == self.rank

    def answer(self, call: RecordCommand, ok: bool, text: str, files: list[str] | None = None) -> None:
        facts = {} if files is None else {"files": files}
        self.send(Answer(self.rank, self.launch_id, call.call_id, ok, text, facts))


class RecordControl:
    """Carries out the commands on one rank, at the same step as the other ranks."""

    def __init__(self, responder: Responder, windows: LoadWindows, recorder: DumpRecorder | None):
        """recorder: None: no load is recorded"""
        self._responder = responder
        self._windows = windows
        self._recorder = recorder
        self._waiting: deque[RecordCommand] = deque()
        self._agreed: _Agreed | None = None
        self._dump: _RunningDump | None = None
        self._dump_failed = False  # the last one
        windows.listeners.append(self.add)

    @property
    def has_work(self) -> bool:
        """Whether the next exchange should come at once, without other work."""
        if self._dump is not None:
            return self._dump.call is not None and self._dump.dump.done.done()  # the others' rows end it
        return bool(self._waiting)

    def ask(self, call: RecordCommand) -> None:
        """Takes a command of a client, on the leader; the others hear of it from the plan."""
        if not self._responder.is_leader:
            return
        if self._recorder is None:
            self._responder.answer(call, False, "eplb.mode is off: no expert load is recorded; set eplb.mode: static")
        elif call.command not in RECORD_COMMANDS or len(self._waiting) >= _MAX_WAITING:
            known = ", ".join(RECORD_COMMANDS)
            text = f"the command is {call.command!r} behind {len(self._waiting)} others; it takes {known}, in turn"
            self._responder.answer(call, False, text)
        else:
            self._waiting.append(call)

    def forget(self) -> None:
        """Drops the commands of a masked rank, whose clients the front end has answered, and its recording."""
        self._waiting.clear()
        self._dump = None
        if self._recorder is not None:
            self._recorder.forget()

    def close(self) -> None:
        """Waits for a dump that is being written."""
        if self._dump is not None and wait([self._dump.dump.done], _CLOSE_S).done:
            self._note_own_file()
            self._end_dump(())

    def to_show(self) -> Shown:
        """Returns the recorder's part of this rank's row."""
        state = 0 if self._recorder is None or not self._recorder.holds_recording else HOLDS_RECORDING
        if self._dump is not None and not self._dump.dump.done.done():
            state |= WRITES_DUMP
        self._note_own_file()
        if self._dump_failed:
            state |= DUMP_FAILED
        if self._waiting and self._agreed is None and self._dump is None:
            if self._responder.is_leader:
                command = 1 + RECORD_COMMANDS.index(self._waiting[0].command)
                return Shown(command, time.time_ns() // 1000, state)
            self._hand_back()
        return Shown(0, 0, state)

    def end_step(self, plan: StepPlan) -> None:
        """Records a step, before its load record is closed."""
        if self._recorder is None:
            return
        self._recorder.end_step(plan, self._windows.placement)
        if self._dump is not None and plan.step >= self._dump.known_from and not plan.recorders.writers:
            self._end_dump(plan.recorders.failed)
        self._agreed = None  # a command of the step before whose record was dropped
        if plan.record is not None:
            leads = self._responder.is_leader and self._waiting
            call = self._waiting[0] if leads else None
            self._agreed = _Agreed(plan.record, plan.step + 1, call, plan.recorders)

    def add(self, record: LoadRecord) -> None:
        """Hears of a final record, and carries out the command that it ends with."""
        if self._recorder is None:
            return
        self._recorder.add(record)
        agreed = self._agreed
        if agreed is None or record.first_step + record.num_steps != agreed.until:
            return
        self._agreed = None
        if agreed.call is not None:
            self._waiting.popleft()
        match agreed.command:
            case "start":
                self._answer(agreed.call, self._recorder.start())
            case "stop":
                self._answer(agreed.call, self._stop(self._recorder, agreed))
            case "dump":
                self._begin_dump(self._recorder, agreed)

    def _hand_back(self) -> None:
        """Refuses the commands that wait: a lower rank has rejoined, and leads now without having heard of them."""
        while self._waiting:
            call, leader = self._waiting.popleft(), self._responder.leader()
            text = f"rank {leader} has rejoined and leads now; send the {call.command} command again"
            self._responder.answer(call, False, text)

    def _stop(self, recorder: DumpRecorder, agreed: _Agreed) -> str:
        text = recorder.stop(agreed.until)
        if recorder.holds_recording or not agreed.states.holders:
            return text
        holders = ", ".join(map(str, agreed.states.holders))
        return (
            f"the recording had ended before, when rank {self._responder.rank} rejoined; "
            f"rank {holders} holds it, and a dump writes it"
        )

    def _begin_dump(self, recorder: DumpRecorder, agreed: _Agreed) -> None:
        self._dump_failed = False
        dump = recorder.dump(agreed.states, self._windows.placement)
        if dump is not None:
            # The rows of the step that begins now, agreed.until, were exchanged before.
            self._dump = _RunningDump(agreed.call, dump, agreed.until + 1)
        elif agreed.call is not None:
            self._responder.answer(agreed.call, False, _START_FIRST)

    def _note_own_file(self) -> None:
        """Notes whether the own file could be written, once it is known."""
        if self._dump is None or self._dump_failed or not self._dump.dump.done.done():
            return
        error = self._dump.dump.done.exception()
        if error is not None:
            self._dump_failed = True
            log.error("the dump of rank %d cannot be written (%s); serving continues", self._responder.rank, error)

    def _end_dump(self, failed: Sequence[int]) -> None:
        """Answers the dump that has ended. failed: ranks that could not write"""
        if self._dump is None:
            return
        running, self._dump = self._dump, None
        if running.call is None:
            return
        paths, own = running.dump.paths, self._responder.rank
        if not failed and not self._dump_failed:
            self._answer(running.call, running.dump.text, [str(path) for path in paths])
            return
        error = f" ({running.dump.done.exception()})" if self._dump_failed else ""
        ranks = ", ".join(map(str, sorted({*failed, *([own] if self._dump_failed else [])})))
        text = (
            f"rank {ranks} cannot write its file into {paths[0].parent}{error}; make room, or name another folder: "
            "eplb.recorder_dir"
        )
        self._responder.answer(running.call, False, text)

    def _answer(self, call: RecordCommand | None, text: str, files: list[str] | None = None) -> None:
        if call is not None:
            self._responder.answer(call, True, text, files)


def make_record_control(config: EplbConfig, responder: Responder, served: ServedModel) -> RecordControl:
    """Returns the control that carries out clients' commands to the recorder of expert load."""
    if config.mode == "off":
        return RecordControl(responder, served.windows, None)
    rows = ModelRows(served.spec.num_layers, tuple(served.spec.moe_layer_ids))
    return RecordControl(responder, served.windows, DumpRecorder(responder.rank, config, rows, served.passes))
