"""Bounds and orders the requests that wait for a rank, and reduces service step by step while too much waits.

`Admission` bounds the requests and the tokens that wait. `DrainRate` measures how fast they drain: tokens (prompt and
longest output) of the requests that ended in the last seconds. So a refusal says when there will be space, and a
request that would wait beyond its deadline is refused at once.

`WaitingLines` order them. A priority is a head start: a request of priority p is served as if it had come p head starts
earlier. So no request starves: only requests of a higher priority that come soon after it overtake it.

`Degradation` takes the steps of `server.degrade`, in order; none by default. A step changes only the calls that it
concerns, and a header of their answers names it.

All are pure: time is an argument.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moe_serve.config.sections import DegradeStep
from moe_serve.errors import QueueFullError
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

_WINDOW_S = 10
_MOST_S = 60.0  # the longest time that a client is told to stay away


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
        """Returns the rate; None if nothing has ended lately. Times never go back."""
        self._forget_old(now_s)
        return self._sum / max(1.0, now_s - self._seconds[0][0]) if self._seconds else None

    def _forget_old(self, now_s: float) -> None:
        while self._seconds and now_s - self._seconds[0][0] >= _WINDOW_S:
            self._sum -= self._seconds.popleft()[1]


@dataclass(frozen=True)
class Load:
    """The load of a front end. num_open: requests that run or wait;  waiting_tokens: of those that wait"""

    num_open: int
    waiting_tokens: int


@dataclass(frozen=True)
class Queue:
    """The waiting requests. share: of the bound, 0 to 1;  num_tokens: that wait;  rate: tokens drained per second"""

    share: float
    num_tokens: int
    rate: float | None

    def seconds_until(self, share: float) -> float:
        """Returns the time until the queue has drained to this share."""
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
        """Returns the refusal of a call; None if it may wait. rate: tokens drained per second; None = not known

        While nothing waits, a call of any number of tokens is let in, so that none is refused for ever.
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
    """Returns the time that this many tokens take to drain."""
    return 1.0 if not rate else min(_MOST_S, num_tokens / rate)


MAX_PRIORITY = 100  # and, below zero, the least


@dataclass(order=True, slots=True)
class _Entry:
    due_s: float
    number: int  # equal due times are served in order of arrival
    request_id: str = field(compare=False)
    num_tokens: int = field(compare=False)
    is_gone: bool = field(compare=False, default=False)


class WaitingLine:
    """A queue of request ids. num_tokens: of all, prompt and longest output;  head_start_s: of one step of priority"""

    def __init__(self, head_start_s: float):
        self.num_tokens = 0
        self._head_start_s = head_start_s
        self._heap: list[_Entry] = []  # with the entries that are gone, until they come up
        self._entries: dict[str, _Entry] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request_id: str, arrival_s: float, priority: int, num_tokens: int) -> None:
        """Adds a request. arrival_s: when it came first, also for a request that returns to the line"""
        due_s = arrival_s - priority * self._head_start_s
        entry = _Entry(due_s, next(self._numbers), request_id, num_tokens)
        self._entries[request_id] = entry
        self.num_tokens += num_tokens
        heapq.heappush(self._heap, entry)

    def first_due_s(self) -> float:
        """Returns the due time of the next request; infinity if none waits."""
        self._drop_gone()
        return self._heap[0].due_s if self._heap else float("inf")

    def pop(self) -> str:
        """Removes the next request, and returns its id. The line must not be empty."""
        self._drop_gone()
        request_id = self._heap[0].request_id
        self.remove(request_id)
        return request_id

    def remove(self, request_id: str) -> None:
        """Removes a request, wherever it stands. Ignores unknown ids."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        entry.is_gone = True
        self.num_tokens -= entry.num_tokens
        if len(self._heap) > 2 * len(self._entries) + 64:  # memory stays within twice what waits
            self._heap = [entry for entry in self._heap if not entry.is_gone]
            heapq.heapify(self._heap)

    def _drop_gone(self) -> None:
        while self._heap and self._heap[0].is_gone:
            heapq.heappop(self._heap)


class WaitingLines:
    """One line for each rank that callers have chosen, and one (None) for requests that any rank may serve.

    head_start_s: as in WaitingLine
    """

    def __init__(self, head_start_s: float):
        self._head_start_s = head_start_s
        self._lines: dict[int | None, WaitingLine] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens of the requests that wait: of their prompts and longest outputs."""
        return sum(line.num_tokens for line in self._lines.values())

    def push(self, rank: int | None, request_id: str, arrival_s: float, priority: int, num_tokens: int) -> None:
        """Adds a request to the line of a rank, or of any."""
        line = self._lines.setdefault(rank, WaitingLine(self._head_start_s))
        line.push(request_id, arrival_s, priority, num_tokens)

    def pop(self, has_space: Callable[[int | None], bool]) -> str | None:
        """Removes the next request whose rank has space, and returns its id; None if there is none."""
        lines = [line for rank, line in self._lines.items() if line and has_space(rank)]
        return min(lines, key=WaitingLine.first_due_s).pop() if lines else None

    def remove(self, rank: int | None, request_id: str) -> None:
        """Removes a request from the line of its rank. Ignores unknown ids."""
        if rank in self._lines:
            self._lines[rank].remove(request_id)

    def clear(self) -> None:
        """Forgets all requests."""
        self._lines.clear()


