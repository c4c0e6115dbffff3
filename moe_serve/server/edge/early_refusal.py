"""Refuses calls that generate by the bytes of their requests, while nothing more may wait or a client may ask no more.

The parser of HTTP, the application's layers and an answer through them take 0.3 ms of Python. At ten times the load
that can be served, that would take the cores from the ranks. So a whole, plain request is looked at here first.
Whatever is unusual about it, or may be let in, takes the long way. So what is read here decides nothing but a refusal,
which the long way would give, too. Torch-free.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI

from moe_serve.errors import QueueFullError
from moe_serve.server.edge.admission_gate import GENERATING
from moe_serve.server.edge.client_limits import Client, ClientTable
from moe_serve.server.edge.errors import error_of, json_bytes, retry_after
from moe_serve.server.edge.guard import Access
from moe_serve.server.edge.request_ids import HEADER, id_in_header
from moe_serve.server.ranks.bridge import Bridge

_PATHS = {f"POST {path} HTTP/1.1".encode(): path for path in GENERATING}
_LONGEST = 64  # of the first lines that are read
_FIELD = re.compile(rb"([A-Za-z0-9-]+):[ \t]*([!-~](?:[ -~]*[!-~])?)[ \t]*")
_MOST_HEADER_BYTES = 4096
# They ask for something, or answers depend on them.
_UNUSUAL = frozenset({"transfer-encoding", "expect", "upgrade", "origin", "trailer", "connection"})
_MOST_KNOWN = 4096  # headers
_HEAD = b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"

Header = tuple[bytes, bytes]


class EarlyRefusal:
    """What connections ask before they parse a request."""

    def __init__(self, app: FastAPI, access: Access, bridge: Bridge, clients: ClientTable):
        self._app = app
        self._access = access
        self._bridge = bridge
        self._clients = clients
        # By keyed digest, since a header may hold a secret: who asks with it, and the bytes of the body.
        self._known: dict[bytes, tuple[Client, int]] = {}
        self._digest_key = secrets.token_bytes(16)

    def answer(self, data: bytes, address: tuple[str, int] | None, default_headers: Iterable[Header]) -> bytes | None:
        """Returns the answer to a request that is refused; None where it takes the long way.

        data: all that has arrived since the last request;  address: the client's
        """
        path = _PATHS.get(data[:_LONGEST].partition(b"\r\n")[0])
        if path is None:
            return None
        refusal = self._bridge.refusal()
        if refusal is None and not self._access.has_limits:
            return None
        client = self._client_of(data, path, address)
        if client is None:
            return None
        named = (*default_headers, (HEADER, id_in_header(data)))
        if refusal is not None:
            self._bridge.count_refused(1)
            return _response(refusal, named)
        return self._refuse_client(client, named)

    def _client_of(self, data: bytes, path: str, address: tuple[str, int] | None) -> Client | None:
        """Returns who sends a whole, plain request that they may send; None for any other.

        Clients send the same header again and again: what it says is remembered.
        """
        end = data.find(b"\r\n\r\n", 0, _MOST_HEADER_BYTES)
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
            return None  # strangers learn nothing of the queue
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


def plain_headers(data: bytes) -> dict[str, str] | None:
    """Returns the header fields of a request, by lower-case name; None unless it is whole, plain and alone in data."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or len(head) > _MOST_HEADER_BYTES:
        return None
    fields: dict[str, str] = {}
    for line in head.split(b"\r\n")[1:]:
        field = _FIELD.fullmatch(line)
        if field is None:
            return None
        name = field[1].decode().lower()
        if name in _UNUSUAL and (name, field[2].lower()) != ("connection", b"keep-alive"):
            return None
        if name in fields:
            return None
        fields[name] = field[2].decode()
    return fields if "host" in fields and fields.get("content-length") == str(len(body)) else None


def _response(error: QueueFullError, headers: Iterable[Header]) -> bytes:
    body = json_bytes(error_of(error))
    lines = b"".join([name + b": " + value + b"\r\n" for name, value in headers])
    return b"%sretry-after: %s\r\ncontent-length: %d\r\n%s\r\n%s" % (
        _HEAD, retry_after(error).encode(), len(body), lines, body,
    )  # fmt: skip
