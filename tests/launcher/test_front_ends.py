"""What the launcher hears of the ranks through several front ends, of which any may die. Without processes."""

from pathlib import Path

import pytest
import zmq

from moe_serve.config import load_config
from moe_serve.engine.protocol.messages import (
    Apart,
    Fatal,
    Hello,
    Members,
    Message,
    ModelLimits,
    Progress,
    Ready,
    decode_to_front_end,
    encode,
)
from moe_serve.launcher import front_ends as module
from moe_serve.launcher import local
from moe_serve.launcher.front_ends import FrontEnds
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.server.edge.client_limits import Ledger

CONFIG = load_config(overrides=["server.api_workers=2", "parallel.num_ranks=2"])

LIMITS = ModelLimits("demo", 64, 128, 100, [], 16)


class Process:
    """In the place of Program."""

    def __init__(self, who: str, module: str, arguments: list[str], *_: object, pass_fds: list[int]):
        self.who = who
        clients_fd = arguments[arguments.index("--clients-fd") + 1]
        assert int(clients_fd) in pass_fds
        self.code: int | None = None

    def finish(self) -> None:
        pass


class System:
    """The launcher's side, and two sockets in the place of two front ends."""

    def __init__(self, link: Link):
        self.notes: list[str] = []
        self.sockets = LinkSockets(link)
        self.own = [self.sockets.bound(zmq.ROUTER, link.front_end_at(number), 1 << 20) for number in range(2)]
        self.launcher = FrontEnds(CONFIG, link, Path("config.yaml"), 0, lambda who, line: None, self.notes.append)
        self.launcher.start()
        self.names = [self._hello(number) for number in range(2)]

    def _hello(self, number: int) -> bytes:
        assert self.own[number].poll(5000)
        name, data = self.own[number].recv_multipart()
        assert isinstance(decode_to_front_end(data), Hello)
        return name

    def say(self, number: int, message: Message) -> None:
        self.own[number].send_multipart([self.names[number], encode(message)])

    def heard(self) -> list[Message]:
        return list(self.launcher.receive(2000))


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "Program", Process)
    with OwnFolder() as folder:
        system = System(Link(folder=folder))
        yield system
        system.launcher.close()
        system.sockets.close()


def test_a_lost_rank_is_heard_of_though_the_oldest_front_end_dies_before_it_says_so(system: System):
    masked = Members(0, 7, 1, [0], "rank 1 died", waits=True)
    system.say(1, masked)
    assert system.heard() == [masked]
    system.launcher.children[0].code = -9
    assert system.launcher.watch() is None
    assert "front end 0" in system.notes[0]


def end(system: System, number: int, code: int) -> int | None:
    """A front end ends; returns what the launcher makes of it."""
    system.launcher.children[number].code = code
    return system.launcher.watch()


def test_a_setting_that_is_wrong_at_the_first_start_ends_the_system(system: System):
    assert end(system, 1, 2) == 2
    assert system.notes == ["the front end 1 exited with code 2"]


def test_a_front_end_that_cannot_start_again_for_a_setting_is_left_out_until_none_is_left(
    system: System, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "_FIRST_PAUSE_S", 0.0)
    for number, last in ((1, None), (0, 2)):
        assert end(system, number, -9) is None
        assert end(system, number, 2) == last
    left_out = "the front end 1 exited with code 2; it is not started again: a setting must be corrected first"
    assert system.notes[1] == f"{left_out}; the others serve on"
    assert system.notes[3] == "the front end 0 exited with code 2"


def test_a_front_end_that_ends_at_its_start_is_started_again_after_a_pause_and_one_that_served_at_once(system: System):
    first = system.launcher.children[1]
    system.say(1, Ready(0, 7, LIMITS, {}))
    assert len(system.heard()) == 1
    assert end(system, 1, -9) is None
    second = system.launcher.children[1]
    assert second is not first
    for _ in range(3):
        assert end(system, 1, -9) is None
        assert system.launcher.children[1] is second, "it is not due"
    assert system.notes == [
        "the front end 1 was killed by SIGKILL; it is started again (restart 1 of 3 within 600 s)",
        "the front end 1 was killed by SIGKILL; it is started again in 5 s (restart 2 of 3 within 600 s)",
    ]


