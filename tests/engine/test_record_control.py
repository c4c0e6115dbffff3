"""Recordings that clients control: same steps on all ranks, and what may go wrong. One rank or two, without a model."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.config import load_config
from moe_serve.config.sections import EplbConfig
from moe_serve.engine.balancing.record_control import RecordControl, Responder
from moe_serve.engine.balancing.recording import DumpRecorder, ModelRows, dump_folder
from moe_serve.engine.protocol.messages import Answer, Message, RecordCommand
from moe_serve.engine.step.plan import RECORD_COMMANDS, RankState, RecorderStates
from moe_serve.ep.pass_recorder import PassRecorder
from moe_serve.eplb import read_trace
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from tests.engine.test_load_windows import plan, windows_of_one_rank

FIRST = Placement(np.array([[0, 1, 2, 3, 0, 1]], dtype=np.int32), 4, 1)
LATER = Placement(np.array([[3, 2, 1, 0, 3, 2]], dtype=np.int32), 4, 1, version=1)


class Rank:
    """A rank whose one layer sends token t of step s to slot s + t. leader: who answers"""

    def __init__(self, folder: Path, mode: str = "per_pass", max_mib: float = 1.0, rank: int = 0):
        self.rank = rank
        self.records: list[LoadRecord] = []
        self.windows, self.counter = windows_of_one_rank(self.records)
        self.windows.placement = FIRST
        self.passes = None if mode == "stat" else PassRecorder(1, 6, mode == "per_token")
        config = EplbConfig(recorder_mode=mode, recorder_dir=str(folder), recorder_max_mib=max_mib)
        self.dumps = DumpRecorder(rank, config, ModelRows(2, (1,)), self.passes)
        self.sent: list[Message] = []
        self.leader = 0
        responder = Responder(rank, 0, lambda: self.leader, self.sent.append)
        self.control = RecordControl(responder, self.windows, self.dumps)
        self.step = 0

    def ask(self, command: str) -> None:
        self.control.ask(RecordCommand(len(self.sent), command))

    def run(self, num_tokens: int = 2, **fields: Any) -> None:
        """One step of this rank alone."""
        run_together([self], num_tokens, **fields)

    def row(self) -> RankState:
        shown = self.control.to_show()
        return RankState(0, self.step, 1, record_command=shown.command, record_time_us=shown.time_us,
                         recorder=shown.state)  # fmt: skip

    def run_as_planned(self, num_tokens: int, command: str | None, states: RecorderStates, **fields: Any) -> None:
        closes = {"close_window": command is not None}
        step = plan(self.step, "decode", record=command, recorders=states, **(closes | fields))
        self.windows.begin_step(step)
        tokens = torch.arange(num_tokens)
        slots = (tokens + self.step)[:, None] % 6
        if self.passes is not None:
            self.passes.begin(tokens, tokens)
            if self.passes.is_on:
                self.passes.add(0, slots)
        experts = torch.tensor(self.windows.placement.physical_to_logical[0])[slots.ravel()]
        self.counter.row(0).add_(torch.bincount(experts, minlength=4))
        self.counter.step_done()
        self.step += 1
        self.control.end_step(step)
        self.windows.end_step(step, 0.01)

    def run_until_answered(self, command: str) -> Answer:
        num_sent = len(self.sent)
        self.ask(command)
        for _ in range(2):
            self.run()
        wait_for(lambda: len(self.sent) > num_sent, self.run)
        answer = self.sent[num_sent]
        assert isinstance(answer, Answer)
        return answer


def wait_for(is_answered: Callable[[], bool], run: Callable[[], None]) -> None:
    """Runs steps until a command is answered: a dump is written beside them."""
    give_up_s = time.monotonic() + 10
    while not is_answered() and time.monotonic() < give_up_s:
        time.sleep(0.001)
        run()


def run_together(ranks: Sequence[Rank], num_tokens: int = 2, **fields: Any) -> None:
    """One step of ranks, as the engine runs it."""
    rows = [rank.row() for rank in ranks]
    states = RecorderStates.of(rows, [rank.rank for rank in ranks])
    command = next((RECORD_COMMANDS[row.record_command - 1] for row in rows if row.record_command), None)
    for rank in ranks:
        rank.run_as_planned(num_tokens, command, states, **fields)


def answer_of(ranks: Sequence[Rank], command: str) -> Answer:
    """What the leader, the first of the ranks, answers to a command."""
    leader = ranks[0]
    num_sent = len(leader.sent)
    leader.ask(command)
    for _ in range(2):
        run_together(ranks)
    wait_for(lambda: len(leader.sent) > num_sent, lambda: run_together(ranks))
    (answer,) = leader.sent[num_sent:]
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("mode", ["stat", "per_pass"])
def test_a_leader_that_rejoins_names_the_recording_that_ran_without_it(tmp_path: Path, mode: str) -> None:
    first, second = Rank(tmp_path, mode), Rank(tmp_path, mode, rank=1)
    assert answer_of([first, second], "start").ok
    first.control.forget()  # as a masked rank does
    second.leader = 1
    run_together([second], regrouped=True)
    assert answer_of([second], "start").ok, "another one, of which the first rank hears nothing"
    for _ in range(3):
        run_together([second])
    first.leader = second.leader = 0
    first.step = second.step
    first.windows.rejoin(first.step)
    run_together([first, second], regrouped=True, close_window=True)
    assert "ended before, when rank 0 rejoined; rank 1 holds it" in answer_of([first, second], "stop").text
    answer = answer_of([first, second], "dump")
    assert answer.ok
    assert answer.text == "recorded without rank 0, which has rejoined since"
    assert answer.facts["files"] == [str(path) for path in tmp_path.iterdir()], "one file, of rank 1"
    assert torch.load(answer.facts["files"][0], weights_only=True)["rank" if mode == "stat" else "records"]
    assert "nothing is recorded" in answer_of([first, second], "dump").text
    assert answer_of([first, second], "start").ok
    assert answer_of([first, second], "dump").text.endswith("MiB")


def test_the_leader_says_which_other_rank_could_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(tmp_path), Rank(tmp_path, rank=1)]
    assert answer_of(ranks, "start").ok
    to_file = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, mode: to_file(Path("/dev/full") if "_1.pt" in self.name else self, mode)
    )
    answer = answer_of(ranks, "dump")
    assert not answer.ok
    assert answer.text.startswith("rank 1 cannot write its file")
    monkeypatch.undo()
    answer = answer_of(ranks, "dump")
    assert answer.ok
    assert [Path(path).exists() for path in answer.facts["files"]] == [True, True]


@pytest.mark.parametrize("mode", ["per_pass", "per_token"])
def test_after_a_change_of_placement_all_passes_read_with_the_last_map(tmp_path: Path, mode: str) -> None:
    rank = Rank(tmp_path, mode)
    assert rank.run_until_answered("start").text == f"mode {mode}, into {tmp_path}"
    for placement in (FIRST, LATER, FIRST, LATER):
        rank.windows.placement = placement
        rank.run()
    answer = rank.run_until_answered("dump")
    (path,) = answer.facts["files"]
    content = torch.load(path, weights_only=True)
    assert content["last_physical_to_logical_map"].tolist() == [[0] * 6, [3, 2, 1, 0, 3, 2]]
    tables = [FIRST, FIRST, LATER, FIRST, LATER, LATER]
    expected = []
    for step, placement in enumerate(tables, start=content["records"][0]["forward_pass_id"]):
        slots = np.arange(step, step + 2) % 6
        expected.append(np.bincount(placement.physical_to_logical[0, slots], minlength=4).tolist())
    assert [each.tokens[0].tolist() for each in read_trace(path)] == expected
    slots = [
        s % 6 for s in range(content["records"][-1]["forward_pass_id"], content["records"][-1]["forward_pass_id"] + 2)
    ]
    last = content["records"][-1]
    if mode == "per_pass":
        assert last["global_physical_count"][1].nonzero()[:, 0].tolist() == sorted(slots), "its own split is kept"
    else:
        assert last["topk_ids_of_layer"][1, :, 0].tolist() == slots


def test_a_full_disk_is_answered_and_serving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path / "full")
    rank.run_until_answered("start")
    to_file = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode: to_file(Path("/dev/full"), mode))
    answer = rank.run_until_answered("dump")
    assert not answer.ok
    assert "No space left on device" in answer.text
    assert "eplb.recorder_dir" in answer.text
    assert list((tmp_path / "full").iterdir()) == []
    monkeypatch.undo()
    rank.run()
    assert rank.run_until_answered("dump").ok, "the recording goes on after a dump"


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_memory_is_bounded_and_the_dump_says_so(tmp_path: Path, mode: str) -> None:
    rank = Rank(tmp_path, mode, max_mib=1e-4)  # 104 bytes
    rank.run_until_answered("start")
    for _ in range(8):
        rank.run(close_window=True) if mode == "stat" else rank.run()
    assert rank.passes is None or not rank.passes.is_on
    answer = rank.run_until_answered("dump")
    assert "it ended before step" in answer.text
    assert "it has reached eplb.recorder_max_mib" in answer.text
    content = torch.load(answer.facts["files"][0], weights_only=True)
    assert len(content["logical_count"] if mode == "stat" else content["records"]) < 6
    assert rank.run_until_answered("dump").text.startswith("nothing is recorded: start a recording first")


def test_a_command_whose_record_was_dropped_is_shown_again(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.ask("start")
    rank.run()
    rank.windows.void()
    assert rank.control.to_show().command == 0, "it is still on its way"
    rank.run(regrouped=True)
    assert rank.sent == []
    assert rank.control.to_show().command == 1
    rank.run()
    rank.run()
    assert [message.ok for message in rank.sent if isinstance(message, Answer)] == [True]
    assert rank.passes is not None
    assert rank.passes.is_on


@pytest.mark.parametrize("mode", ["stat", "per_pass"])
def test_a_recording_ends_when_the_group_changes(tmp_path: Path, mode: str) -> None:
    rank = Rank(tmp_path, mode)
    rank.run_until_answered("start")
    num_steps = 3
    for _ in range(num_steps):
        rank.run()
    rank.run(regrouped=True)
    rank.run()
    answer = rank.run_until_answered("dump")
    assert "ranks were lost or have rejoined" in answer.text
    assert sum(int(each.tokens.sum()) for each in read_trace(answer.facts["files"][0])) == 2 * (num_steps + 1)


def test_only_the_leader_keeps_commands_and_their_number_is_bounded(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.leader = 1
    rank.ask("start")
    assert not rank.control.has_work
    rank.leader = 0
    for _ in range(17):
        rank.ask("start")
    rank.ask("erase")
    answers = [message for message in rank.sent if isinstance(message, Answer)]
    assert [answer.ok for answer in answers] == [False, False]
    assert "it takes start, stop, dump" in answers[1].text
    rank.control.forget()
    assert rank.control.to_show().command == 0


def test_commands_of_a_leader_that_leads_no_more_are_refused_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.control.ask(RecordCommand(7, "start"))
    rank.leader = 1
    for _ in range(3):
        rank.run()
    answers = [message for message in rank.sent if isinstance(message, Answer)]
    assert [(answer.call_id, answer.ok) for answer in answers] == [(7, False)]
    assert "leads now" in answers[0].text
    assert rank.passes is not None
    assert not rank.passes.is_on


def test_without_recording_a_command_is_refused() -> None:
    sent: list[Message] = []
    windows, _ = windows_of_one_rank([])
    control = RecordControl(Responder(0, 0, lambda: 0, sent.append), windows, None)
    control.ask(RecordCommand(5, "start"))
    assert [(each.call_id, each.ok) for each in sent if isinstance(each, Answer)] == [(5, False)]


def test_the_folder_is_that_of_the_setting_of_sglang_or_of_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", "")
    eplb = load_config().eplb
    assert dump_folder(eplb).is_dir()
    monkeypatch.setenv(name, "/dumps")
    assert dump_folder(eplb) == Path("/dumps")
    named = load_config(overrides=["eplb.recorder_dir=/named"]).eplb
    assert dump_folder(named) == Path("/named")