DEGRADED_HEADER = b"x-moe-serve-degraded"
STEPS = ("max_new_tokens", "min_priority", "max_samples")


class Degradation:
    """The configured steps. counts: number of calls that each has changed or refused"""

    def __init__(self, steps: Sequence[DegradeStep]):
        self.counts: Counter[str] = Counter(
            {name: 0 for step in steps for name in STEPS if getattr(step, name) is not None}
        )
        self._steps = steps

    def num_active(self, queue_share: float) -> int:
        """Returns how many steps are active. queue_share: as in Queue"""
        return sum(queue_share > step.above for step in self._steps)

    def apply(self, call: GenerateRequest, queue: Queue, named: list[str]) -> GenerateRequest:
        """Returns the call as it is served now; adds the steps that changed it to `named`. Raises QueueFullError."""
        active = self._steps[: self.num_active(queue.share)]
        for step in active:
            if step.min_priority is not None and call.priority < step.min_priority:
                self._name(named, "min_priority", step.min_priority)
                raise QueueFullError(
                    f"priority is {call.priority}, and while the server is busy calls below {step.min_priority} are "
                    "refused (server.degrade); try again later",
                    queue.seconds_until(step.above),
                )
            samples = max(prompt.params.num_samples for prompt in call.prompts)
            if step.max_samples is not None and samples > step.max_samples:
                self._name(named, "max_samples", step.max_samples)
                raise QueueFullError(
                    f"sampling_params.n is {samples}, and while the server is busy at most {step.max_samples} samples "
                    "are taken (server.degrade); ask for fewer, or try again later",
                    queue.seconds_until(step.above),
                )
        caps = [step.max_new_tokens for step in active if step.max_new_tokens is not None]
        return self._shorten(call, min(caps), named) if caps else call

    def _shorten(self, call: GenerateRequest, most: int, named: list[str]) -> GenerateRequest:
        """Caps the outputs of prompts that name no length."""
        prompts = tuple(_shortened(prompt, most) for prompt in call.prompts)
        if prompts == call.prompts:
            return call
        self._name(named, "max_new_tokens", most)
        return replace(call, prompts=prompts)

    def _name(self, named: list[str], step: str, value: int) -> None:
        self.counts[step] += 1
        named.append(f"{step}={value}")


def _shortened(prompt: Prompt, most: int) -> Prompt:
    params = prompt.params
    if prompt.explicit_length or params.max_new_tokens <= max(most, params.min_new_tokens):
        return prompt
    return replace(prompt, params=replace(params, max_new_tokens=max(most, params.min_new_tokens)))
