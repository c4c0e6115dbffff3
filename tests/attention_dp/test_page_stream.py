"""Pages that another host sends arrive whole and right, or they are not believed, whatever happens to the stream."""

import contextlib
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from moe_serve.attention_dp import page_stream
from moe_serve.attention_dp.page_channel import COUNTERS, PageReceiver, PageSender
from moe_serve.attention_dp.page_ring import RECORD_BYTES
from moe_serve.attention_dp.page_stream import PageMirror
from moe_serve.attention_dp.request import Handover, Request, SamplingParams
from tests.attention_dp.connections import Connections, Meddle, cut, pump, start
from tests.attention_dp.test_page_channel import LAUNCH, Rank, _again, _to_prefill, cache_of, request_of, run_alone
from tests.launcher.running import eventually

NUM_SLOTS, MAGIC = 7, page_stream._MAGIC
PAGE_BYTES = cache_of(1).page_bytes
BEGIN, HEAD = page_stream._BEGIN.size, page_stream._HEAD.size


class Way:
    """A stream from a sender's memory to a copy of it, over TCP. meddles: what each connection passes through"""

    def __init__(self, num_slots: int = NUM_SLOTS, page_bytes: int = PAGE_BYTES):
        size = mmap.PAGESIZE + num_slots * (RECORD_BYTES + page_bytes)
        self.source, self.copy = (os.memfd_create("pages") for _ in range(2))
        for each in (self.source, self.copy):
            os.ftruncate(each, size)
        self.mirror = PageMirror(self.copy)
        self.meddles: list[Meddle] = []
        self.ended: list[str] = []  # why connections of the mirror ended
        self.connections = Connections()
        self._threads: list[threading.Thread] = []
        self.senders: list[PageSender] = []

    def dial(self) -> socket.socket:
        meddle = [self.meddles.pop(0)] if self.meddles else []
        near, far = self.connections.pair(*meddle)
        self._threads.append(start(self.take, far))
        return near

    def take(self, connected: socket.socket) -> None:
        try:
            self.mirror.take(connected)
            self.ended.append("")
        except OSError as error:
            self.ended.append(str(error))

    def sender(self, fill: int = 1) -> PageSender:
        self.senders.append(PageSender(self.source, cache_of(20, fill=fill), LAUNCH, {"10.0.0.2:30001": self.dial}))
        return self.senders[-1]

    def num_here(self) -> int:
        return self.mirror._num_received

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self.connections.cut_all()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self.connections.close()
        for descriptor in (self.source, self.copy):
            os.close(descriptor)


@pytest.fixture
def way() -> Iterator[Way]:
    made = Way()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_stream, "_REDIAL_S", 0.01)
    monkeypatch.setattr(page_stream, "_LIFE_S", 0.05)


def take(way: Way, name: str = "a", num_pages: int = 5, attempt: int = 0) -> tuple[int, str]:
    """Takes a request's pages out of the copy; returns how many, each compared with what was sent, and the reason."""
    theirs = cache_of(num_pages)
    receiver = PageReceiver([way.copy], theirs, wait_s=60.0)
    num = receiver.take(request_of(name, num_pages), Handover(0, LAUNCH, attempt), 0, list(range(num_pages)))
    ours = cache_of(20, fill=1)
    assert all(torch.equal(ours.read_page(page), theirs.read_page(page)) for page in range(num))
    reasons = [reason for reason in COUNTERS[1:] if receiver.counters[reason]]
    return num, "".join(reasons)


def test_pages_come_around_the_end_of_the_memory_as_on_one_host(way: Way) -> None:
    sender = way.sender()
    for attempt in range(4):
        sender.send(request_of("a", 5, attempt), 0, 2)
        sender.send(request_of("a", 5, attempt), 2, 5)
        assert eventually(lambda number=5 * (attempt + 1): way.num_here() == number, 30)
        assert take(way, attempt=attempt) == (5, "")
    assert take(way, attempt=2) == (0, "evicted"), "most of its pages were written over"
    assert take(way, attempt=4) == (0, "late"), "an attempt that was never sent"


