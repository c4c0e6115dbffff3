"""Refuses a `/generate` call while nothing more may wait, before its body is read and before any route. Torch-free."""

from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.server.bridge import Bridge
from moe_serve.server.generate import error_response

_PATH = "/generate"


class AdmissionGate:
    """An ASGI application before another one. A refusal costs one comparison and one small answer."""

    def __init__(self, app: ASGIApp, bridge: Bridge):
        self._app = app
        self._bridge = bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._bridge.refusal() if scope["type"] == "http" and scope["path"] == _PATH else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)
