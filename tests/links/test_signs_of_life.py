"""Signs of life come from threads of their own: a busy event loop and a long step do not look like death."""

import asyncio
import errno
import threading
import time

import pytest
import zmq

from moe_serve.engine.protocol import mailbox as mailbox_module
from moe_serve.engine.protocol.mailbox import ZmqMailbox
from moe_serve.engine.protocol.messages import Alive, Pulse, decode_to_front_end, encode
from moe_serve.errors import LaunchError
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.server.ranks import router_socket
from moe_serve.server.ranks.router_socket import RouterSocket
from tests.server.served import in_event_loop, until

LINK = Link(token="the token of this system", host="127.0.0.1")


@in_event_loop
async def test_a_front_end_whose_loop_is_busy_shows_that_it_lives(monkeypatch):
    monkeypatch.setattr(router_socket, "ALIVE_PERIOD_S", 0.01)
    identities: list[bytes] = []
    router = RouterSocket(LINK, lambda identity, _: identities.append(identity))
    sockets = LinkSockets(router.link)
    rank = sockets.connected(zmq.DEALER, router.link.front_end)
    rank.send(b"hello")
    await until(lambda: identities)
    router.keep_alive(identities, Alive())
    heard_by_a_thread: list[bytes] = []
    reader = threading.Thread(target=lambda: heard_by_a_thread.extend(rank.recv() for _ in range(5)))
    reader.start()
    reader.join(20)  # blocks the event loop for as long as it takes
    assert heard_by_a_thread == [encode(Alive())] * 5

    # Nothing is lost by sends of the other thread, which take the socket's signals.
    for _ in range(300):
        rank.send(b"more")
    await until(lambda: len(identities) == 301)
    sockets.close()
    router.close()


@in_event_loop
async def test_a_loop_that_hangs_for_good_is_not_called_alive(monkeypatch):
    monkeypatch.setattr(router_socket, "ALIVE_PERIOD_S", 0.01)
    monkeypatch.setattr(router_socket, "_STUCK_S", -1.0)
    identities: list[bytes] = []
    router = RouterSocket(LINK, lambda identity, _: identities.append(identity))
    sockets = LinkSockets(router.link)
    rank = sockets.connected(zmq.DEALER, router.link.front_end)
    rank.send(b"hello")
    await until(lambda: identities)
    router.keep_alive(identities, Alive())
    await asyncio.sleep(0.2)
    assert not rank.poll(0)
    sockets.close()
    router.close()


def test_a_rank_in_a_long_step_shows_that_it_lives_and_in_which_phase(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(mailbox_module, "ALIVE_PERIOD_S", 0.01)
    link = Link(folder=tmp_path)
    sockets = LinkSockets(link)
    front_end = sockets.bound(zmq.ROUTER, link.front_end)
    mailbox = ZmqMailbox(link, 1, "127.0.0.1")
    mailbox.start_pulse(lambda: Pulse(1, 0, 7, "the forward"))
    time.sleep(0.1)  # a step in which the engine's thread sends nothing
    for _ in range(3):
        assert front_end.poll(20_000)
        assert decode_to_front_end(front_end.recv_multipart()[1]) == Pulse(1, 0, 7, "the forward")
    mailbox.close()
    sockets.close()


def test_a_rank_without_a_descriptor_for_its_signs_of_life_does_not_serve_without_them(monkeypatch, tmp_path):
    mailbox = ZmqMailbox(Link(folder=tmp_path), 1, "127.0.0.1")

    def no_descriptor(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", no_descriptor)
        with pytest.raises(LaunchError, match=r"signs of life.*Too many open files.*ulimit -n"):
            mailbox.start_pulse(lambda: Pulse(1, 0, 7, ""))
    mailbox.close()