@pytest.mark.parametrize("seed", range(3))
def test_each_host_gets_the_pages_for_it_and_those_for_all(seed: int) -> None:
    """Also where its connection is cut meanwhile: the newest pages, which lie in the memory still."""
    draw = random.Random(seed)
    with contextlib.ExitStack() as opened:
        ways = [opened.enter_context(contextlib.closing(Way())) for _ in range(2)]
        dials = {f"10.0.0.{at}:30001": way.dial for at, way in enumerate(ways)}
        sender = PageSender(ways[0].source, cache_of(20, fill=1), LAUNCH, dials)
        opened.enter_context(contextlib.closing(sender))  # closed first: it dials again where a way has ended
        sent: list[tuple[str, int, int | None]] = []
        for number in range(40):
            request = request_of(str(number), num_pages := draw.randrange(1, 4))
            request.hand_over_to = draw.choice([0, 1, None])
            sender.send(request, 0, num_pages)
            sent.append((request.request_id, num_pages, request.hand_over_to))
            way = draw.choice(ways)
            way.connections.may_connect = draw.random() < 0.7
            if not way.connections.may_connect:
                way.connections.cut_all()
        for way in ways:
            way.connections.may_connect = True
        assert eventually(lambda: [way.num_here() for way in ways] == [sender.num_sent] * 2, 30)
        left = NUM_SLOTS
        for name, num_pages, host in reversed(sent):
            left -= num_pages
            if left < 0:
                break
            found = [take(way, name, num_pages)[0] for way in ways]
            assert found == [num_pages if host in (None, each) else 0 for each in (0, 1)]


CUTS = [0, 1, BEGIN - 1, BEGIN, BEGIN + 1, BEGIN + HEAD + 3, BEGIN + HEAD + 5 * RECORD_BYTES - 1,
        BEGIN + HEAD + 5 * RECORD_BYTES, BEGIN + HEAD + 5 * RECORD_BYTES + PAGE_BYTES + 1,
        BEGIN + HEAD + 5 * (RECORD_BYTES + PAGE_BYTES) - 1]  # fmt: skip


def cut_after(num_bytes: int, way: Way, seen: Callable[[], object]) -> Meddle:
    """Passes some bytes on, ends the connection, and calls `seen` while there is no other one."""

    def meddle(source: socket.socket, to: socket.socket) -> None:
        left = num_bytes
        while left and (data := source.recv(left)):
            to.sendall(data)
            left -= len(data)
        way.connections.may_connect = False
        cut(to)
        seen()
        cut(source)

    return meddle


@pytest.mark.parametrize("num_bytes", CUTS)
def test_a_connection_that_ends_in_the_middle_loses_no_page_and_none_is_half(way: Way, num_bytes: int) -> None:
    found: list[tuple[int, str]] = []

    def see() -> None:
        found.append(take(way))
        way.connections.may_connect = True  # or what it sees might be sent again before it looks

    way.connections.may_connect = False
    sender = way.sender()
    sender.send(request_of("a", 5), 0, 5)
    way.meddles = [cut_after(num_bytes, way, see)]
    way.connections.may_connect = True
    assert eventually(lambda: way.num_here() == 5, 30)
    assert found in ([(0, "peer_lost")], [(0, "late")]), "it may not have noticed yet that the connection has ended"
    assert take(way) == (5, "")


FLIPS = [BEGIN + HEAD + RECORD_BYTES + at for at in (8, 28, 40, 70)]
FLIPS += [BEGIN + HEAD + 5 * RECORD_BYTES + PAGE_BYTES + at for at in (0, PAGE_BYTES - 1)]


@pytest.mark.parametrize("at", FLIPS)
def test_a_flipped_bit_is_seen(way: Way, at: int) -> None:
    """In what a record says, and in its page."""

    def flip(source: socket.socket, to: socket.socket) -> None:
        num = 0
        while data := bytearray(source.recv(1 << 16)):
            if num <= at < num + len(data):
                data[at - num] ^= 1
            num += len(data)
            to.sendall(data)
        cut(to)

    way.connections.may_connect = False
    sender = way.sender()
    sender.send(request_of("a", 5), 0, 5)
    way.meddles = [flip]
    way.connections.may_connect = True
    assert eventually(lambda: way.num_here() == 5, 30)
    num, reason = take(way)
    assert num <= 1, "of two records with one index, neither need be taken"
    assert reason in ("checksum", "version", "evicted")


def test_pages_that_come_twice_are_the_same_pages(way: Way) -> None:
    def twice(source: socket.socket, to: socket.socket) -> None:
        to.sendall(source.recv(BEGIN, socket.MSG_WAITALL))
        part = source.recv(HEAD + 5 * (RECORD_BYTES + PAGE_BYTES), socket.MSG_WAITALL)
        to.sendall(part + part)
        pump(source, to)

    way.connections.may_connect = False
    sender = way.sender()
    sender.send(request_of("a", 5), 0, 5)
    way.meddles = [twice]
    way.connections.may_connect = True
    receiver = PageReceiver([way.copy], cache_of(1))
    assert eventually(lambda: receiver.num_sent(0) == 10, 30)
    assert take(way) == (5, "")


