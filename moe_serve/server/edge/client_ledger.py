"""What clients have used, in memory that all front ends of a system share (server.api_workers). Torch-free.

A table of fixed size: a row for each client, found by a keyed hash within a set of 32 rows, where the longest idle one
makes room. A client's buckets are shared, and change under a lock that the kernel takes from a process that dies. What
is open is counted by each front end in a column of its own, which the launcher clears when that front end has ended.
One front end alone has the same table in memory of its own, without a lock.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Iterator

from moe_serve.errors import QueueFullError

NUM_ROWS = 16_384
_WAYS = 32  # the rows of a set
_CELL = 8  # bytes
_SECRET_CELLS = 2
_KEY_CELLS, _STATE_CELLS = 2, 5  # of a row: which client; level and time of two buckets, and when it was looked up
_USED_AT = 4
_MOST_WAIT_S = 0.05  # for the lock, which is held for microseconds
_HELD_S = 1.0  # after a wait for the lock was in vain, the next calls are refused without one for so long
_MOST_KNOWN = 4096


def memory_bytes(num_front_ends: int, num_rows: int = NUM_ROWS) -> int:
    """Returns the size of the memory."""
    return _CELL * (_SECRET_CELLS + num_rows * (_KEY_CELLS + _STATE_CELLS + 2 * num_front_ends))


def rows_for(max_connections: int) -> int:
    """Returns how many rows leave room for one busy client on each connection: a quarter of each set on average."""
    return max(NUM_ROWS, -(-4 * max_connections // _WAYS) * _WAYS)


class Ledger:
    """The table as one front end sees it.

    memory: of memory_bytes, zeros at first; None: memory of its own
    number: this front end's;  lock_fd: a descriptor of the memory, for its lock; None: nobody else writes
    """

    def __init__(
        self, memory: mmap.mmap | None = None, num_front_ends: int = 1, number: int = 0, lock_fd: int | None = None,
        num_rows: int = NUM_ROWS,
    ):  # fmt: skip
        assert num_rows % _WAYS == 0, "sets are whole"
        memory = memory or mmap.mmap(-1, memory_bytes(num_front_ends, num_rows))
        self.num_rows = num_rows
        self._num, self._number, self._lock_fd = num_front_ends, number, lock_fd
        self._held_until_s = 0.0
        view, at = memoryview(memory), 0
        parts: list[memoryview] = []
        for cells in (_SECRET_CELLS, _KEY_CELLS * num_rows, _STATE_CELLS * num_rows, *[num_front_ends * num_rows] * 2):
            parts.append(view[at : at + _CELL * cells])
            at += _CELL * cells
        self._secret, self._keys = parts[0], parts[1].cast("Q")
        self.state = parts[2].cast("d")
        self._open, self._calls = parts[3].cast("q"), parts[4].cast("q")
        self._known: dict[str, tuple[int, int, int]] = {}  # key and row of clients that were looked up lately

    @classmethod
    def shared(cls, fd: int, num_front_ends: int, number: int) -> "Ledger":
        """Returns the table over the memory that the launcher has made. fd: its descriptor, from `shared_memory`"""
        size = os.fstat(fd).st_size
        rows = (size // _CELL - _SECRET_CELLS) // (_KEY_CELLS + _STATE_CELLS + 2 * num_front_ends)
        return cls(mmap.mmap(fd, size), num_front_ends, number, fd, rows)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the shared parts in the block. Raises QueueFullError where a stopped process has it."""
        if self._lock_fd is None:
            yield
            return
        self._lock(self._lock_fd)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)

    def _lock(self, fd: int) -> None:
        now_s = time.monotonic()
        gives_up_s = now_s + (_MOST_WAIT_S if now_s >= self._held_until_s else 0.0)
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= gives_up_s:
                    self._held_until_s = time.monotonic() + _HELD_S
                    raise QueueFullError(
                        "another front end holds the counts of clients' limits, and is stopped, perhaps; end that "
                        "process, or try again later"
                    ) from None
                time.sleep(0.0002)
            else:
                return

    def find(self, name: str, now_s: float) -> tuple[int, bool]:
        """Returns the row of a client, and whether it is new there. Under the lock.

        Raises QueueFullError where all rows of its set have open calls.
        """
        high, low, row = self._known.get(name) or (*self._key(name), -1)
        if row < 0 or not self._is_at(row, high, low):
            first = high % (self.num_rows // _WAYS) * _WAYS
            ways = range(first, first + _WAYS)
            row = next((each for each in ways if self._is_at(each, high, low)), -1)
        is_new = row < 0
        if is_new:
            idle = [each for each in ways if not self.num_calls(each)]
            if not idle:
                raise QueueFullError(f"{_WAYS} clients have open calls where this one is counted; try again later")
            row = min(idle, key=self._age)
            self._keys[_KEY_CELLS * row + 1], self._keys[_KEY_CELLS * row] = low, high
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[name] = high, low, row
        self.state[_STATE_CELLS * row + _USED_AT] = now_s
        return row, is_new

    def _key(self, name: str) -> tuple[int, int]:
        """Returns a client's key, not zero: by a secret, so that nobody can choose clients of one set."""
        if not any(self._secret):
            self._secret[:] = os.urandom(_CELL * _SECRET_CELLS)
        digest = hashlib.blake2b(name.encode(), digest_size=16, key=bytes(self._secret)).digest()
        return int.from_bytes(digest[:8], "little") | 1 << 63, int.from_bytes(digest[8:], "little")

    def _is_at(self, row: int, high: int, low: int) -> bool:
        return self._keys[_KEY_CELLS * row] == high and self._keys[_KEY_CELLS * row + 1] == low

    def _age(self, row: int) -> float:
        """Returns when a row was last looked up; an empty one comes first."""
        return self.state[_STATE_CELLS * row + _USED_AT] if self._keys[_KEY_CELLS * row] else -1.0

    def buckets_of(self, row: int) -> tuple[int, int]:
        """Returns where the two buckets of a row lie in `state`: level and time each."""
        return _STATE_CELLS * row, _STATE_CELLS * row + 2

    def num_open(self, row: int) -> int:
        """Returns how many requests of a client are open at all front ends."""
        return sum(self._open[front_end * self.num_rows + row] for front_end in range(self._num))

    def num_calls(self, row: int) -> int:
        """Returns how many calls of a client are open at all front ends."""
        return sum(self._calls[front_end * self.num_rows + row] for front_end in range(self._num))

    def add(self, row: int, num_open: int = 0, num_calls: int = 0) -> None:
        """Changes what is open at this front end: its own column, which needs no lock."""
        at = self._number * self.num_rows + row
        self._open[at] += num_open
        self._calls[at] += num_calls

    def forget(self, number: int) -> None:
        """Clears what was open at a front end that has ended. What its calls took comes back with time."""
        own = slice(number * self.num_rows, (number + 1) * self.num_rows)
        for column in (self._open, self._calls):
            column[own] = memoryview(bytes(_CELL * self.num_rows)).cast("q")


def shared_memory(num_front_ends: int, max_connections: int) -> int:
    """Returns the descriptor of new memory for a table that all front ends share; the caller closes it."""
    fd = os.memfd_create("moe_serve_clients")
    os.ftruncate(fd, memory_bytes(num_front_ends, rows_for(max_connections)))
    os.write(fd, os.urandom(_CELL * _SECRET_CELLS))
    return fd