def test_a_front_end_that_is_lost_too_often_is_left_out_and_no_loss_of_another(system: System, monkeypatch):
    monkeypatch.setattr(local, "_FIRST_PAUSE_S", 0.0)
    started = [system.launcher.children[0]]
    for _ in range(4):
        assert end(system, 0, -9) is None
        started.append(system.launcher.children[0])
    assert started[3] is started[4]
    left_out = "the front end 0 was killed by SIGKILL; it is not started again: it was lost too often"
    assert system.notes[3:] == [f"{left_out}; the others serve on"]
    assert system.launcher.watch() is None
    for rank in range(2):
        system.say(1, Ready(rank, 7, LIMITS, {}))
    assert len([*system.heard(), *system.launcher.receive(100)]) == 2
    assert system.launcher.serve(7), "it is not waited for"
    progress = Progress(0, 7, "importing torch", 0.0)
    system.say(1, progress)
    assert system.heard() == [progress], "and it is not the oldest"
    for _ in range(3):
        assert end(system, 1, -9) is None
    assert end(system, 1, -9) == 1
    assert "the processes of front end 1 were lost 4 times within 600 s:" in system.notes


def test_ranks_go_on_here_until_one_says_that_the_launch_is_over_or_is_apart(system: System):
    def goes_on_after(message: Message) -> bool:
        system.say(0, message)
        assert system.heard() == [message]
        return system.launcher.goes_on(7)

    assert not goes_on_after(Hello(1, 2, 7, 4711, "h", num_before=2))
    assert system.launcher.num_before == {1: 2}
    assert goes_on_after(Ready(1, 7, LIMITS, {}))
    assert not goes_on_after(Apart(1, 7, 3, "rank 1 does not reach the hosts of most ranks"))
    assert not goes_on_after(Members(0, 7, 3, [0], "old"))
    assert goes_on_after(Members(0, 7, 4, [0, 1], "rank 1 reaches the others again"))
    assert not goes_on_after(Fatal(1, 7, "over", -1))
    assert not goes_on_after(Ready(1, 8, LIMITS, {}))
    assert system.launcher.goes_on(8)


def test_front_ends_of_another_host_have_their_own_numbers_and_each_is_started_again(monkeypatch: pytest.MonkeyPatch):
    overrides = ["nnodes=2", "node_rank=1", "dist_init_addr=h:1", "front_ends=every_host"]
    config = load_config(overrides=[*(f"launcher.{each}" for each in overrides), "parallel.num_ranks=2"])
    started: list[list[str]] = []

    class Alone(Process):
        def __init__(self, who: str, module: str, arguments: list[str], *_: object, pass_fds: list[int]):
            started.append([who, *arguments])
            self.who, self.code = who, None

    monkeypatch.setattr(module, "Program", Alone)
    link = Link(token="0" * 32, front_ends=("127.0.0.1:1", "127.0.0.1:2"))
    assert [link.front_end_at(number) for number in range(2)] == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    notes: list[str] = []
    launcher = FrontEnds(config, link, Path("config.yaml"), 5, lambda who, line: None, notes.append)
    launcher.start()
    launcher.children[0].code = -9
    assert launcher.watch() is None
    assert notes == ["the front end 1 was killed by SIGKILL; it is started again in 5 s (restart 1 of 3 within 600 s)"]
    assert started == [["front end 1", "--http-fd", "5", "--worker", "1", "--config", "config.yaml"]]
    launcher.close()


def test_how_the_start_goes_on_is_heard_once(system: System):
    progress = Progress(0, 7, "importing torch", 0.0)
    for number in (1, 0):
        system.say(number, progress)
    heard = [*system.heard(), *system.launcher.receive(100)]
    assert heard == [progress]


def test_what_clients_had_open_at_a_front_end_that_ended_is_open_no_more(system: System):
    fd = system.launcher._clients_fd
    assert fd is not None
    ledgers = [Ledger.shared(fd, 2, number) for number in range(2)]
    rows = []
    for ledger in ledgers:
        with ledger.locked():
            row, _ = ledger.find("the key a", 0.0)
        ledger.add(row, num_open=3, num_calls=2)
        rows.append(row)
    assert rows[0] == rows[1]
    assert end(system, 1, -9) is None
    assert [(ledger.num_open(row), ledger.num_calls(row)) for ledger in ledgers] == [(3, 2), (3, 2)]
