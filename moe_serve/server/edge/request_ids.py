"""The id of a call, in the header X-Request-Id: the client's own or a new one; its answer has it, and the log."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.log import call_id

HEADER = b"x-request-id"
_FIELD = re.compile(rb"\r\nx-request-id:[ \t]*([!-~]*)[ \t]*\r\n", re.IGNORECASE)
_ALLOWED = re.compile(rb"[\x21-\x7e]{1,128}")  # what is longer, or has other characters, is replaced


def checked_id(given: bytes) -> bytes:
    """Returns the id that a client has sent, or a new one in the place of one that is none."""
    return given if _ALLOWED.fullmatch(given) else uuid.uuid4().hex.encode()


def id_in_header(data: bytes) -> bytes:
    """Returns the same for the bytes of a request that was not parsed, whose fields are each there once."""
    found = _FIELD.search(data, 0, data.find(b"\r\n\r\n") + 2)
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
