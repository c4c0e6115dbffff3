"""Runs the application on a port; told to end, it does so within seconds. Torch-free."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from moe_serve.server.bridge import Bridge

_END_DEADLINE_S = 3  # for answers in progress, once the server is told to end


class HttpServer(uvicorn.Server):
    """uvicorn that ends without delay: it takes no new calls, and the open ones end with an error."""

    def __init__(self, app: FastAPI, bridge: Bridge, handle_signals: bool):
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_END_DEADLINE_S,
            )
        )
        self._bridge = bridge
        self._handle_signals = handle_signals

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
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
