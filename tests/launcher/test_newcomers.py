"""Which lost ranks are started anew alone, what they are told, and when all are started again instead."""

import os

import pytest

from moe_serve.config import load_config
from moe_serve.dispatch.shm.shared_files import FileMark, SharedFiles
from moe_serve.engine.protocol.messages import SUPERVISOR, Exited, Fatal, Members, ModelLimits, Ready
from moe_serve.errors import ConfigError, LaunchError, PeerError
from moe_serve.launcher import restarts
from moe_serve.launcher.facts import Fact
from moe_serve.launcher.handover import Handover, check_like, find_handover, leave_handover
from moe_serve.launcher.launch_watch import LaunchWatch
from moe_serve.launcher.local import Death
from moe_serve.launcher.newcomers import Newcomers
from moe_serve.launcher.rank_env import RankEnv
from moe_serve.launcher.restarts import Restarts

CONFIG = load_config(overrides=["parallel.num_ranks=3", "server.attach_deadline_s=10", "launcher.max_restarts=2"])
LIMITS = ModelLimits("m", 100, 20, 10, [1], 4)


def killed(rank: int) -> Death:
    return Death(rank, 100 + rank, -9, ())


def group(epoch: int, *members: int, waits: bool = False) -> Members:
    return Members(members[0], 7, epoch, list(members), "rank 1 died", waits=waits)


def test_a_rank_is_started_anew_once_it_has_ended_and_the_others_go_on():
    for events in ((0, 1), (1, 0)):
        newcomers = Newcomers(CONFIG)
        assert newcomers.due(0.0) == []
        for event in events:
            newcomers.ended(killed(1), 0.0) if event else newcomers.regrouped(group(1, 0, 2))
        assert newcomers.due(0.0) == [killed(1)]
        assert newcomers.due(0.0) == []


def test_a_rank_that_is_only_late_is_not_started_anew():
    newcomers = Newcomers(CONFIG)
    newcomers.regrouped(group(1, 0, 2))
    assert newcomers.due(0.0) == []
    newcomers.regrouped(group(2, 0, 1, 2))
    newcomers.ended(killed(1), 0.0)
    assert newcomers.due(0.0) == [], "the others do not know yet"
    newcomers.regrouped(group(1, 0, 2))
    assert newcomers.due(0.0) == [], "old news"
    newcomers.regrouped(group(3, 0, 2, waits=True))
    assert newcomers.others_wait
    assert newcomers.due(0.0) == [killed(1)]


def test_a_rank_is_back_once_it_takes_part_and_may_be_lost_again():
    newcomers = Newcomers(CONFIG)
    for epoch in (1, 3):
        newcomers.ended(killed(1), 0.0)
        newcomers.regrouped(group(epoch, 0, 2, waits=True))
        assert len(newcomers.due(0.0)) == 1
        newcomers.started(1, now_s=100.0 * epoch)
        newcomers.regrouped(group(epoch + 1, 0, 1, 2))
        assert not newcomers.others_wait
        assert newcomers.failed(now_s=1000.0) is None


def test_all_are_started_again_where_the_others_wait_for_a_new_process_that_ends_or_is_late():
    newcomers = Newcomers(CONFIG)
    newcomers.regrouped(group(1, 0, 2, waits=True))
    newcomers.started(1, now_s=5.0)
    assert newcomers.failed(now_s=15.0) is None
    assert "within server.attach_deadline_s = 10 s" in newcomers.failed(now_s=15.1)
    newcomers.ended(killed(1), now_s=6.0)
    assert "was killed by SIGKILL before it took part again" in newcomers.failed(now_s=6.0)


def test_a_new_process_that_ends_is_tried_again_after_ever_longer_pauses_where_the_others_serve():
    newcomers = Newcomers(CONFIG)
    newcomers.regrouped(group(1, 0, 2))
    now_s = 0.0
    assert newcomers.ended(killed(1), now_s) is None
    for pause_s in (0, 5, 10, 20, 40, 60, 60):
        assert newcomers.due(now_s + pause_s - 0.1) == [] or not pause_s
        now_s += pause_s
        if pause_s:
            assert newcomers.due(now_s) == [killed(1)]
        newcomers.started(1, now_s)
        said = newcomers.ended(killed(1), now_s)
        assert "before it took part again; the next start is due in" in said
        assert newcomers.failed(now_s) is None
    newcomers.regrouped(group(2, 0, 1, 2))
    newcomers.regrouped(group(3, 0, 2))
    assert newcomers.ended(killed(1), now_s) is None
    assert newcomers.due(now_s) == [killed(1)], "it served meanwhile"


