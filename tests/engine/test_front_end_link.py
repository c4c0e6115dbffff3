"""A rank with several front ends: each gets its own tokens, all get the rest, and one of them may go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.engine.output.grammars import Grammars
from moe_serve.engine.protocol.mailbox import Disconnected, Inbound, Reconnected, ZmqMailbox
from moe_serve.engine.protocol.messages import (
    Alive,
    ForFrontEnds,
    Hello,
    Message,
    Ready,
    Shutdown,
    Submit,
    TokenEvent,
    Tokens,
    decode_to_front_end,
    encode,
)
from moe_serve.engine.requests import OpenRequests
from moe_serve.engine.status import EngineCounters
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from tests.server.fake_worker import LIMITS

HELLO = Hello(0, 1, 7, 1, "host")


class FrontEnd:
    """A socket in a front end's place."""

    def __init__(self, link: Link, number: int):
        self._sockets = LinkSockets(link)
        self._socket = self._sockets.bound(zmq.ROUTER, link.front_end_at(number))
        self._rank = b""

    def next(self) -> object:
        """Returns the next message of the rank."""
        assert self._socket.poll(5000), "the rank says nothing"
        self._rank, data = self._socket.recv_multipart()
        return decode_to_front_end(data)

    def send(self, message: Message) -> None:
        self._socket.send_multipart([self._rank, encode(message)])

    def close(self) -> None:
        self._sockets.close()


@contextmanager
def two_front_ends() -> Iterator[tuple[ZmqMailbox, list[FrontEnd], Link]]:
    """A mailbox that has said hello to two front ends, which have heard it."""
    with OwnFolder() as folder:
        link = Link(folder=folder)
        front_ends = [FrontEnd(link, number) for number in range(2)]
        mailbox = ZmqMailbox(link, 0, "", num_front_ends=2)
        try:
            mailbox.send(HELLO)
            assert [front_end.next() for front_end in front_ends] == [HELLO, HELLO]
            for front_end in front_ends:
                front_end.send(Alive())
            assert arrived(mailbox, 0.05) == []
            yield mailbox, front_ends, link
        finally:
            mailbox.close()
            for front_end in front_ends:
                front_end.close()


def arrived(mailbox: ZmqMailbox, for_s: float = 60.0) -> list[Inbound]:
    """What comes first, or nothing within some time."""
    deadline_s = time.monotonic() + for_s
    while time.monotonic() < deadline_s:
        if messages := mailbox.poll(0.01):
            return messages
    return []


def event(request_id: str, token: int) -> TokenEvent:
    return TokenEvent(request_id, 0, 0, [token])


def test_tokens_go_to_the_front_end_of_their_request_and_all_else_to_both() -> None:
    with two_front_ends() as (mailbox, front_ends, _):
        mailbox.send(Tokens(0, 7, [event("0:1.5-0", 4), event("1:1.5-0", 5), event("0:1.5-1", 6)]))
        mailbox.send(Tokens(0, 7, [event("1:1.5-1", 7)]))
        mailbox.send(Ready(0, 7, LIMITS, {}))
        assert front_ends[0].next() == Tokens(0, 7, [event("0:1.5-0", 4), event("0:1.5-1", 6)])
        assert front_ends[1].next() == Tokens(0, 7, [event("1:1.5-0", 5)])
        assert front_ends[1].next() == Tokens(0, 7, [event("1:1.5-1", 7)])
        for front_end in front_ends:
            assert isinstance(front_end.next(), Ready)


def test_the_end_comes_when_every_front_end_has_asked_for_it_or_is_gone() -> None:
    with two_front_ends() as (mailbox, front_ends, _):
        front_ends[0].send(Shutdown())
        assert arrived(mailbox, 0.1) == [], "the other one has open requests"
        front_ends[1].send(Shutdown())
        assert arrived(mailbox) == [Shutdown()]
    with two_front_ends() as (mailbox, front_ends, _):
        front_ends[0].send(Shutdown())
        front_ends[1].close()
        heard = arrived(mailbox)
        while Shutdown() not in heard:
            heard += arrived(mailbox)
        assert Disconnected(1) in heard


def test_a_front_end_that_starts_anew_is_told_all_and_only_its_requests_are_dropped() -> None:
    with two_front_ends() as (mailbox, front_ends, link):
        mailbox.send(Ready(0, 7, LIMITS, {}))
        pause = ForFrontEnds(0, 3, "pause", lasts=True)
        older = ForFrontEnds(1, 2, "resume", lasts=True)
        for message in (pause, ForFrontEnds(0, 4, "abort", "a"), older):
            mailbox.send(message)
        front_ends[1].close()
        assert arrived(mailbox) == [Disconnected(1)]
        front_ends[1] = FrontEnd(link, 1)
        assert arrived(mailbox) == [Reconnected(1)]
        heard: list[object] = []
        while not heard or not isinstance(heard[-1], Ready):
            heard.append(front_ends[1].next())
        pause, abort = (
            msgspec.structs.replace(each, told=[0, 1]) for each in (pause, ForFrontEnds(0, 4, "abort", "a"))
        )
        assert heard[-2] == pause, "before it may send a request"
        assert any(isinstance(message, Hello) and message.num_reconnects == 1 for message in heard)
        assert isinstance(front_ends[0].next(), Ready), "the other one is not told again"
        assert [front_ends[0].next() for _ in range(2)] == [pause, abort]
        submit = Submit("0:1.5-0", 0, [1], params=SamplingParams(max_new_tokens=8), seed=0)
        front_ends[0].send(submit)
        assert arrived(mailbox) == [submit]


def test_what_a_rank_passes_on_says_which_front_ends_it_reaches() -> None:
    with two_front_ends() as (mailbox, front_ends, link):
        front_ends[1].close()
        assert arrived(mailbox) == [Disconnected(1)]
        mailbox.send(ForFrontEnds(0, 3, "pause", lasts=True))
        assert front_ends[0].next() == ForFrontEnds(0, 3, "pause", lasts=True, told=[0])
        front_ends[1] = FrontEnd(link, 1)
        assert arrived(mailbox) == [Reconnected(1)]


def test_only_the_requests_of_a_front_end_that_is_gone_leave_a_rank() -> None:
    scheduler = Scheduler(RequestBlocks(16, 4), max_running=4, max_batch_tokens=16, max_model_len=64)
    requests = OpenRequests(scheduler, LIMITS, EngineCounters(), Grammars(None))
    for request_id in ("0:1.5-0", "1:1.5-0", "10:1.5-0", "0:1.5-1"):
        assert requests.submit(Submit(request_id, 0, [5, 6], SamplingParams(max_new_tokens=4), seed=0)) is None
    requests.drop_all_of(1)
    started = [chunk.request.request_id for chunk in scheduler.propose().prefills]
    assert started == ["0:1.5-0", "10:1.5-0", "0:1.5-1"]
    requests.drop_all_of(0)
    assert len(requests) == 1
    requests.drop_all_of(None)  # the only one
    assert (len(requests), scheduler.has_work) == (0, False)
