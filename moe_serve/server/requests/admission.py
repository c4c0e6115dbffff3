"""Whether a new request may wait, and when a refused one should come back. Pure: time is an argument. Torch-free.

What waits is bounded in requests and in tokens. How fast it drains is measured: tokens (prompt and longest output) of
the requests that ended in the last seconds. So a refusal says when there will be space, and a request that would wait
beyond its deadline is refused at once.
"""

from collections import deque
from dataclasses import dataclass

from moe_serve.errors import QueueFullError

_WINDOW_S = 10
_MOST_S = 60.0  # a client is never told to stay away for longer


class DrainRate:
    """Tokens per second of the requests that ended lately."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()  # (second, tokens) of the window, without empty seconds
        self._sum = 0  # of their tokens

    def count(self, num_tokens: int, now_s: float) -> None:
        """Counts a request that has ended."""
        self._forget_old(now_s)
        second = int(now_s)
        self._sum += num_tokens
        if self._seconds and self._seconds[-1][0] == second:
            num_tokens += self._seconds.pop()[1]
        self._seconds.append((second, num_tokens))

    def per_s(self, now_s: float) -> float | None:
        """Returns the rate; None where nothing has ended lately. Times never go back."""
        self._forget_old(now_s)
        return self._sum / max(1.0, now_s - self._seconds[0][0]) if self._seconds else None

    def _forget_old(self, now_s: float) -> None:
        while self._seconds and now_s - self._seconds[0][0] >= _WINDOW_S:
            self._sum -= self._seconds.popleft()[1]


@dataclass(frozen=True)
class Load:
    """What a front end holds. num_open: requests that run or wait; waiting_tokens: of those that wait"""

    num_open: int
    waiting_tokens: int


@dataclass(frozen=True)
class Queue:
    """What waits. share: of what may wait, 0 to 1;  num_tokens: that wait;  rate: tokens per second that drain"""

    share: float
    num_tokens: int
    rate: float | None

    def seconds_until(self, share: float) -> float:
        """Returns how long until only this share of what may wait does."""
        return _seconds(self.num_tokens * max(0.0, 1 - share / self.share), self.rate) if self.share else 0.0


@dataclass(frozen=True)
class Admission:
    """The bounds. deadline_s: how long a request may wait for a rank; None = as long as it takes"""

    max_open: int
    max_waiting_tokens: int
    deadline_s: float | None

    def refusal(
        self, load: Load, rate: float | None, num_requests: int = 1, num_tokens: int = 1
    ) -> QueueFullError | None:
        """Returns why a call may not wait, None where it may. rate: tokens per second that drain, None = not known

        A call that finds nothing waiting is let in whatever its tokens are, so that none is refused for ever.
        """
        if load.num_open + num_requests > self.max_open:
            return QueueFullError(
                f"{load.num_open} requests are open and {num_requests} more do not fit into {self.max_open} "
                "(engine.max_running_requests x ranks + engine.max_queued_requests); try again later",
                _seconds(load.waiting_tokens / max(1, load.num_open), rate),
            )
        excess = load.waiting_tokens + num_tokens - self.max_waiting_tokens
        if load.waiting_tokens and excess > 0:
            return QueueFullError(
                f"{load.waiting_tokens} tokens wait for a rank and {num_tokens} more do not fit into "
                f"server.max_waiting_tokens = {self.max_waiting_tokens}; try again later",
                _seconds(excess, rate),
            )
        if self.deadline_s is not None and rate and load.waiting_tokens / rate > self.deadline_s:
            wait_s = load.waiting_tokens / rate
            return QueueFullError(
                f"a request would wait about {wait_s:.0f} s for a rank, longer than server.queue_deadline_s = "
                f"{self.deadline_s:g} s; try again later",
                min(_MOST_S, wait_s - self.deadline_s),
            )
        return None


def _seconds(num_tokens: float, rate: float | None) -> float:
    """Returns how long so many tokens take to drain."""
    return 1.0 if not rate else min(_MOST_S, num_tokens / rate)
