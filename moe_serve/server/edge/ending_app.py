"""The application as it meets the end of the server: what is cancelled then ends with an answer, not with a traceback.

uvicorn cancels the tasks of answers that are not done by its deadline, and `asyncio.run` what a second signal left.
"""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.server.edge.connection import CONNECTION, Connection


class EndingApp:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, is_ending: Callable[[], bool]):
        self._app = app
        self._is_ending = is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a call on. One that is cancelled at the end of the server gets 503, or its stream is cut off."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._is_ending():
                raise
            connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
            if connection is not None:  # or its answer is complete, or this is the lifespan of the server
                connection.end_now()
