"""Unauthenticated peers on the TCP ports of a system: they read nothing, inject nothing, and end nothing.

What is behind a port here: the front end's socket, and the one where a rank takes wakes.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from moe_serve.engine.protocol.mailbox import ZmqMailbox
from moe_serve.engine.protocol.messages import Fatal, Hello, Wake, encode
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.server.ranks import router_socket
from moe_serve.server.ranks.router_socket import RouterSocket
from tests.server.served import in_event_loop, serving, until

LINK = Link(token="the token of this system", host="127.0.0.1")
# The greeting of ZMTP 3.0 with the NULL mechanism, and with CURVE
NULL_GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
CURVE_GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\0" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
LENGTH_4_GB = b"\x02" + struct.pack(">Q", 2**32)  # a frame with an 8-byte length
WAKE_OF_72_BYTES = NULL_GREETING + b"\0\x08\x93\xa4wak\xff\xff\0"  # invalid UTF-8
GARBAGE = {
    "noise": bytes(range(256)) * 64,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "pickle": b"\x80\x04K\x01.",
    "length": NULL_GREETING + LENGTH_4_GB + b"x" * 1000,
    "length in CURVE": CURVE_GREETING + LENGTH_4_GB + b"x" * 1000,
    "bare length": struct.pack("<Q", 2**32) + b"\xff" * 64,
    "invalid UTF-8": WAKE_OF_72_BYTES,
    "nothing": b"",
}


@contextlib.contextmanager
def peer(kind: int, address: str, token: str | None) -> Iterator["zmq.Socket[bytes]"]:
    """A ZeroMQ socket with another token, or with none."""
    if token is not None:
        sockets = LinkSockets(Link(token=token, host="127.0.0.1"))
        try:
            yield sockets.connected(kind, address, linger_ms=0)
        finally:
            sockets.close()
        return
    with zmq.Context() as context, context.socket(kind) as found:
        found.setsockopt(zmq.LINGER, 0)
        found.connect(address)
        yield found


@pytest.mark.parametrize("token", [None, "the token of some other system"], ids=["no token", "another"])
@in_event_loop
async def test_an_unauthenticated_peer_gets_no_message_to_the_front_end_and_hears_nothing(token):
    received: list[bytes] = []
    router = RouterSocket(LINK, lambda _, data: received.append(data))
    sockets = LinkSockets(router.link)
    with peer(zmq.DEALER, router.link.front_end, token) as outside:
        outside.setsockopt(zmq.SNDHWM, 10)
        for _ in range(10):
            with contextlib.suppress(zmq.Again):
                outside.send(encode(Hello(0, 2, 0, 1, "peer")), zmq.NOBLOCK)
        sockets.connected(zmq.DEALER, router.link.front_end).send(b"from one of us")
        await until(lambda: received)
        await asyncio.sleep(0.2)
        assert received == [b"from one of us"]
        assert not outside.poll(0)
    sockets.close()
    router.close()


@in_event_loop
async def test_a_flood_of_the_ranks_port_is_not_noticed_by_requests():
    async with serving() as served:
        address = ("127.0.0.1", served.bridge.link.port)
        stop = threading.Event()
        flood = threading.Thread(target=flood_port, args=(address, stop))
        flood.start()
        try:
            for _ in range(20):
                assert (await served.generate(text="a", sampling_params={"max_new_tokens": 20})).status_code == 200
        finally:
            stop.set()
            await asyncio.to_thread(flood.join)
        assert served.bridge.problem() is None
        assert [view.host for view in served.bridge.workers] == ["testhost"] * 2


def flood_port(address: tuple[str, int], stop: threading.Event) -> None:
    while not stop.is_set():
        for data in GARBAGE.values():
            send_raw(address, data)


def send_raw(address: tuple[str, int], data: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, 2) as raw:
        raw.sendall(data)


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_bytes_on_the_port_for_wakes_do_not_reach_the_rank(data):
    mailbox, peer = ZmqMailbox(LINK, 0, "127.0.0.1"), ZmqMailbox(LINK, 1, "127.0.0.1")
    peer.connect_peers([mailbox.wake_address])
    for _ in range(20):
        send_raw(port_of(mailbox.wake_address), data)
    peer.wake_peers(Wake(3, 4))
    assert mailbox.poll(60.0) == [Wake(3, 4)]
    assert mailbox.poll(0.05) == []
    mailbox.close()
    peer.close()


def test_one_of_us_that_sends_garbage_ends_no_rank(caplog):
    mailbox = ZmqMailbox(LINK, 0, "127.0.0.1")
    with peer(zmq.PUSH, mailbox.wake_address, LINK.token) as inside:
        for _ in range(2000):
            inside.send(b"\x93\xa4wak\xff\xff\0")
        inside.send(encode(Fatal(0, 0, "not a wake", 0)))
        inside.send(encode(Wake(3, 4)))
        assert wakes_of(mailbox) == [Wake(3, 4)]
    assert len(caplog.records) <= 1
    mailbox.close()


def wakes_of(mailbox: ZmqMailbox) -> list[object]:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        if arrived := mailbox.poll(0.2):
            return list(arrived)
    return []


class Recorder(threading.Thread):
    """Passes one connection on to an address, and keeps what the client sends."""

    def __init__(self, address: tuple[str, int]):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.recorded = bytearray()
        self._address = address

    def run(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(self._address)
        back = threading.Thread(target=self._pass_on, args=(server, client, None), daemon=True)
        back.start()
        self._pass_on(client, server, self.recorded)
        back.join(5)
        self.listener.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@in_event_loop
async def test_a_recorded_conversation_tells_nothing_and_is_of_no_use_a_second_time():
    received: list[bytes] = []
    router = RouterSocket(LINK, lambda _, data: received.append(data))
    address = ("127.0.0.1", router.link.port)
    recorder = Recorder(address)
    recorder.start()
    sockets = LinkSockets(LINK)
    sockets.connected(zmq.DEALER, f"tcp://127.0.0.1:{recorder.port}").send(b"a prompt that nobody may read")
    await until(lambda: received)
    sockets.close()
    await asyncio.to_thread(recorder.join, 10)
    assert len(recorder.recorded) > 200
    assert b"prompt" not in recorder.recorded
    assert LINK.token.encode() not in recorder.recorded

    def replay(pause_s: float) -> None:
        with socket.create_connection(address, 2) as raw, contextlib.suppress(OSError):
            for start in range(0, len(recorder.recorded), 64):
                raw.sendall(recorder.recorded[start : start + 64])
                time.sleep(pause_s)

    for pause_s in (0.0, 0.01):
        await asyncio.to_thread(replay, pause_s)
    await asyncio.sleep(0.2)
    assert received == [b"a prompt that nobody may read"]
    router.close()


@in_event_loop
async def test_connections_without_the_token_are_counted_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(router_socket, "ALIVE_PERIOD_S", 0.01)
    router = RouterSocket(LINK, lambda *_: None)
    for _ in range(50):
        await asyncio.to_thread(send_raw, ("127.0.0.1", router.link.port), GARBAGE["invalid UTF-8"])
    with peer(zmq.DEALER, router.link.front_end, "the token of some other system"):
        await asyncio.sleep(0.3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"connections to {router.link.front_end} were refused" in line
    assert "MOE_SERVE_TOKEN" in line
    router.close()


@in_event_loop
async def test_launchers_that_attach_again_and_again_are_bounded():
    async with serving() as served:
        link = served.bridge.link
        sockets = LinkSockets(link)
        for _ in range(30):
            launcher = sockets.connected(zmq.DEALER, link.front_end)
            launcher.send(encode(Hello(-1, 2, 0, 1, "launcher")))
        await until(lambda: launcher.poll(0))
        assert len(served.bridge._supervisors) <= 4
        sockets.close()
