"""Statistics of requests: histograms of times and tokens, and a line in the log for each, never with its text.

Tens of thousands of tokens come per second, so counting one is a few additions without a lock.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence

from moe_serve.errors import MoeServeError, RequestError
from moe_serve.log import get_logger, log_fields
from moe_serve.server.requests.open_request import OpenRequest, OwnTimeoutError

log = get_logger(__name__)


class Histogram:
    """Counts of values by bucket. bounds: ascending; a value falls into the first bucket whose bound is not below it"""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value. times: how often it was seen"""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Returns buckets as Prometheus counts them: (upper bound, values up to it). counts: one more than bounds"""
    found, total = [], 0
    for bound, count in zip((*map(str, map(float, bounds)), "+Inf"), counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


FINISH_REASONS = ("stop", "length", "abort", "refused", "error")

# As in SGLang and vLLM, with the buckets below a millisecond that a small model on a CPU needs.
_TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_BETWEEN = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1,
    2, 4, 8,
)  # fmt: skip
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class RequestStats:
    """Totals since the start of this front end. They only grow.

    num_prompt_tokens: of requests that had a first token;  num_cached_tokens: of these, from a prefix cache
    queue_s:           until a rank began with a request: the waits here and on the rank
    handover_s:        from the first token, of a prefill rank, to the next one, by part: until a decode rank had room,
                       and on that rank, which takes the pages that are left
    """

    def __init__(self) -> None:
        self.num_ended = dict.fromkeys(FINISH_REASONS, 0)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.queue_s = Histogram(_TO_FIRST)
        self.handover_s = {part: Histogram(_BETWEEN) for part in ("waiting", "decode_rank")}
        self.first_token_s = Histogram(_TO_FIRST)
        self.between_tokens_s = Histogram(_BETWEEN)
        self.per_output_token_s = Histogram(_BETWEEN)
        self.whole_s = Histogram(_WHOLE)
        self.prompt_tokens = Histogram(_TOKENS)
        self.output_tokens = Histogram(_TOKENS)

    def count_tokens(self, request: OpenRequest, num_new: int, now_s: float) -> None:
        """Counts tokens that a request has just got. now_s: time.monotonic()"""
        last_s = request.last_token_s
        request.last_token_s = now_s
        self.num_output_tokens += num_new
        if last_s is None:
            request.first_token_s = now_s
            self._count_prompt(request)
            self.first_token_s.observe(now_s - request.submitted_s)
            self.queue_s.observe(request.queued_s)
        else:
            self.between_tokens_s.observe((now_s - last_s) / num_new, num_new)

    def count_handover(self, request: OpenRequest, now_s: float) -> None:
        """Counts a hand-over when the first token of a decode rank has come; nothing for other tokens."""
        handed_over_s, resumed_s = request.handed_over_s, request.resumed_s
        if handed_over_s is not None and resumed_s is not None:
            self.handover_s["waiting"].observe(resumed_s - handed_over_s)
            self.handover_s["decode_rank"].observe(now_s - resumed_s)
            request.handed_over_s = None

    def count_end(self, request: OpenRequest, now_s: float) -> None:
        """Counts the end of a request."""
        reason = finish_of(request)
        self.num_ended[reason] += 1
        if request.first_token_s is None and reason in ("stop", "length"):
            self._count_prompt(request)  # it asked for its prompt alone
        if reason in ("refused", "error"):
            return
        self.whole_s.observe(now_s - request.submitted_s)
        self.prompt_tokens.observe(len(request.spec.prompt_ids))
        self.output_tokens.observe(request.num_output)
        if request.first_token_s is not None and request.last_token_s is not None and request.num_output > 1:
            self.per_output_token_s.observe((request.last_token_s - request.first_token_s) / (request.num_output - 1))

    def _count_prompt(self, request: OpenRequest) -> None:
        self.num_prompt_tokens += len(request.spec.prompt_ids)
        self.num_cached_tokens += request.num_cached


def finish_of(request: OpenRequest) -> str:
    """Returns why a request has ended, one of FINISH_REASONS.

    abort: also if its reader left, or its own time was over;  refused: it turned out to ask for the impossible
    """
    match request.failure:
        case OwnTimeoutError():
            return "abort"
        case RequestError():
            return "refused"
        case MoeServeError():
            return "error"
    reason = request.matcher.finish_reason
    return "abort" if reason is None else reason.kind


MAX_LINES = 200  # a second; the next line counts those left out


class RequestLog:
    """Writes the lines, at most MAX_LINES in a second."""

    def __init__(self) -> None:
        self._second_s = float("-inf")
        self._num_lines = 0
        self._num_left_out = 0

    def write(self, request: OpenRequest) -> None:
        """Writes the line of a request that has just ended."""
        now_s = time.monotonic()
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
