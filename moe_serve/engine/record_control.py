"""The commands of clients to the recorder of expert load, and their answers.

    ask          a command arrives at all ranks; the leader, the lowest rank that takes part, keeps it
    to_show      the leader shows it in its row of the exchange
    end_step     the plan lists it: the load record ends with this step, on all ranks
    add          that record is final: every rank starts, stops or dumps, between the same two steps
    to_show      the leader answers; after a dump, once its own file is written

A command whose record was dropped, because a rank was lost, is shown again.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass

from moe_serve.engine.dump_recorder import Dump, DumpRecorder
from moe_serve.engine.load_windows import LoadWindows
from moe_serve.engine.messages import Answer, Message, RecordCommand
from moe_serve.engine.step import RECORD_COMMANDS, StepPlan
from moe_serve.eplb.load import LoadRecord
from moe_serve.log import get_logger

log = get_logger(__name__)
_MAX_WAITING = 16  # commands
_CLOSE_S = 10.0  # for a dump that is being written when the engine ends
_START_FIRST = "nothing is recorded: start a recording first (POST /start_expert_distribution_record)"


@dataclass(frozen=True)
class _Agreed:
    """A command that the plan lists. until: the step before which the record ends that it is carried out with"""

    command: str
    until: int
    call: RecordCommand | None  # on the leader


@dataclass(frozen=True)
class Speaker:
    """This rank towards the front end. leader: returns the lowest rank that takes part, which answers commands"""

    rank: int
    epoch: int
    leader: Callable[[], int]
    send: Callable[[Message], None]

    @property
    def is_leader(self) -> bool:
        return self.leader() == self.rank

    def answer(self, call: RecordCommand, ok: bool, text: str, files: list[str] | None = None) -> None:
        facts = {} if files is None else {"files": files}
        self.send(Answer(self.rank, self.epoch, call.call_id, ok, text, facts))


class RecordControl:
    """Carries out the commands on one rank, at the same step as the other ranks."""

    def __init__(self, speaker: Speaker, windows: LoadWindows, recorder: DumpRecorder | None):
        """recorder: None: no load is recorded"""
        self._speaker = speaker
        self._windows = windows
        self._recorder = recorder
        self._waiting: deque[RecordCommand] = deque()
        self._agreed: _Agreed | None = None
        self._dump: tuple[RecordCommand | None, Dump] | None = None
        windows.listeners.append(self.add)

    @property
    def has_work(self) -> bool:
        """Whether the next exchange should not wait for other work."""
        return bool(self._waiting) and self._dump is None

    def ask(self, call: RecordCommand) -> None:
        """Takes a command of a client, on the leader; the others hear of it from the plan."""
        if not self._speaker.is_leader:
            return
        if self._recorder is None:
            self._speaker.answer(call, False, "eplb.mode is off: no expert load is recorded; set eplb.mode: static")
        elif call.command not in RECORD_COMMANDS or len(self._waiting) >= _MAX_WAITING:
            known = ", ".join(RECORD_COMMANDS)
            text = f"the command is {call.command!r} behind {len(self._waiting)} others; it takes {known}, in turn"
            self._speaker.answer(call, False, text)
        else:
            self._waiting.append(call)

    def forget(self) -> None:
        """Drops the commands of a masked rank; the front end has told its clients so."""
        self._waiting.clear()

    def close(self) -> None:
        """Lets a dump that is being written come to its end."""
        if self._dump is not None:
            wait([self._dump[1].done], _CLOSE_S)
            self._finish_dump()

    def to_show(self) -> int:
        """Returns the command that this rank shows in its row, as 1 + index into RECORD_COMMANDS; 0 = none."""
        self._finish_dump()
        if not self._waiting or self._agreed is not None or self._dump is not None:
            return 0
        if not self._speaker.is_leader:
            self._hand_back()
            return 0
        return 1 + RECORD_COMMANDS.index(self._waiting[0].command)

    def end_step(self, plan: StepPlan) -> None:
        """Keeps what the recorder needs of a step, before its load record is closed."""
        if self._recorder is None:
            return
        self._recorder.end_step(plan, self._windows.placement)
        self._agreed = None  # a command of the step before whose record was dropped
        if plan.record is not None:
            leads = self._speaker.is_leader and self._waiting
            self._agreed = _Agreed(plan.record, plan.step + 1, self._waiting[0] if leads else None)

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
                self._answer(agreed.call, self._recorder.stop(agreed.until))
            case "dump":
                self._begin_dump(self._recorder, agreed.call)

    def _hand_back(self) -> None:
        """Refuses the commands that wait: a lower rank has rejoined, and leads now without having heard of them."""
        while self._waiting:
            call, leader = self._waiting.popleft(), self._speaker.leader()
            text = f"rank {leader} has rejoined and leads now; send the {call.command} command again"
            self._speaker.answer(call, False, text)

    def _begin_dump(self, recorder: DumpRecorder, call: RecordCommand | None) -> None:
        dump = recorder.dump(self._speaker.is_leader, self._windows.placement)
        if dump is not None:
            self._dump = call, dump
        elif call is not None:
            self._speaker.answer(call, False, _START_FIRST)

    def _finish_dump(self) -> None:
        if self._dump is None or not self._dump[1].done.done():
            return
        (call, dump), self._dump = self._dump, None
        error = dump.done.exception()
        if error is None:
            self._answer(call, dump.text, [str(dump.path)])
            return
        text = f"{dump.path} cannot be written ({error}); make room, or name another folder: eplb.recorder_dir"
        log.error("%s; serving continues", text)
        if call is not None:
            self._speaker.answer(call, False, text)

    def _answer(self, call: RecordCommand | None, text: str, files: list[str] | None = None) -> None:
        if call is not None:
            self._speaker.answer(call, True, text, files)
