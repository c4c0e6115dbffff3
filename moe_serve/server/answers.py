"""The JSON that clients get: SGLang's objects for results, one form for all errors. Pure functions."""

from dataclasses import dataclass
from typing import Any

from moe_serve.errors import MoeServeError, QueueFullError, RequestError
from moe_serve.server.open_request import OpenRequest, OwnTimeoutError, UnavailableError

WEIGHT_VERSION = "default"  # weights do not change while serving


class UnknownModelError(RequestError):
    """A call for a model that this server does not serve."""


def result(request: OpenRequest, rid: str) -> dict[str, Any]:
    """Returns the `/generate` object of one request: everything so far, in a stream too (`text` is cumulative)."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": finish_reason(request),
        "prompt_tokens": len(request.spec.prompt_ids),
        "completion_tokens": request.num_output,
        "cached_tokens": request.num_cached,
        "weight_version": WEIGHT_VERSION,
        "dp_rank": request.rank,
    }
    if request.finished_s is not None:
        meta["e2e_latency"] = request.finished_s - request.submitted_s
    return {"text": request.matcher.text, "output_ids": request.matcher.output_ids, "meta_info": meta}


@dataclass
class Shown:
    """How much of a request a reader of increments has: characters and tokens."""

    num_chars: int = 0
    num_tokens: int = 0

    def rest(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns a result with only what the reader does not have, which it has from now on."""
        text, output_ids = answer["text"], answer["output_ids"]
        new = {**answer, "text": text[self.num_chars :], "output_ids": output_ids[self.num_tokens :]}
        self.num_chars, self.num_tokens = len(text), len(output_ids)
        return new


def finish_reason(request: OpenRequest) -> dict[str, Any] | None:
    """Returns why a request ended, None while it runs."""
    if request.failure is not None:
        return {"type": "abort", "message": str(request.failure)}
    reason = request.matcher.finish_reason
    if reason is None:
        return None
    if reason.kind == "abort":
        return {"type": "abort", "message": str(reason.matched)}
    if reason.kind == "length":
        return {"type": "length", "length": request.num_output}
    return {"type": "stop", "matched": reason.matched}


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
    """Returns the body of an error: what is wrong, the field to change (None: no single one), whether to try again."""
    kind = {429: "rate_limit_error", 503: "unavailable_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "internal_error")
    return {
        "error": {"message": message, "type": kind, "code": status, "param": field, "retryable": status in (429, 503)}
    }


def error_of(error: MoeServeError) -> dict[str, Any]:
    """Returns the body of an error."""
    return error_body(str(error), status_of(error), error.field if isinstance(error, RequestError) else None)
