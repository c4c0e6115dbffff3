"""The HTTP server: it accepts connections, bounds them in all and by client, and ends within seconds when told to.

It accepts connections itself (`Listener`): asyncio's servers accept up to a whole backlog in one turn, do not count
connections before their handshake, and log a traceback for each one beyond the limit of descriptors. At the end uvicorn
cancels the tasks of late answers, and `asyncio.run` those that a second signal left; `ending` answers them first.
"""

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.log import RareWarnings, get_logger
from moe_serve.server.edge.connection import CONNECTION, SEND_BUFFER_BYTES, BatchReader, Connection
from moe_serve.server.edge.errors import error_body
from moe_serve.server.edge.gate import EarlyRefusal
from moe_serve.server.edge.ports import make_tls
from moe_serve.server.ranks.bridge import Bridge

log = get_logger(__name__)


_END_DEADLINE_S = 3  # for answers in progress, once the server is told to end
_SWEEP_S = 0.25  # between two looks at the deadlines of all connections


class HttpServer(uvicorn.Server):
    """uvicorn with bounded connections and a fast end: no new calls, and open ones get an error.

    Raises ConfigError where the files for TLS cannot be used.
    """

    def __init__(self, app: FastAPI, bridge: Bridge):
        super().__init__(
            uvicorn.Config(
                ending(app, lambda: self.should_exit),
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # a client's header must not change who the client is
                timeout_graceful_shutdown=_END_DEADLINE_S,
            )
        )
        self._bridge = bridge
        self._early: EarlyRefusal = app.state.early_refusal
        self.batches = BatchReader()
        server = bridge.config.server
        self._tls = make_tls(server)
        self._server = server
        allowed = connections_allowed(server.max_connections)
        per_client = server.max_connections_per_client or -(-allowed // 2)
        self.table = ConnectionTable(allowed, min(per_client, allowed))
        self._work: list[asyncio.Task[None]] = []
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept from listening sockets."""
        await self.lifespan.startup()
        self.servers = []
        for listening in sockets or ():
            listener = Listener(
                listening, self._connection, self.table, self.batches, self._tls, self._server.header_deadline_s
            )
            self._work.append(asyncio.create_task(listener.run()))
        self._work.append(asyncio.create_task(self._sweep()))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, and ends the connections."""
        accepting, sweeping = self._work[:-1], self._work[-1]
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves it out, and its task would end with a traceback
            await self.lifespan.shutdown()
        sweeping.cancel()
        for connection in list(self.table):
            connection.give_up()
        self.batches.close()

    def _connection(self) -> Connection:
        connection = Connection(
            self.config, self.server_state, self._server, self._early, self.batches, self.table.remove
        )
        if self._draining is not None:
            connection.end_after_answer()
        return connection

    async def _sweep(self) -> None:
        own = self._server
        shortest_s = min(own.header_deadline_s, own.body_deadline_s, own.idle_deadline_s, own.send_deadline_s)
        while True:
            await asyncio.sleep(min(_SWEEP_S, shortest_s / 4))
            self.table.sweep()

    def drain(self) -> None:
        """Refuses new work with 503, lets open requests end within the deadline, then stops. A second call stops now.

        Answers from now on say `connection: close`, so that clients send their next request elsewhere.
        """
        if self._draining is not None or self.should_exit:
            self.stop()
        else:
            self._draining = asyncio.create_task(self._drain())
            for connection in self.table:
                connection.end_after_answer()

    async def _drain(self) -> None:
        deadline_s = self._server.drain_deadline_s
        log.info("draining: %d open requests have %g s to end", len(self._bridge.book), deadline_s)
        num_left = await self._bridge.finish(deadline_s)
        if num_left:
            log.warning("%d requests were still open after server.drain_deadline_s = %g s", num_left, deadline_s)
        self.stop()

    def stop(self) -> None:
        """Stops the server. A second call no longer waits for answers."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._bridge.drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.stop)
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


_ACCEPTS_PER_TURN = 16
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 0.1  # after the kernel had no descriptor left


class Listener:
    """Accepts from one listening socket, until `run` is cancelled. tls: None = plain HTTP"""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], Connection],
        table: "ConnectionTable",
        batches: BatchReader,
        tls: ssl.SSLContext | None,
        handshake_deadline_s: float,
    ):
        self._listening = listening
        self._make = make
        self._table = table
        self._batches = batches
        self._tls = tls
        self._handshake_deadline_s = handshake_deadline_s
        self._warnings = RareWarnings(log)

    async def run(self) -> None:
        """Accepts connections."""
        in_turn = 0
        while True:
            in_turn += 1
            if in_turn % _ACCEPTS_PER_TURN == 0:
                await asyncio.sleep(0)
            try:
                accepted, address = self._listening.accept()
                accepted.setblocking(False)
            except (BlockingIOError, InterruptedError):
                await self._arrival()
                await self._batches.next_one()
                continue
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._warnings.warn(
                        "descriptors", "no descriptor is left for a connection; raise the limit (ulimit -n)"
                    )
                    self._table.make_room()
                    await asyncio.sleep(_PAUSE_S)
                continue  # else: the client was gone before it was accepted
            self._take(accepted, str(address[0]) if isinstance(address, tuple) else "")

    async def _arrival(self) -> None:
        """Waits until a connection is there to accept.

        loop.sock_accept() would accept it itself; cancelled at that moment it would drop it, neither served nor closed
        until the next garbage collection.
        """
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(self._listening, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(self._listening)

    def _take(self, accepted: socket.socket, client: str) -> None:
        connection = self._make()
        if not self._table.admit(connection, client):
            text = "refused a connection of %s: server.max_connections is %d, %d of one client, and all have a request"
            self._warnings.warn("connections", text, client, self._table.max_connections, self._table.max_per_client)
            _turn_away(accepted, self._tls is not None)
            return
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.opening = asyncio.ensure_future(self._open(connection, accepted))

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        """Starts the protocol on an accepted socket, after its handshake."""
        deadline_s = None if self._tls is None else self._handshake_deadline_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=deadline_s
            )
        except OSError:  # ssl.SSLError, ConnectionError and TimeoutError are OSErrors: the client's doing
            accepted.close()
            self._table.remove(connection)
        except asyncio.CancelledError:
            accepted.close()
            self._table.remove(connection)
            raise
        finally:
            connection.opening = None


def _turn_away(accepted: socket.socket, has_tls: bool) -> None:
    """Answers 503, if that is possible without waiting, and closes."""
    body = msgspec.json.encode(error_body("the server has no connection left; try again in a moment", 503))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with accepted, contextlib.suppress(OSError):
        accepted.setblocking(False)
        if not has_tls:
            accepted.send(head.encode() + body)
            accepted.shutdown(socket.SHUT_WR)
            accepted.recv(1 << 16)  # unread bytes would turn the close into a reset, which may overtake the answer


_LOOK_AGAIN_S = 0.05  # after all connections were busy: scanning thousands for each new one would block the loop


class ConnectionTable:
    """Bounds the connections, in all and of one client (an address).

    At a bound a new connection replaces the oldest one that waits for a request: one of its own client, or one of the
    client with the most connections. So silent connections keep nobody out. If all are busy, it is refused.
    """

    def __init__(self, max_connections: int, max_per_client: int):
        self.max_connections = max_connections
        self.max_per_client = max_per_client
        self.num_refused = 0
        self._by_client: dict[str, dict[Connection, None]] = defaultdict(dict)  # each in the order of arrival
        self._client_of: dict[Connection, str] = {}
        self._busy_until_s: dict[str, float] = {}  # clients without a connection that may yield; "": all clients

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._client_of))

    def __len__(self) -> int:
        return len(self._client_of)

    def admit(self, connection: Connection, client: str) -> bool:
        """Adds a new connection of a client, after making room if needed; returns whether there was room."""
        own = self._by_client.get(client, {})
        full = client if len(own) >= self.max_per_client else "" if len(self) >= self.max_connections else None
        if full is not None and not self._yield_one(full):
            self.num_refused += 1
            return False
        self._by_client[client][connection] = None
        self._client_of[connection] = client
        return True

    def make_room(self) -> None:
        """Ends one waiting connection, if there is one, since the process has run out of descriptors."""
        for client in sorted(self._by_client, key=self._num_of, reverse=True):
            if self._yield_one(client):
                return

    def remove(self, connection: Connection) -> None:
        """Forgets a connection, if it is known."""
        client = self._client_of.pop(connection, None)
        if client is None:
            return
        own = self._by_client[client]
        del own[connection]
        if not own:
            del self._by_client[client]
            self._busy_until_s.pop(client, None)

    def sweep(self) -> None:
        """Ends the connections whose deadlines have passed."""
        now_s = time.monotonic()
        for connection in self:
            connection.sweep(now_s)

    def _num_of(self, client: str) -> int:
        return len(self._by_client[client])

    def _yield_one(self, client: str) -> bool:
        """Ends the oldest connection of a client that may yield; returns False if there is none.

        client: "" = the one with the most connections
        """
        now_s = time.monotonic()
        if now_s < self._busy_until_s.get(client, 0.0):
            return False
        own = self._by_client[client or max(self._by_client, key=self._num_of)]
        oldest = next((connection for connection in own if connection.may_yield), None)
        if oldest is None:
            self._busy_until_s[client] = now_s + _LOOK_AGAIN_S
            return False
        self.remove(oldest)
        oldest.give_up()
        return True


def ending(app: ASGIApp, is_ending: Callable[[], bool]) -> ASGIApp:
    """Returns an application that ends calls that the end of the server has cancelled: with 503, or a cut stream."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not is_ending():
                raise
            connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
            if connection is not None:  # or its answer is complete, or this is the lifespan of the server
                connection.end_now()

    return call


_RESERVE = 128  # for everything that is not a client: ranks, logs, files, the event loop
_UNLIMITED = resource.RLIM_INFINITY


def connections_allowed(wanted: int) -> int:
    """Returns how many of the wanted connections the descriptor limit allows, after raising it as far as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = soft_limit(wanted, soft, hard)
    if target != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
        except OSError:
            pass  # a sandbox forbids it: the soft limit counts
    allowed = wanted if soft == _UNLIMITED else max(1, min(wanted, soft - _RESERVE))
    if allowed < wanted:
        log.warning(
            "server.max_connections is %d but the limit of descriptors allows %d; raise the hard limit (ulimit -Hn)",
            wanted,
            allowed,
        )
    return allowed


def soft_limit(wanted: int, soft: int, hard: int) -> int:
    """Returns the soft limit to set for the wanted connections: never a lower one, and none above the hard limit."""
    needed = wanted + _RESERVE
    if soft == _UNLIMITED or soft >= needed:
        return soft
    return needed if hard == _UNLIMITED else min(needed, hard)
