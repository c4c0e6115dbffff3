"""Requests that wait for a rank, in the order in which they will get one. Pure: time is an argument. Torch-free.

A priority is a head start: a request of priority p is served as if it had come p head starts earlier. So no request
starves: it is overtaken only by those of a higher priority that come soon enough after it, however many come.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_PRIORITY = 100  # and, below zero, the least


@dataclass(order=True, slots=True)
class _Entry:
    due_s: float
    number: int  # among equal ones, the first to come is the first to be served
    request_id: str = field(compare=False)
    num_tokens: int = field(compare=False)
    is_gone: bool = field(compare=False, default=False)


class WaitingLine:
    """Ids of requests. num_tokens: of all of them, prompt and longest output. head_start_s: of one step of priority"""

    def __init__(self, head_start_s: float):
        self.num_tokens = 0
        self._head_start_s = head_start_s
        self._heap: list[_Entry] = []  # with the entries that are gone, until they come up
        self._entries: dict[str, _Entry] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def push(self, request_id: str, arrival_s: float, priority: int, num_tokens: int) -> None:
        """Adds a request. arrival_s: when it came; one that comes back to the line keeps its time"""
        due_s = arrival_s - priority * self._head_start_s
        entry = _Entry(due_s, next(self._numbers), request_id, num_tokens)
        self._entries[request_id] = entry
        self.num_tokens += num_tokens
        heapq.heappush(self._heap, entry)

    def first_due_s(self) -> float:
        """Returns the due time of the next request, infinity where nobody waits."""
        self._drop_gone()
        return self._heap[0].due_s if self._heap else float("inf")

    def pop(self) -> str:
        """Returns the id of the next request, which leaves the line. The line is not empty."""
        self._drop_gone()
        request_id = self._heap[0].request_id
        self.remove(request_id)
        return request_id

    def remove(self, request_id: str) -> None:
        """Takes a request out of the line, wherever it stands. Unknown ids are ignored."""
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
    """One line for each rank that callers have chosen, and one for requests that any rank may serve (None).

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
        """Returns the id of the next request whose rank has space, which leaves its line; None where there is none."""
        lines = [line for rank, line in self._lines.items() if line and has_space(rank)]
        return min(lines, key=WaitingLine.first_due_s).pop() if lines else None

    def remove(self, rank: int | None, request_id: str) -> None:
        """Takes a request out of the line of its rank. Unknown ids are ignored."""
        if rank in self._lines:
            self._lines[rank].remove(request_id)

    def clear(self) -> None:
        """Forgets all requests."""
        self._lines.clear()
