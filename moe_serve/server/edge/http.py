"""Runs the application on a port; told to end, it does so within seconds. Torch-free."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from moe_serve.log import get_logger
from moe_serve.server.edge.batch_reader import BatchReader
from moe_serve.server.edge.connection import Connection
from moe_serve.server.edge.connection_limits import ConnectionLimits
from moe_serve.server.edge.connection_table import ConnectionTable
from moe_serve.server.edge.descriptors import connections_allowed
from moe_serve.server.edge.early_refusal import EarlyRefusal
from moe_serve.server.edge.ending_app import EndingApp
from moe_serve.server.edge.listener import Listener
from moe_serve.server.edge.tls import make_tls
from moe_serve.server.ranks.bridge import Bridge

log = get_logger(__name__)
_END_DEADLINE_S = 3  # for answers in progress, once the server is told to end
_SWEEP_S = 0.25  # between two looks at the deadlines of all connections


class HttpServer(uvicorn.Server):
    """uvicorn with bounded connections, which ends without delay: no new calls, and open ones end with an error.

    Raises ConfigError where the files for TLS cannot be used.
    """

    def __init__(self, app: FastAPI, bridge: Bridge, handle_signals: bool):
        super().__init__(
            uvicorn.Config(
                EndingApp(app, lambda: self.should_exit),
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
        self._batches = BatchReader()
        self._handle_signals = handle_signals
        server = bridge.config.server
        self._tls = make_tls(server)
        self._limits = ConnectionLimits.of(server)
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
                listening, self._connection, self.table, self._batches, self._tls, self._limits.header_deadline_s
            )
            self._work.append(asyncio.create_task(listener.run()))
        self._work.append(asyncio.create_task(self._sweep()))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more, and ends the connections."""
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
        self._batches.close()

    def _connection(self) -> Connection:
        connection = Connection(
            self.config, self.server_state, self._limits, self._early, self._batches, self.table.remove
        )
        if self._draining is not None:
            connection.end_after_answer()
        return connection

    async def _sweep(self) -> None:
        limits = self._limits
        shortest_s = min(
            limits.header_deadline_s, limits.body_deadline_s, limits.idle_deadline_s, limits.send_deadline_s
        )
        while True:
            await asyncio.sleep(min(_SWEEP_S, shortest_s / 4))
            self.table.sweep()

    def drain(self) -> None:
        """Refuses new work with 503, lets open requests end within the deadline, then stops. Again: stops at once.

        Answers from now on say `connection: close`, so that clients go elsewhere with their next request.
        """
        if self._draining is not None or self.should_exit:
            self.stop()
        else:
            self._draining = asyncio.create_task(self._drain())
            for connection in self.table:
                connection.end_after_answer()

    async def _drain(self) -> None:
        deadline_s = self._bridge.config.server.drain_deadline_s
        num_open = self._bridge.num_open
        log.info("draining: %d open requests have %g s to end", num_open, deadline_s)
        num_left = await self._bridge.finish(deadline_s)
        if num_left:
            log.warning("%d requests were still open after server.drain_deadline_s = %g s", num_left, deadline_s)
        self.stop()

    def stop(self) -> None:
        """Begins to end. A second call no longer waits for answers."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._bridge.drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if not self._handle_signals:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.stop)
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
