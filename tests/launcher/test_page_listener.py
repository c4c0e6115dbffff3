"""Who may send pages to the host of the decode ranks, and what becomes of an earlier connection."""

import logging
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from moe_serve.attention_dp.page_channel import PageReceiver, PageSender
from moe_serve.attention_dp.page_ring import RECORD_BYTES
from moe_serve.attention_dp.request import Handover
from moe_serve.dispatch.hosts.handshake import PAGES, PAGES_TAKER, ROWS, Party, key_of_launch, listen
from moe_serve.errors import ReplacedError
from moe_serve.launcher import page_listener
from moe_serve.launcher.page_listener import PageListener
from tests.attention_dp.test_page_channel import cache_of, request_of
from tests.launcher.running import eventually

TOKEN, LAUNCH_ID = "0123456789abcdef" * 2, 5
CACHE = cache_of(6, fill=1)


class Served:
    def __init__(self) -> None:
        size = mmap.PAGESIZE + 8 * (RECORD_BYTES + CACHE.page_bytes)
        self.copies = [os.memfd_create("pages") for _ in range(2)]
        for each in self.copies:
            os.ftruncate(each, size)
        self.said: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        page_listener.log.addHandler(self.handler)
        at = listen("127.0.0.1")
        self.address = at.getsockname()
        self.listener = PageListener(at, self.copies, TOKEN)
        self.senders: list[PageSender] = []

    def party(self, rank: int, number: int = 0, token: str = TOKEN, launch_id: int = LAUNCH_ID) -> Party:
        return Party(rank, number, key_of_launch(token, launch_id), ("", 0))

    def dial(self, party: Party, purpose: int = PAGES) -> partial:
        return partial(party.dial, PAGES_TAKER, self.address, 0, purpose, 5.0)

    def has_ended_with_strangers(self) -> bool:
        """Whether it has closed their connections, and said what it says of them."""
        return not self.listener._unproved

    def send(self, party: Party, name: str) -> PageSender:
        """Sends a request of two pages as a prefill rank."""
        descriptor = os.memfd_create("pages")
        os.ftruncate(descriptor, os.fstat(self.copies[0]).st_size)
        self.senders.append(PageSender(descriptor, CACHE, LAUNCH_ID, {"10.0.0.2:30001": self.dial(party)}))
        os.close(descriptor)
        self.senders[-1].send(request_of(name, 2), 0, 2)
        return self.senders[-1]

    def num_come(self, rank: int, name: str) -> int:
        receiver = PageReceiver(self.copies, cache_of(2), wait_s=60.0)
        return len(receiver.find(name, Handover(rank, LAUNCH_ID, 0), 0, 2))


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    try:
        yield made
    finally:
        made.listener.close()
        page_listener.log.removeHandler(made.handler)
        for sender in made.senders:
            sender.close()
        for descriptor in made.copies:
            os.close(descriptor)


def test_each_rank_of_the_launch_fills_its_own_copy(served: Served) -> None:
    served.listener.begin(LAUNCH_ID)
    for rank in (0, 1):
        served.send(served.party(rank), f"of {rank}")
    assert eventually(lambda: [served.num_come(rank, f"of {rank}") for rank in (0, 1)] == [2, 2], 30)
    assert [served.num_come(rank, f"of {1 - rank}") for rank in (0, 1)] == [0, 0]
    assert served.said == []


@pytest.mark.parametrize("who", ["no launch", "token", "launch", "rank", "purpose"])
def test_nobody_else_may_send(served: Served, who: str) -> None:
    if who != "no launch":
        served.listener.begin(LAUNCH_ID)
    changed = {"token": {"token": "f" * 32}, "launch": {"launch_id": 6}, "rank": {"rank": 2}}.get(who, {})
    dial = served.dial(served.party(**{"rank": 0} | changed), ROWS if who == "purpose" else PAGES)
    for _ in range(5):
        with pytest.raises(OSError, match=r"another key|closed the connection|reset"):
            dial()
    assert eventually(served.has_ended_with_strangers, 30)
    (line,) = served.said  # in a minute
    assert "no more pages come from 127.0.0.1" in line
    served.listener.begin(LAUNCH_ID)
    served.send(served.party(0), "right")
    assert eventually(lambda: served.num_come(0, "right") == 2, 30)


def test_many_strangers_are_said_once_each(served: Served) -> None:
    sources = [f"127.0.0.{number}" for number in range(2, 14)]
    for source in sources * 2:
        with socket.create_connection(served.address, timeout=30, source_address=(source, 0)) as stranger:
            assert stranger.recv(1) == b"", "it is closed"
    assert eventually(served.has_ended_with_strangers, 30)
    assert sorted(line.split(":")[0].rpartition(" ")[2] for line in served.said) == sorted(sources)


def test_a_rank_gets_in_beside_many_who_say_nothing(served: Served) -> None:
    served.listener.begin(LAUNCH_ID)
    silent = [socket.create_connection(served.address, timeout=30) for _ in range(page_listener._MOST_UNPROVED + 6)]
    try:
        served.dial(served.party(0))().close()
        assert [each.recv(1) for each in silent[:6]] == [b""] * 6, "they have made room"
    finally:
        for each in silent:
            each.close()


def test_it_goes_on_where_there_are_no_threads_for_a_while(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_refused = threading.Thread.start, [0]

    def refuses_once(thread: threading.Thread) -> None:
        if thread.name == "pages" and not num_refused[0]:
            num_refused[0] += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    served.listener.begin(LAUNCH_ID)
    monkeypatch.setattr(threading.Thread, "start", refuses_once)
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        served.dial(served.party(0))()
    served.dial(served.party(0))().close()
    assert num_refused == [1]


def test_the_newest_process_of_a_rank_counts(served: Served) -> None:
    served.listener.begin(LAUNCH_ID)
    served.send(served.party(0, number=0), "first")
    assert eventually(lambda: served.num_come(0, "first") == 2, 30)
    served.send(served.party(0, number=1), "second")
    assert eventually(lambda: served.num_come(0, "second") == 2, 30)
    with pytest.raises(ReplacedError, match="process 0 of rank 0 was replaced"):
        served.dial(served.party(0, number=0))()
    served.senders[0].send(request_of("late", 2), 0, 2)
    served.senders[1].send(request_of("third", 2), 0, 2)
    assert eventually(lambda: served.num_come(0, "third") == 2, 30)
    assert served.num_come(0, "late") == 0


def test_a_new_launch_ends_the_connections_of_the_one_before(served: Served) -> None:
    served.listener.begin(LAUNCH_ID)
    served.send(served.party(0), "first")
    assert eventually(lambda: served.num_come(0, "first") == 2, 30)
    for _ in range(2):  # which may be said twice
        served.listener.begin(LAUNCH_ID + 1)
    served.senders[0].send(request_of("late", 2), 0, 2)
    served.send(served.party(0, launch_id=LAUNCH_ID + 1), "second")
    assert eventually(lambda: served.num_come(0, "second") == 2, 30)
    assert served.num_come(0, "late") == 0