def test_what_is_written_over_before_it_is_sent_is_left_out(way: Way) -> None:
    way.connections.may_connect = False
    sender = way.sender()
    for name in "abc":
        sender.send(request_of(name, 5), 0, 5)
    way.connections.may_connect = True
    assert eventually(lambda: way.num_here() == 15, 30)
    assert take(way, "c") == (5, "")
    assert take(way, "a") == (0, "late")
    assert take(way, "b") == (0, "evicted"), "its last pages alone are there"


def test_a_sender_that_is_started_anew_begins_with_empty_memory(way: Way) -> None:
    way.sender().send(request_of("a", 5), 0, 5)
    assert eventually(lambda: way.num_here() == 5, 30)
    way.senders[0].close()
    way.sender().send(request_of("b", 2), 0, 2)
    assert eventually(lambda: take(way, "b", 2) == (2, ""), 30)
    assert take(way)[0] == 0


begins = page_stream._BEGIN.pack  # what a sender says first


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (begins(b"GET / HT", NUM_SLOTS, PAGE_BYTES, 1), "is not what lies here"),
        (begins(MAGIC, NUM_SLOTS + 1, PAGE_BYTES, 1), "is not what lies here"),
        (begins(MAGIC, NUM_SLOTS, 0, 1), "is not what lies here"),
        (begins(MAGIC, 1, 2**63, 1), "is not what lies here"),
        (begins(MAGIC, NUM_SLOTS, PAGE_BYTES, 1) + page_stream._HEAD.pack(NUM_SLOTS + 6, 2), "slots 6 to 8"),
        (begins(MAGIC, NUM_SLOTS, PAGE_BYTES, 1) + page_stream._HEAD.pack(0, 2**32 - 1), "slots 0"),
        (b"", "sent nothing for 0.2 s"),
    ],
    ids=["another program", "more slots", "no bytes", "too many bytes", "behind the last slot", "too many", "nothing"],
)  # fmt: skip
def test_a_foreign_sender_is_refused_within_bounds_and_writes_nothing(
    way: Way, sent: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_stream, "QUIET_S", 0.2)
    before = os.pread(way.copy, os.fstat(way.copy).st_size, 0)
    near, far = way.connections.pair()
    start(way.take, far)
    near.sendall(sent)
    assert eventually(lambda: way.ended, 30)
    assert why in way.ended[0]
    assert os.pread(way.copy, os.fstat(way.copy).st_size, 0) == before
    sender = way.sender()
    sender.send(request_of("a", 5), 0, 5)
    assert eventually(lambda: way.num_here() == 5, 30)
    assert take(way) == (5, "")


def test_a_sender_without_pages_gives_signs_of_life(way: Way) -> None:
    seen: list[bytes] = []

    def look(source: socket.socket, to: socket.socket) -> None:
        to.sendall(source.recv(BEGIN, socket.MSG_WAITALL))
        while len(seen) < 3:
            seen.append(source.recv(HEAD, socket.MSG_WAITALL))
            to.sendall(seen[-1])
        pump(source, to)

    way.meddles = [look]
    sender = way.sender()
    assert eventually(lambda: len(seen) == 3, 30)
    assert seen == [bytes(HEAD)] * 3
    sender.send(request_of("a", 5), 0, 5)
    assert eventually(lambda: way.num_here() == 5, 30)
    assert (take(way), way.ended) == ((5, ""), [])


def test_a_sender_that_is_silent_is_given_up(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_stream, "_LIFE_S", 600.0)
    monkeypatch.setattr(page_stream, "QUIET_S", 0.2)
    way.sender()
    receiver = PageReceiver([way.copy], cache_of(1), wait_s=60.0)
    assert eventually(lambda: "it sent nothing for 0.2 s" in way.ended and not receiver._is_connected(0), 30)


# ---- a decode rank on another host


