"""One client's connection: uvicorn's HTTP/1.1 protocol with deadlines and limits of its own.

A connection is always in one phase, and each phase but `answer` has a deadline (`sweep` looks at all of them):

    headers  accepted, or the first byte of a request is here; its header is not complete
    body     the header is here, the body is not
    answer   the application works or sends; only a client that takes nothing of what is sent is cut off
    idle     answered, and no byte of a next request is here
    linger   refused, or answered before the body was complete: further bytes are dropped, so that a client that is
             still sending can read the answer
"""

import asyncio
import contextlib
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from moe_serve.config import ServerConfig
from moe_serve.server.edge.errors import error_body
from moe_serve.server.edge.gate import GENERATING, EarlyRefusal
from moe_serve.server.edge.http_parser import BoundedParser

CONNECTION = "moe_serve.connection"  # among a scope's extensions: the Connection that a request came by
Phase = Literal["headers", "body", "answer", "idle", "linger"]

_LINGER_S = 5.0
_PIECE_BYTES = 4096  # given to the parser at a time, so that its bound on headers holds
_MIN_PROGRESS_BYTES = 1 << 14  # that a client must take of an answer within send_deadline_s
SEND_BUFFER_BYTES = 1 << 17  # in the kernel: a stream that nobody reads must be noticed before megabytes are in it
_BETWEEN_REQUESTS = {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0
# Of batches: the time between two, how long they go on after the last refusal, what a turn of the event loop reads.
_PERIOD_S, _LASTS_S = 0.01, 1.0
_TURN_CONNECTIONS, _TURN_S = 64, 0.002
_READ_BYTES = 1 << 16

log = logging.getLogger("moe_serve.server.uvicorn")
log.setLevel(logging.ERROR)  # warnings there are about what clients send: anybody could fill the disk with them


class Connection(H11Protocol):
    """The protocol of one connection.

    early:   refuses some requests before they are parsed
    batches: reads what comes after a refusal
    on_lost: called once, when it is closed
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        server: ServerConfig,
        early: EarlyRefusal,
        batches: "BatchReader",
        on_lost: Callable[["Connection"], None],
    ):
        super().__init__(config, state, {})
        self._early = early
        self._batches = batches
        self._server = server
        self.conn: BoundedParser = self._new_parser()
        self.logger = log
        self.timeout_keep_alive = server.idle_deadline_s  # type: ignore[assignment]  # call_later takes fractions
        self.descriptor = -1  # of its socket
        self.opening: asyncio.Task[None] | None = None  # until the connection is made, such as a TLS handshake
        self._on_lost = on_lost
        self._since_s = time.monotonic()  # when the phase began
        self._has_begun = True  # bytes of a request are here, or the connection is new
        self._drops = False  # refused: what still comes is dropped
        self._is_last = False  # no request after this one or the next: the server is ending
        self._unsent = 0  # bytes that waited for the client when it last made progress
        self._unsent_since_s = 0.0

    def _new_parser(self) -> BoundedParser:
        return BoundedParser(int(self._server.max_header_kib * 2**10))

    # --- phases ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        cycle = self.cycle
        if self._drops:
            return "linger"
        if cycle is None or cycle.response_complete:
            if cycle is not None and self.conn.their_state is h11.SEND_BODY:
                return "linger"
            return "headers" if self._has_begun else "idle"
        return "body" if cycle.more_body else "answer"

    @property
    def may_yield(self) -> bool:
        """Whether nothing is lost when a new one takes its place: no complete request is here, and all was sent."""
        if self.transport is None:
            return True
        waits = self.phase in ("headers", "idle", "linger") and not self.transport.get_write_buffer_size()
        return waits and not self._batches.has_bytes_of(self)

    def sweep(self, now_s: float) -> None:
        """Ends the connection where the deadline of its phase has passed."""
        if self.transport is None:
            return  # the handshake has a deadline of its own
        if self._is_stalled(now_s):
            self.transport.abort()
            return
        waited_s, phase = now_s - self._since_s, self.phase
        if phase == "headers" and waited_s > self._server.header_deadline_s:
            if self.conn.has_bytes:
                self._refuse(408, f"the header did not arrive within {self._server.header_deadline_s:g} s; send again")
            else:
                self.transport.close()
        elif phase == "body" and waited_s > self._server.body_deadline_s:
            self._refuse(408, f"the body did not arrive within {self._server.body_deadline_s:g} s; send it again")
        elif phase == "linger" and waited_s > _LINGER_S:
            self.transport.abort()
        elif phase == "idle" and waited_s > self._server.idle_deadline_s:
            self.timeout_keep_alive_handler()  # uvicorn's own timer is not set after an early refusal

    def end_after_answer(self) -> None:
        """Makes the answer in progress, or else the next one, the last, and tells the client so if possible."""
        self._is_last = True
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_after_cycle()

    @property
    def takes_chunks(self) -> bool:
        """Whether `write_chunk` may be called: a stream has begun, and its client is reading."""
        cycle = self.cycle
        return (
            cycle.response_started
            and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)
            and self.conn.our_state is h11.SEND_BODY
            and cycle.scope["http_version"] == "1.1"
            and cycle.scope["method"] != "HEAD"
        )

    def write_chunk(self, data: bytes) -> None:
        """Sends the next piece of a stream, which is not empty.

        ASGI's `send` does the same through all layers of the application and a parser that only frames the piece, which
        costs as much as sending it.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _end_after_cycle(self) -> None:
        self.cycle.keep_alive = False
        # As if the client had asked for it: uvicorn answers the same.
        self.cycle.scope["headers"] = [*self.cycle.scope["headers"], CLOSE_HEADER]

    def give_up(self) -> None:
        """Ends the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def end_now(self) -> None:
        """Ends a call that the end of the server has cancelled: with 503, or by cutting its stream off."""
        self._refuse(503, "the server is ending")

    def _is_stalled(self, now_s: float) -> bool:
        """Returns whether bytes have waited for longer than send_deadline_s while the client took next to none."""
        size = self.transport.get_write_buffer_size()
        if not size or (self.phase == "answer" and not self.flow.write_paused):
            self._unsent = 0
        elif not self._unsent or size <= self._unsent - _MIN_PROGRESS_BYTES:
            self._unsent, self._unsent_since_s = size, now_s
        return self._unsent > 0 and now_s - self._unsent_since_s > self._server.send_deadline_s

    # --- asyncio and uvicorn call these ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.descriptor = transport.get_extra_info("socket").fileno()
        self._since_s = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._batches.remove(self)
        self._on_lost(self)

    def resume_writing(self) -> None:
        self._unsent = 0  # the client has taken most of what waited; what waits from now on is new
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._drops or self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_complete and self.conn.reads_plain_body:
            data = self._drop(data)
            if not data:
                return
        if not self._has_begun and (self.cycle is None or self.cycle.response_complete):
            self._has_begun, self._since_s = True, time.monotonic()
        self._unset_keepalive_if_required()
        if self._refuse_early(data):
            self._batches.add(self)
            return
        self._batches.release(self)
        start = 0
        # A client that has said that this request is its last one may send an empty line behind it, or anything else.
        while start < len(data) and not self._drops and self.conn.their_state is not h11.MUST_CLOSE:
            end = len(data) if self.conn.reads_plain_body else start + _PIECE_BYTES
            self.conn.receive_data(data[start:end])
            try:
                self.handle_events()
            except h11.LocalProtocolError:
                self.transport.abort()  # the client broke the protocol while its answer was being sent
            start = end

    def _drop(self, data: bytes) -> bytes:
        """Drops the rest of a body after its answer, unparsed; returns the bytes after its end.

        A client may send any amount of it. The phase keeps its deadline.
        """
        num_missing = self.conn.num_missing
        if len(data) < num_missing:
            self.conn.skip(len(data))
            return b""
        self.conn = self._new_parser()
        self._has_begun, self._since_s = False, time.monotonic()
        return data[num_missing:]

    def _refuse_early(self, data: bytes) -> bool:
        """Refuses a call before it is parsed, if possible; returns whether it did."""
        if not self._may_refuse_early():
            return False
        answer = self._early.answer(data, self.client, self.server_state.default_headers)
        if answer is None:
            return False
        self.transport.write(answer)
        self._has_begun, self._since_s = False, time.monotonic()
        self._batches.count_refusal()
        return True

    def _may_refuse_early(self) -> bool:
        """Whether arriving bytes begin a request, and the client has read all answers so far."""
        return (
            self.conn.states == _BETWEEN_REQUESTS
            and not self.conn.has_bytes
            and not self._is_last
            and not self.transport.get_write_buffer_size()
        )

    def handle_events(self) -> None:
        if self._drops:
            return
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._since_s = time.monotonic()
            extensions: dict[str, Any] = {CONNECTION: self}
            self.cycle.scope["extensions"] = extensions
            # A client that waits for `100 Continue` and gets its answer first may send the body or leave it out.
            if self._is_last or self.conn.they_are_waiting_for_100_continue:
                self._end_after_cycle()

    def on_response_complete(self) -> None:
        self.cycle.scope["extensions"].clear()  # which refer to this object
        self._has_begun, self._since_s = self.conn.has_bytes, time.monotonic()
        super().on_response_complete()
        if self._batches.is_active and self.cycle.scope["path"] in GENERATING and self._may_refuse_early():
            self._batches.add(self)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection if the client has sent its request, closes its side and waits for the answer.

        A client that has gone away looks the same until something is sent to it. So an interim response is sent: a
        client that is gone replies with a reset. TLS has no half-closed connections.
        """
        if self.scheme == "https" or self._drops or self.phase != "answer":
            return None
        self.cycle.keep_alive = False
        if not self.cycle.response_started and self.scope["http_version"] == "1.1":
            with contextlib.suppress(h11.LocalProtocolError):
                self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        abort_when_reset(self.transport)
        return True

    # --- refusals -------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser has refused; uvicorn calls this."""
        self._refuse(*self.conn.refusal)

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error, then drops further bytes for a while."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its application need not go on
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        body = msgspec.json.encode(error_body(message, status))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        sent = h11.Data(data=b"" if self.conn.is_head else body)
        parts: list[Any] = [h11.Response(status_code=status, headers=headers), sent, h11.EndOfMessage()]
        with contextlib.suppress(h11.LocalProtocolError):  # the request was answered before its fault came
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self._drops, self._since_s = True, time.monotonic()
        self.flow.resume_reading()
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # the client has reset the connection
            self.transport.abort()

    def shutdown(self) -> None:
        if self._drops:
            self.transport.abort()
        else:
            super().shutdown()


def abort_when_reset(transport: asyncio.Transport, wait_s: float = _FIRST_LOOK_S) -> None:
    """Aborts a half-closed connection once the client resets it. Polls for that, since asyncio no longer does."""
    if transport.is_closing():
        return
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        transport.abort()
    else:
        asyncio.get_running_loop().call_later(wait_s, abort_when_reset, transport, min(2 * wait_s, _LAST_LOOK_S))


class BatchReader:
    """Reads connections in batches while calls that generate are refused. One for each front end.

    An event loop wakes up for every arriving request. At ten times the load that can be served these are thousands of
    wakeups a second, and each takes a core from a rank in the middle of its step. So a connection whose call was
    refused leaves the loop: all such connections are read together, a hundred times a second. So are connections that
    are answered meanwhile; otherwise they would always be the first to get a free place.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._ready: deque[int] = deque()  # descriptors of the batch that is being read; some may be closed by now
        self._until_s = 0.0
        self._next: asyncio.Handle | None = None  # batch; None where there is no connection

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def is_active(self) -> bool:
        """Whether calls have been refused lately."""
        return time.monotonic() < self._until_s

    def count_refusal(self) -> None:
        """Notes that a call was refused: connections are read in batches from now on, for a while."""
        self._until_s = time.monotonic() + _LASTS_S

    async def next_one(self) -> None:
        """Waits for the next batch while calls are refused: new connections come in batches, after the others."""
        if self.is_active:
            await asyncio.sleep(_PERIOD_S)

    def add(self, connection: Connection) -> None:
        """Takes a connection out of the event loop, unless it has TLS, whose bytes only the loop can read."""
        number = connection.descriptor
        if number in self._connections or connection.scheme == "https" or connection.transport.is_closing():
            return
        connection.transport.pause_reading()
        self._connections[number] = connection
        self._epoll.register(number, select.EPOLLIN)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(_PERIOD_S, self._read)

    def release(self, connection: Connection) -> None:
        """Gives a connection back to the event loop, if it is here."""
        if self.remove(connection):
            connection.transport.resume_reading()

    def remove(self, connection: Connection) -> bool:
        """Forgets a connection, whose descriptor is still open; returns whether it was here."""
        if self._connections.pop(connection.descriptor, None) is None:
            return False
        self._epoll.unregister(connection.descriptor)
        return True

    def has_bytes_of(self, connection: Connection) -> bool:
        """Returns whether something of a connection waits for the next batch."""
        if connection.descriptor not in self._connections:
            return False
        poll = select.poll()
        poll.register(connection.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Forgets all connections."""
        if self._next is not None:
            self._next.cancel()
        self._connections.clear()
        self._ready.clear()
        self._epoll.close()

    def _read(self) -> None:
        is_left = True
        try:
            is_left = self._read_turn()
        finally:  # a mistake with one connection must not keep the others waiting for ever
            loop = asyncio.get_running_loop()
            if not self._connections:
                self._next = None
            else:
                self._next = loop.call_soon(self._read) if is_left else loop.call_later(_PERIOD_S, self._read)

    def _read_turn(self) -> bool:
        """Reads a few connections of the batch; returns whether some are left."""
        ends_s = time.monotonic() + _TURN_S
        if not self._ready:
            self._ready.extend(number for number, _ in self._epoll.poll(0))
        for _ in range(min(len(self._ready), _TURN_CONNECTIONS)):
            self._read_one(self._ready.popleft())
            if time.monotonic() >= ends_s:
                break
        if not self.is_active:
            for connection in list(self._connections.values())[:_TURN_CONNECTIONS]:
                self.release(connection)
        return bool(self._ready)

    def _read_one(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None or connection.transport.is_closing():
            return
        try:
            data = os.read(number, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.release(connection)  # the event loop finds its end
            return
        try:
            connection.data_received(data)
        except Exception:
            connection.transport.abort()  # as the event loop would
            raise
