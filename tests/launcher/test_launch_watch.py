"""What the launcher makes of a lost rank: a replacement, a restart of all, or the end; and what it says."""

import time

import pytest

from moe_serve.engine.protocol.messages import SUPERVISOR, Apart, Exited, Fatal, ModelLimits, Ready
from moe_serve.launcher import launch_watch, local
from moe_serve.launcher.launch_watch import LaunchWatch
from moe_serve.launcher.local import Death, Restarts
from tests.clock import Clock
from tests.launcher.test_restarts import CONFIG, group, killed

LIMITS = ModelLimits("m", 100, 20, 10, [1], 4)


class Processes:
    """In the place of LocalRanks."""

    launch_id = 7

    def __init__(self):
        self.ended: list[Death] = []
        self.started: list[int] = []
        self.finished: list[int] = []

    def deaths(self) -> list[Death]:
        ended, self.ended = self.ended, []
        return ended

    def finish(self, rank: int) -> None:
        self.finished.append(rank)

    def replace(self, rank: int) -> None:
        self.started.append(rank)


class Notes:
    """In the place of the display."""

    def __init__(self):
        self.notes: list[str] = []

    def note(self, text: str, style: str = "") -> None:
        self.notes.append(text)

    def phase(self, rank: int, phase: str, fraction: float) -> None:
        pass


@pytest.fixture
def launch():
    """A launch of three ranks that serve: the watch, its processes, notes, and what it tells the front ends."""
    processes, notes, reports = Processes(), Notes(), []
    watch = LaunchWatch(CONFIG, notes, processes, Restarts(CONFIG.launcher), reports.append)
    for rank in range(3):
        watch.take(Ready(rank, 7, LIMITS, {"on_lost_rank": "mask"}))
    return watch, processes, notes.notes, reports


def lose(launch, rank: int, epoch: int, waits: bool, code: int = -9) -> None:
    watch, processes, _, _ = launch
    processes.ended.append(Death(rank, 100 + rank, code, ()))
    assert watch.find_loss() is None
    watch.take(group(epoch, *({0, 1, 2} - {rank}), waits=waits))
    watch.find_loss()
    watch.replace_lost_ranks()


def test_the_launcher_starts_one_rank_and_says_so(launch):
    watch, processes, notes, reports = launch
    lose(launch, 1, epoch=1, waits=True)
    assert processes.started == [1]
    assert reports == [Exited(1, 7, 0, "rank 1 (process 101) was killed by SIGKILL")]
    assert notes == [
        "rank 1 (process 101) was killed by SIGKILL; ranks 0, 2 wait for it",
        "rank 1 is started again, alone (restart 1 of 2 within 600 s)",
    ]
    watch.take(group(2, 0, 1, 2))
    assert watch.find_loss() is None
    assert notes[2:] == ["rank 1 rejoined; ranks 0, 1, 2 serve"]


def test_what_several_front_ends_pass_on_counts_once_and_old_news_not_at_all(launch):
    watch, processes, notes, _ = launch
    lose(launch, 1, epoch=1, waits=True)
    back = group(2, 0, 1, 2)
    for message in (group(1, 0, 2, waits=True), back, back, group(1, 0, 2, waits=True), back):
        watch.take(message)
        assert watch.find_loss() is None
    assert [text for text in notes if "rejoined" in text] == ["rank 1 rejoined; ranks 0, 1, 2 serve"]
    assert len(notes) == 3
    assert processes.started == [1]


def test_others_that_serve_are_not_started_again_because_a_new_process_ends(launch, monkeypatch):
    monkeypatch.setattr(local, "_FIRST_PAUSE_S", 0.0)
    watch, processes, notes, _ = launch
    lose(launch, 1, epoch=1, waits=False)
    for _ in range(2):
        processes.ended.append(killed(1))
        assert watch.find_loss() is None
        watch.replace_lost_ranks()
    assert processes.started == [1, 1]
    assert notes[-3:] == [
        "rank 1 is started again, alone (restart 2 of 2 within 600 s)",
        "rank 1 (process 101) was killed by SIGKILL before it took part again; the next start is due now",
        "rank 1 is not started again: it was lost too often; the others serve on",
    ]