def test_a_step_looks_for_awaited_pages_only_when_more_have_come(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes a pass over all slots."""
    sender, receiver = way.sender(), PageReceiver([way.copy], cache_of(20), wait_s=60.0)
    looks: list[str] = []
    for name in ("find", "_has_passed"):
        look = getattr(receiver, name)
        monkeypatch.setattr(receiver, name, lambda *args, name=name, look=look: (looks.append(name), look(*args))[1])
    assert eventually(lambda: receiver._is_connected(0), 30)
    handover, requests = Handover(0, LAUNCH, 0), [request_of(name, 5) for name in "ab"]
    for request in requests:
        request.arrived_s = time.monotonic()
    for _ in range(3):
        assert [receiver.num_there(request, handover, 0, 5) for request in requests] == [0, 0]
    assert looks == ["find", "_has_passed"] * 2
    sender.send(request_of("b", 5), 0, 5)
    assert eventually(lambda: receiver.num_sent(0) == 5, 30)
    for _ in range(3):
        assert [receiver.num_there(request, handover, 0, 5) for request in requests] == [0, 5]
    looks.clear()
    assert receiver.take(requests[1], handover, 0, list(range(5))) == 5
    assert looks == ["find"], "nothing is missing, so there is no reason to find"


@pytest.mark.parametrize("end", ["they come", "they are late", "the connection ends", "the first ones are not sent"])
def test_a_request_waits_a_while_for_pages_that_are_sent_still(end: str) -> None:
    prefill = Rank()
    way, release = Way(40, prefill.cache.page_bytes), threading.Event()

    def hold(source: socket.socket, to: socket.socket) -> None:
        to.sendall(source.recv(BEGIN, socket.MSG_WAITALL))
        release.wait(30)
        if end in ("they come", "the first ones are not sent"):
            pump(source, to)
        way.connections.may_connect = False  # or the pages might come by another connection before a step looks
        cut(to)

    with contextlib.closing(way):
        way.meddles = [hold]
        prefill, decode = Rank(sender=way.source), Rank(receivers=[way.copy])
        assert prefill.sender is not None
        assert decode.receiver is not None
        way.senders.append(prefill.sender)
        prefill.sender._streams = [page_stream.PageStream(prefill.sender._ring, way.dial, "10.0.0.2:30001")]
        decode.receiver._wait_s = 0.5 if end == "they are late" else 60.0
        assert eventually(lambda: decode.receiver._is_connected(0), 30)
        base = Request("r", 1, list(range(28)), [], SamplingParams(max_new_tokens=6), 3)
        to_prefill = _to_prefill(base)
        to_prefill.hand_over_from = 2 if end == "the first ones are not sent" else 0
        prefill.scheduler.add(to_prefill)
        outputs: list[int] = []
        while not outputs:
            outputs = prefill.step().get("r", [])
        goes_on = _again(base, "r", attempt=2, output_ids=outputs)
        goes_on.handover, goes_on.arrived_s = Handover(0, LAUNCH, 1), time.monotonic()
        decode.scheduler.add(goes_on)
        other = Request("other", 1, [5, 6, 7], [], base.params, 0)
        decode.scheduler.add(other)
        ended: dict[str, list[int]] = {}
        while "other" not in ended:  # which does not wait
            ended |= decode.step()
        if end != "they are late":
            assert (goes_on.num_computed, decode.scheduler.awaits_pages) == (0, True)
            release.set()
        assert eventually(lambda: ended.update(decode.step()) or "r" in ended, 30)
        release.set()
        assert ended["r"] == run_alone(Rank(), _again(base, "alone"))
        counts = {
            "they come": {"from_prefill": 7},
            "they are late": {"late": 1},
            "the connection ends": {"peer_lost": 1},
            "the first ones are not sent": {"evicted": 1},
        }
        assert decode.receiver.counters == dict.fromkeys(COUNTERS, 0) | counts[end]
        assert decode.scheduler.blocks.num_free == decode.scheduler.blocks.num_blocks


def test_a_sender_says_which_host_gets_no_pages_and_ends_though_dials_take_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_stream, "_END_S", 0.1)
    monkeypatch.setattr(page_stream, "_REDIAL_S", 0.01)
    may_end, dials = threading.Event(), threading.Event()

    def refuse() -> socket.socket:
        if len(caplog.messages) < 1:
            raise OSError("no route to host")
        dials.set()
        may_end.wait(60)
        raise OSError("no route to host")

    with contextlib.closing(Way()) as way:
        addresses = ["10.0.0.2:30001"]
        sender = PageSender(way.source, cache_of(20, fill=1), LAUNCH, dict.fromkeys(addresses, refuse))
        assert dials.wait(60)
        sender.close()
        assert sender._streams[0]._thread.is_alive(), "it was not waited for"
        may_end.set()
        sender._streams[0]._thread.join(60)
    assert caplog.messages == [
        f"no pages reach the decode host at {addresses[0]}, which computes them: no route to host"
    ]
