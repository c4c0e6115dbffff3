"""Gives each call an id, and refuses it early if the queue is full or its client has reached a limit.

`AdmissionGate` checks calls that generate before their bodies are read. `EarlyRefusal` refuses by the bytes of a
request, before it is parsed: HTTP's parser, the application's layers and an answer through them take 0.3 ms of Python,
which at ten times the load that can be served would take the cores from the ranks. It handles whole, plain requests;
all others take the long way, with the same refusal.
"""

import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.errors import QueueFullError
from moe_serve.log import call_id
from moe_serve.server.edge.client_limits import Client, ClientTable, Permit
from moe_serve.server.edge.errors import error_of, error_response, json_bytes, retry_after
from moe_serve.server.edge.guard import Access
from moe_serve.server.edge.http_parser import PLAIN_HEADER_BYTES, plain_headers
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.admission import DEGRADED_HEADER

HEADER = b"x-request-id"
_ID_FIELD = re.compile(rb"\r\nx-request-id:[ \t]*([!-~]*)[ \t]*\r\n", re.IGNORECASE)
_ALLOWED = re.compile(rb"[\x21-\x7e]{1,128}")  # what is longer, or has other characters, is replaced


def checked_id(given: bytes) -> bytes:
    """Returns the id that a client has sent if it is valid, else a new one."""
    return given if _ALLOWED.fullmatch(given) else uuid.uuid4().hex.encode()


def id_in_header(data: bytes) -> bytes:
    """Returns the same for the bytes of an unparsed request, in which each header field occurs once."""
    found = _ID_FIELD.search(data, 0, data.find(b"\r\n\r\n") + 2)
    return checked_id(b"" if found is None else found[1])


class RequestIds:
    """An ASGI application before another one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        own = checked_id(given)

        # Not a coroutine itself: a stream passes here with every token.
        def send_with_id(message: Message):  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, own)]}
            return send(message)

        token = call_id.set(own.decode("ascii"))
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            call_id.reset(token)


# Paths of routes that generate.
GENERATING = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    | {"/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"}  # they compute prompts alone
)
# Paths that also count as requests of a client: they need no rank, but a core.
_TOKENIZING = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})


@dataclass
class Terms:
    """The terms of a call. permit: None = its client has no limits;  degraded: the steps that changed it"""

    permit: Permit | None = None
    degraded: list[str] = field(default_factory=list)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers that tell the client."""
        found = [] if self.permit is None else list(self.permit.headers(time.monotonic()))
        return [*found, (DEGRADED_HEADER, ", ".join(self.degraded).encode())] if self.degraded else found


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
        elif (refusal := self._bridge.book.refusal()) is not None:
            self._bridge.book.counters["num_refused"] += 1
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


_PATHS = {f"POST {path} HTTP/1.1".encode(): path for path in GENERATING}
_LONGEST = 64  # of the first lines that are read
_MOST_KNOWN = 4096  # headers
_HEAD = b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"

Header = tuple[bytes, bytes]


class EarlyRefusal:
    """Answers requests that are refused, before they are parsed."""

    def __init__(self, app: FastAPI, access: Access, bridge: Bridge, clients: ClientTable):
        self._app = app
        self._access = access
        self._bridge = bridge
        self._clients = clients
        # The client and the body's bytes for each header lately seen. Keyed digests, since a header may hold a secret.
        self._known: dict[bytes, tuple[Client, int]] = {}
        self._digest_key = secrets.token_bytes(16)

    def answer(self, data: bytes, address: tuple[str, int] | None, default_headers: Iterable[Header]) -> bytes | None:
        """Returns the answer to a refused request; None if it takes the long way.

        data: all that has arrived since the last request;  address: the client's
        """
        path = _PATHS.get(data[:_LONGEST].partition(b"\r\n")[0])
        if path is None:
            return None
        refusal = self._bridge.book.refusal()
        if refusal is None and not self._access.has_limits:
            return None
        client = self._client_of(data, path, address)
        if client is None:
            return None
        named = (*default_headers, (HEADER, id_in_header(data)))
        if refusal is not None:
            self._bridge.book.counters["num_refused"] += 1
            return _response(refusal, named)
        return self._refuse_client(client, named)

    def _client_of(self, data: bytes, path: str, address: tuple[str, int] | None) -> Client | None:
        """Returns the client of a whole, plain and allowed request; None for any other.

        Clients send the same header again and again, so the result is remembered.
        """
        end = data.find(b"\r\n\r\n", 0, PLAIN_HEADER_BYTES)
        if end < 0:
            return None
        host = address[0] if address is not None else ""
        digest = hashlib.blake2b(host.encode() + b"\n" + data[:end], digest_size=16, key=self._digest_key).digest()
        known = self._known.get(digest)
        if known is not None:
            return known[0] if len(data) - end - 4 == known[1] else None
        headers = plain_headers(data)
        if headers is None:
            return None
        scope: dict[str, Any] = {"app": self._app, "method": "POST", "path": path, "client": address}
        if self._access.refusal(scope, headers) is not None:
            return None  # unauthenticated peers learn nothing of the queue
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        client: Client = scope["state"]["client"]
        self._known[digest] = client, int(headers["content-length"])
        return client

    def _refuse_client(self, client: Client, default_headers: Iterable[Header]) -> bytes | None:
        if not client.limits.exist:
            return None
        now_s = time.monotonic()
        try:
            permit = self._clients.permit(client, now_s)
        except QueueFullError as error:
            return _response(error, default_headers)
        try:
            refusal = permit.refusal(now_s)
            return None if refusal is None else _response(refusal, (*default_headers, *permit.headers(now_s)))
        finally:
            permit.leave(now_s)


def _response(error: QueueFullError, headers: Iterable[Header]) -> bytes:
    body = json_bytes(error_of(error))
    lines = b"".join([name + b": " + value + b"\r\n" for name, value in headers])
    return b"%sretry-after: %s\r\ncontent-length: %d\r\n%s\r\n%s" % (
        _HEAD, retry_after(error).encode(), len(body), lines, body,
    )  # fmt: skip