def test_a_new_process_that_is_late_is_killed_where_the_others_serve(launch, monkeypatch):
    watch, processes, notes, _ = launch
    lose(launch, 1, epoch=1, waits=False)
    clock = Clock(monkeypatch, time.monotonic(), local, launch_watch)
    clock.now_s += CONFIG.server.attach_deadline_s + 1
    for _ in range(3):  # it may be on another host, and end a moment later
        watch.replace_lost_ranks()
    assert processes.finished == [1, 1]
    assert sum("did not take part within server.attach_deadline_s" in note for note in notes) == 1


def test_the_launch_is_lost_where_the_new_process_ends_and_the_others_wait_for_it(launch):
    watch, processes, _, reports = launch
    lose(launch, 1, epoch=1, waits=True)
    processes.ended.append(killed(1))
    loss = watch.find_loss()
    assert "before it took part again" in str(loss)
    assert loss.others_run
    assert not loss.had_served
    assert reports[-1] == Fatal(SUPERVISOR, 7, str(loss), SUPERVISOR)
    assert not loss.is_setting


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_is_lost_too_often_is_left_out_or_ends_the_launch(launch, waits):
    watch, processes, notes, _ = launch
    for epoch in (1, 3):
        lose(launch, 1, epoch, waits)
        watch.take(group(epoch + 1, 0, 1, 2))
    lose(launch, 2, 5, waits)
    assert processes.started == [1, 1]
    loss = watch.find_loss()
    if waits:
        assert str(loss) == "rank 2 (process 102) was killed by SIGKILL"
    else:
        assert loss is None
        assert notes[-1] == "rank 2 is not started again: it was lost too often; the others serve on"


def test_a_rank_that_ends_for_a_setting_is_not_replaced(launch):
    watch, processes, _, _ = launch
    lose(launch, 1, 1, waits=True, code=2)
    assert processes.started == []
    assert watch.find_loss().is_setting


def test_a_launch_of_which_no_rank_is_left_that_takes_part_is_lost(launch):
    watch, processes, _, told = launch
    processes.ended = [killed(0), killed(1), killed(2)]
    loss = watch.find_loss()
    assert str(loss) == "rank 0 (process 100) was killed by SIGKILL"
    assert told[-1] == Fatal(SUPERVISOR, 7, str(loss), 0)


def test_a_launch_whose_last_rank_that_takes_part_dies_before_another_is_back_is_lost(launch):
    watch, processes, _, _ = launch
    processes.ended = [killed(1), killed(2)]
    assert watch.find_loss() is None
    watch.take(group(1, 0, waits=True))
    watch.find_loss()
    watch.replace_lost_ranks()
    assert processes.started == [1, 2]
    processes.ended = [killed(0)]
    assert str(watch.find_loss()) == "rank 0 (process 100) was killed by SIGKILL"


def test_a_launch_that_is_over_is_so_whatever_was_to_be_started(launch):
    watch, processes, _, _ = launch
    watch.take(Fatal(SUPERVISOR, 7, "all ranks are gone", 0))
    processes.ended = [killed(0), killed(1), killed(2)]
    assert "all ranks are gone" in str(watch.find_loss())
    watch.replace_lost_ranks()
    assert processes.started == []


def test_ranks_that_reach_no_others_are_apart_until_some_regroup(launch) -> None:
    watch, *_ = launch
    assert not watch.is_apart
    watch.take(Apart(1, 7, 0, "rank 0 is not reached"))
    assert watch.is_apart
    watch.take(group(1, 0, 2))
    assert not watch.is_apart
    watch.take(Apart(1, 7, 0, "rank 0 is not reached"))
    assert not watch.is_apart, "the others serve"