def test_a_new_process_that_is_late_is_named_for_those_who_serve_on():
    newcomers = Newcomers(CONFIG)
    newcomers.regrouped(group(1, 0, 2))
    newcomers.started(1, now_s=5.0)
    assert newcomers.late(now_s=15.0) == {}
    assert newcomers.late(now_s=15.1).keys() == {1}
    assert newcomers.failed(now_s=15.1) is None


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

    def start_anew(self, rank: int) -> None:
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
    watch.start_lost_ranks()


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
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 0.0)
    watch, processes, notes, _ = launch
    lose(launch, 1, epoch=1, waits=False)
    for _ in range(2):
        processes.ended.append(killed(1))
        assert watch.find_loss() is None
        watch.start_lost_ranks()
    assert processes.started == [1, 1]
    assert notes[-3:] == [
        "rank 1 is started again, alone (restart 2 of 2 within 600 s)",
        "rank 1 (process 101) was killed by SIGKILL before it took part again; the next start is due now",
        "rank 1 is not started again: it was lost too often; the others serve on",
    ]


def test_a_new_process_that_is_late_is_killed_where_the_others_serve(launch, monkeypatch):
    watch, processes, notes, _ = launch
    lose(launch, 1, epoch=1, waits=False)
    monkeypatch.setattr(watch._newcomers, "_deadline_s", -1.0)
    watch.start_lost_ranks()
    assert processes.finished == [1, 1]
    assert "did not take part within server.attach_deadline_s" in notes[-1]


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


def test_a_rank_that_ends_for_a_setting_is_not_started_anew(launch):
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
    watch.start_lost_ranks()
    assert processes.started == [1, 2]
    processes.ended = [killed(0)]
    assert str(watch.find_loss()) == "rank 0 (process 100) was killed by SIGKILL"


def test_a_launch_that_is_over_is_so_whatever_was_to_be_started(launch):
    watch, processes, _, _ = launch
    watch.take(Fatal(SUPERVISOR, 7, "all ranks are gone", 0))
    processes.ended = [killed(0), killed(1), killed(2)]
    assert "all ranks are gone" in str(watch.find_loss())
    watch.start_lost_ranks()
    assert processes.started == []


@pytest.fixture
def files():
    """The files of a launch of three ranks."""
    made = tuple(os.memfd_create("files of a launch") for _ in range(4))
    yield made
    for each in made:
        os.close(each)


def env(rank: int, launch_id: int = 7, files: tuple[int, ...] = ()) -> RankEnv:
    return RankEnv(rank, 3, rank, 3, "", 0, launch_id, "the launcher", launch_files=files, num_before=1)


def handover(launch_id: int = 7, pid: int | None = None, **files: FileMark) -> Handover:
    return Handover(launch_id, pid or os.getpid(), files, "kernels", [Fact("cache.block_size", "16")])


def test_a_new_process_finds_what_a_living_rank_of_its_launch_has_left(files: tuple[int, ...]):
    with pytest.raises(LaunchError, match="no other rank of its launch serves"):
        find_handover(env(1, files=files))
    leave_handover(env(0, files=files), handover(pid=2**22 + 1))
    leave_handover(env(1, files=files), handover())
    with pytest.raises(LaunchError, match="no other rank"):  # one has ended, the other was its own
        find_handover(env(1, files=files))
    left = handover(pages=FileMark(3, 4, 5))
    leave_handover(env(2, files=files), handover(pages=FileMark(3, 4, 5), longer_than_the_next=FileMark(6, 7, 8)))
    leave_handover(env(2, files=files), left)
    assert find_handover(env(1, files=files)) == left
    with pytest.raises(LaunchError, match="no other rank"):
        find_handover(env(1, launch_id=8, files=files))
    os.ftruncate(files[3], 1)
    with pytest.raises(LaunchError, match="no other rank"):
        find_handover(env(1, files=files))


def test_a_new_process_with_another_setting_is_refused_by_name():
    check_like(handover(), [Fact("cache.block_size", "16")], env(1))
    with pytest.raises(ConfigError, match=r"cache\.block_size: 16 on ranks 0, 2; 32 on rank 1"):
        check_like(handover(), [Fact("cache.block_size", "32")], env(1))


def test_shared_files_are_opened_again_and_another_file_is_not():
    made = SharedFiles()
    descriptor = os.memfd_create("first")
    os.write(descriptor, b"bytes")
    made.keep("first", descriptor)
    os.close(descriptor)
    marks = made.marks()
    newcomer = SharedFiles(os.getpid(), marks, "kernels")
    assert newcomer.is_newcomer
    assert not made.is_newcomer
    opened = newcomer.open("first", os.O_RDWR)
    assert os.pread(opened, 9, 0) == b"bytes"
    os.close(opened)
    assert newcomer.marks()["first"][1:] == marks["first"][1:], "and handed on"
    wrong = marks["first"]._replace(inode=marks["first"].inode + 1)
    with pytest.raises(PeerError, match="it is another file now"):
        SharedFiles(os.getpid(), {"first": wrong}).open("first", os.O_RDWR)
    with pytest.raises(PeerError, match="cannot be opened"):
        SharedFiles(2**22 + 1, marks).open("first", os.O_RDWR)
    for files in (made, newcomer):
        os.close(files.marks()["first"].descriptor)
