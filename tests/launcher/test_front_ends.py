"""What the launcher hears of the ranks through several front ends, of which any may die. Without processes."""

from pathlib import Path

import pytest
import zmq

from moe_serve.config import load_config
from moe_serve.engine.messages import Hello, Members, Message, Progress, decode_to_front_end, encode
from moe_serve.launcher import front_ends as module
from moe_serve.launcher.front_ends import FrontEnds
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets

CONFIG = load_config(overrides=["server.api_workers=2", "parallel.num_ranks=2"])


class Process:
    """In the place of Child."""

    def __init__(self, who: str, *_: object, **__: object):
        self.who = who
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
    monkeypatch.setattr(module, "Child", Process)
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


def test_how_the_start_goes_on_is_heard_once(system: System):
    progress = Progress(0, 7, "importing torch", 0.0)
    for number in (1, 0):
        system.say(number, progress)
    heard = [*system.heard(), *system.launcher.receive(100)]
    assert heard == [progress]
