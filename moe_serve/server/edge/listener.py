"""Accepts connections: bounded in number, a few in each turn of the event loop, TLS handshakes included. Torch-free.

asyncio's own servers accept up to a whole backlog in one turn, do not count connections before their handshake, and
write a traceback to the log for each one beyond the limit of descriptors.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

import msgspec

from moe_serve.log import get_logger
from moe_serve.server.edge.batch_reader import BatchReader
from moe_serve.server.edge.connection import SEND_BUFFER_BYTES, Connection
from moe_serve.server.edge.connection_table import ConnectionTable
from moe_serve.server.edge.errors import error_body

_ACCEPTS_PER_TURN = 16
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 0.1  # after the kernel had no descriptor left
_WARN_EVERY_S = 60.0

log = get_logger(__name__)


class Listener:
    """Accepts from one listening socket, until `run` is cancelled. tls: None = plain HTTP"""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], Connection],
        table: ConnectionTable,
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
        self._warned_s = -_WARN_EVERY_S
        self._num_unwarned = 0

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
                    self._warn("no descriptor is left for a connection; raise the limit (ulimit -n)")
                    self._table.make_room()
                    await asyncio.sleep(_PAUSE_S)
                continue  # else: the client was gone before it was accepted
            self._take(accepted, str(address[0]) if isinstance(address, tuple) else "")

    async def _arrival(self) -> None:
        """Waits until a connection is there to accept.

        loop.sock_accept() would accept it itself, and where it is cancelled just then, drop it: neither served nor
        closed until the next garbage collection.
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
            self._warn(
                f"refused a connection of {client}: server.max_connections is {self._table.max_connections}, "
                f"{self._table.max_per_client} of one client, and all have a request"
            )
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

    def _warn(self, text: str) -> None:
        """Logs at most one warning a minute, with the number of those that were left out."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._warned_s < _WARN_EVERY_S:
            self._num_unwarned += 1
            return
        more = f" ({self._num_unwarned} more in the last minutes)" if self._num_unwarned else ""
        log.warning("%s%s", text, more)
        self._warned_s, self._num_unwarned = now_s, 0


def _turn_away(accepted: socket.socket, has_tls: bool) -> None:
    """Answers 503 as far as that goes without waiting, and closes."""
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
