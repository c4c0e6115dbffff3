"""Reads the body of a request, with a bound on its size and on its time. Torch-free."""

import asyncio

from fastapi import Request

from moe_serve.errors import RequestError

_BODY_DEADLINE_S = 60.0  # for a client to send the whole body


class BodyTooLarge(RequestError):
    """A request body beyond server.max_body_mib."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body of a request. Raises BodyTooLarge as soon as its size is known, RequestError after a minute."""

    def too_large(what: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body has {what} bytes, at most {max_bytes} are allowed (server.max_body_mib); send less"
        )

    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large(announced)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large(f"more than {max_bytes}")
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {_BODY_DEADLINE_S:g} s; send it again") from None
    return bytes(body)
