"""Errors as clients see them: one JSON form, and a status for each kind."""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from moe_serve.errors import MoeServeError, QueueFullError, RequestError
from moe_serve.server.requests.open_request import OwnTimeoutError, UnavailableError

json_bytes = msgspec.json.encode


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns an answer with a value as JSON."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


class UnknownModelError(RequestError):
    """A call for a model that this server does not serve."""


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error."""
    match error:
        case UnknownModelError():
            return 404
        case OwnTimeoutError():
            return 408
        case RequestError():
            return 400
        case QueueFullError():
            return 429
        case UnavailableError():
            return 503
        case _:
            return 500


def error_body(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """Returns the JSON of an error, as OpenAI's and Anthropic's clients read it.

    field: the one to change; None: no single one
    """
    kind = {429: "rate_limit_error", 503: "unavailable_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "internal_error")
    about = {"message": message, "type": kind, "code": status, "param": field, "retryable": status in (429, 503)}
    return {"type": "error", "error": about}


def error_json(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Returns the answer for an error that is none of our classes."""
    return json_response(error_body(message, status), status, headers)


def error_of(error: MoeServeError) -> dict[str, Any]:
    """Returns the body of an error."""
    return error_body(str(error), status_of(error), error.field if isinstance(error, RequestError) else None)


def error_response(error: MoeServeError) -> Response:
    """Returns the answer for an error."""
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = retry_after(error)
    elif status_of(error) == 503:
        headers["Retry-After"] = "1"
    return json_response(error_of(error), status_of(error), headers)


def retry_after(error: QueueFullError) -> str:
    """Returns the value of a header: whole seconds, at least one."""
    return str(max(1, math.ceil(error.retry_after_s)))
