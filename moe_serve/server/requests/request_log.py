"""One line in the log for each request that has ended, with ids, tokens and times; never with text."""

import time
from collections.abc import Callable

from moe_serve.log import get_logger, log_fields
from moe_serve.server.requests.open_request import OpenRequest
from moe_serve.server.requests.request_stats import finish_of

log = get_logger(__name__)
MAX_LINES = 200  # a second; what is beyond is counted in the next line


class RequestLog:
    """Writes the lines, as many as MAX_LINES in a second. clock: in seconds"""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._second_s = float("-inf")
        self._num_lines = 0
        self._num_left_out = 0

    def write(self, request: OpenRequest) -> None:
        """Writes the line of a request that has just ended."""
        now_s = self._clock()
        if now_s - self._second_s >= 1:
            self._second_s, self._num_lines = now_s, 0
        if self._num_lines >= MAX_LINES:
            self._num_left_out += 1
            return
        self._num_lines += 1
        left_out, self._num_left_out = self._num_left_out, 0
        fields = _fields(request, now_s)
        log_fields(log, "request ended", fields | ({"left_out": left_out} if left_out else {}))


def _fields(request: OpenRequest, now_s: float) -> dict[str, object]:
    """Ids, counts and seconds; a value that is not known is left out."""
    first_s = request.first_token_s
    fields: dict[str, object | None] = {
        "id": request.request_id,
        "rid": request.spec.rid,
        "x_request_id": request.call_id,
        "rank": request.rank,
        "attempt": request.attempt or None,
        "prompt_tokens": len(request.spec.prompt_ids),
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_output,
        "queue_s": round(request.queued_s, 6),
        "ttft_s": None if first_s is None else round(first_s - request.submitted_s, 6),
        "e2e_s": round(now_s - request.submitted_s, 6),
        "finish": finish_of(request),
    }
    return {name: value for name, value in fields.items() if value is not None}
