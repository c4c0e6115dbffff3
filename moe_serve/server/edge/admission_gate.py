"""Looks at a call that generates before its body is read: may it wait, and may its client ask for more? Torch-free."""

import time
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.errors import QueueFullError
from moe_serve.server.edge.client_limits import ClientTable, Permit
from moe_serve.server.edge.errors import error_response
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.degrade import HEADER

# Paths of routes that generate.
GENERATING = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"})
# Those that count as requests of a client, too: they need no rank, but a core.
_TOKENIZING = frozenset({"/tokenize", "/detokenize"})


@dataclass
class Terms:
    """Under which a call is served. permit: None = its client has no limits; degraded: what was given up"""

    permit: Permit | None = None
    degraded: list[str] = field(default_factory=list)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns what the answer says of them."""
        found = [] if self.permit is None else list(self.permit.headers(time.monotonic()))
        return [*found, (HEADER, ", ".join(self.degraded).encode())] if self.degraded else found


class AdmissionGate:
    """An ASGI application before another one. Sets `request.state.terms`. A refusal costs a few comparisons."""

    def __init__(self, app: ASGIApp, bridge: Bridge, clients: ClientTable):
        self._app = app
        self._bridge = bridge
        self._clients = clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in _TOKENIZING:
            await self._admit(scope, receive, send)
        elif scope["type"] != "http" or scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
        elif (refusal := self._bridge.refusal()) is not None:
            self._bridge.count_refused(1)
            await error_response(refusal)(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope["state"]["client"]
        terms = scope["state"]["terms"] = Terms()

        async def send_with_terms(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *terms.headers()]}
            await send(message)

        if not client.limits.exist:
            await self._app(scope, receive, send_with_terms if self._bridge.config.server.degrade else send)
            return
        try:
            permit = self._clients.permit(client, time.monotonic())
        except QueueFullError as error:
            await error_response(error)(scope, receive, send)
            return
        terms.permit = permit
        try:
            permit.enter(time.monotonic())
            await self._app(scope, receive, send_with_terms)
        except QueueFullError as error:  # from `enter`: the application answers its errors itself
            await error_response(error)(scope, receive, send_with_terms)
        finally:
            permit.leave(time.monotonic())
