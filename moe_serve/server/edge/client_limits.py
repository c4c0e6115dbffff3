"""Limits of one client: requests and tokens per minute, and requests at a time.

A client is an API key (keys of one name are one client), or an address if the server has no keys. Limits count work of
the ranks: a prompt with `n: 4` is four requests, each with the tokens of the prompt and of the longest output; unused
tokens are given back at the end. Every call counts as at least one request, unless a limit or a full queue refuses it
before its body is read. Time is an argument.

Limits hold for all front ends of a host together, and for each host apart. They share a `Ledger` in memory, a table of
fixed size. Each client has a row, found by a keyed hash within a set of 32 rows; the row that was idle longest is
reused. Buckets change under a lock, which the kernel releases if its holder dies. Each front end counts open requests
and calls in its own column, which the launcher clears when that front end has ended. A single front end has a table of
its own, without a lock.

A share of each limit per front end (limit / server.api_workers) needs no ledger, but gives other limits: a connection
stays at the front end that accepted it, so a client with one connection would get 1/N of its requests; with N = 4 and
`tpm_limit: 8000` a call of 3,000 tokens would never be served; and `max_parallel_requests: 1` has no share, since each
front end would allow one.
"""

import contextlib
import fcntl
import functools
import hashlib
import ipaddress
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Self

from moe_serve.config import ServerConfig
from moe_serve.errors import QueueFullError, RateLimitError, RequestError

_MINUTE_S = 60.0
_PARALLEL_RETRY_S = 1.0  # a guess: only the client knows when one of its own requests ends


@dataclass(frozen=True)
class ClientLimits:
    """Under LiteLLM's names; None: no limit."""

    rpm_limit: int | None = None
    tpm_limit: int | None = None
    max_parallel_requests: int | None = None

    @classmethod
    def of(cls, server: ServerConfig) -> Self:
        """Returns the limits of clients without limits of their own."""
        return cls(server.rpm_limit, server.tpm_limit, server.max_parallel_requests)

    @property
    def exist(self) -> bool:
        return any(getattr(self, name) is not None for name in LIMIT_NAMES)


LIMIT_NAMES = tuple(field.name for field in fields(ClientLimits))


@dataclass(frozen=True)
class Client:
    """Who asks. kind: "key", "admin key" or "address"; name: of its key, or its address

    cache_scope: clients of different scopes share no cached prefix; "": addresses, and keys that share with them
    """

    kind: str
    name: str
    limits: ClientLimits
    cache_scope: str = field(default="", repr=False)

    @classmethod
    def at(cls, address: str, limits: ClientLimits) -> Self:
        """Returns the client at an address. Of IPv6 the first 64 bits count: a client may choose the others."""
        return cls("address", _network(address), limits)

    def cache_salt(self, own: str) -> str:
        """Returns the salt of its requests: its scope, then the salt that the client has chosen.

        A scope has a fixed length and comes first, so no salt of a client reaches another client's scope.
        """
        return f"{self.cache_scope}\0{own}" if self.cache_scope else own

    def __str__(self) -> str:
        return f"the {self.kind} {self.name}"


@functools.lru_cache(maxsize=1024)  # the same few addresses come with every request
def _network(address: str) -> str:
    """Returns an address of IPv4, or the network of one of IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


class Bucket:
    """A minute's worth of requests or tokens, refilled evenly.

    state: of all buckets; holds the level at `at`, and the time of that level at `at` + 1
    """

    __slots__ = ("_at", "_state", "limit")

    def __init__(self, limit: int, state: "memoryview[float]", at: int):
        self.limit = limit
        self._state = state
        self._at = at

    def fill(self, now_s: float) -> None:
        """Fills a new bucket."""
        self._state[self._at], self._state[self._at + 1] = float(self.limit), now_s

    def level(self, now_s: float) -> float:
        """Returns the level. Another front end may have changed it a moment after now_s."""
        elapsed_s = max(0.0, now_s - self._state[self._at + 1])
        return min(self.limit, self._state[self._at] + elapsed_s * self.limit / _MINUTE_S)

    def take(self, amount: float, now_s: float) -> None:
        """Takes an amount; a negative one is given back."""
        self._state[self._at] = min(self.limit, self.level(now_s) - amount)
        self._state[self._at + 1] = max(now_s, self._state[self._at + 1])

    def wait_s(self, amount: float, now_s: float) -> float:
        """Returns the time until the level reaches an amount."""
        return max(0.0, amount - self.level(now_s)) * _MINUTE_S / self.limit


class Excess(NamedTuple):
    """limit: its name;  what: words for what the client has and asks for;  wait_s: until there is enough"""

    limit: str
    what: str
    wait_s: float


class _Account:
    """What one client has used: a row of the ledger."""

    __slots__ = ("_ledger", "client", "requests", "row", "tokens")

    def __init__(self, client: Client, ledger: "Ledger", now_s: float):
        """Raises QueueFullError where the ledger has no room. Under its lock."""
        limits = client.limits
        self.client = client
        self._ledger = ledger
        self.row, is_new = ledger.find(str(client), now_s)
        requests_at, tokens_at = ledger.buckets_of(self.row)
        self.requests = None if limits.rpm_limit is None else Bucket(limits.rpm_limit, ledger.state, requests_at)
        self.tokens = None if limits.tpm_limit is None else Bucket(limits.tpm_limit, ledger.state, tokens_at)
        for bucket in (self.requests, self.tokens) if is_new else ():
            if bucket is not None:
                bucket.fill(now_s)

    @property
    def num_open(self) -> int:
        """Requests, at least one for each call."""
        return self._ledger.num_open(self.row)

    def excess(self, num_requests: int, num_tokens: int, now_s: float) -> Excess | None:
        """Returns the limit that refuses so much more; None if none does."""
        limits = self.client.limits
        most = limits.max_parallel_requests
        if most is not None and (num_open := self.num_open) + num_requests > most:
            what = f"has {num_open} requests open and asks for {num_requests} more, of at most {most}"
            return Excess("max_parallel_requests", what, _PARALLEL_RETRY_S)
        for name, bucket, asked in (
            ("rpm_limit", self.requests, num_requests),
            ("tpm_limit", self.tokens, num_tokens),
        ):
            if bucket is not None and bucket.level(now_s) < asked:
                word, left = "requests" if name == "rpm_limit" else "tokens", max(0, int(bucket.level(now_s)))
                what = f"has {left} {word} left and asks for {asked} more, of {bucket.limit} per minute"
                return Excess(name, what, bucket.wait_s(asked, now_s))
        return None

    def take(self, num_requests: int, num_tokens: int, now_s: float) -> None:
        self._ledger.add(self.row, num_open=num_requests)
        if self.requests is not None:
            self.requests.take(num_requests, now_s)
        if self.tokens is not None:
            self.tokens.take(num_tokens, now_s)

    def give_back_tokens(self, num_tokens: int, now_s: float) -> None:
        if self.tokens is not None:
            self.tokens.take(-num_tokens, now_s)


class Permit:
    """One call of a client, from before its body is read until it has been answered."""

    def __init__(self, table: "ClientTable", account: _Account):
        self._table = table
        self._account = account
        self._num_requests = 0  # that count as open
        self._num_tokens = 0  # taken, and not yet known to be used

    def enter(self, now_s: float) -> None:
        """Takes the one request that every call counts as. Raises RateLimitError if a limit refuses it."""
        self._take(1, 1, now_s)
        with self._table.ledger.locked():
            self._account.give_back_tokens(1, now_s)  # its body will say how many it asks for

    def take(self, num_requests: int, num_tokens: int, now_s: float) -> None:
        """Takes what the call asks for. Raises RateLimitError if that is too much now, RequestError if it always is."""
        limits = self._account.client.limits
        for name, asked in zip(LIMIT_NAMES, (num_requests, num_tokens, num_requests), strict=True):
            limit = getattr(limits, name)
            if limit is not None and asked > limit:
                what = "tokens (of prompts and longest outputs)" if name == "tpm_limit" else "outputs"
                raise RequestError(f"the call asks for {asked} {what}, but {_setting(name)} is {limit}; ask for less")
        self._take(num_requests - 1, num_tokens, now_s)
        self._num_tokens = num_tokens

    def use(self, num_tokens: int) -> None:
        """Notes tokens that the call has used; when it leaves, it gives back the others that it took."""
        self._num_tokens -= num_tokens

    def leave(self, now_s: float) -> None:
        """Ends the call, after its answer or when its client has left."""
        ledger = self._table.ledger
        if self._num_tokens:
            with contextlib.suppress(QueueFullError), ledger.locked():  # else they come back with time
                self._account.give_back_tokens(self._num_tokens, now_s)
        ledger.add(self._account.row, -self._num_requests, -1)

    def headers(self, now_s: float) -> Iterator[tuple[bytes, bytes]]:
        """Yields what the client has left, in OpenAI's headers."""
        for word, bucket in (("requests", self._account.requests), ("tokens", self._account.tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{word}".encode(), str(bucket.limit).encode()
                yield f"x-ratelimit-remaining-{word}".encode(), str(max(0, int(bucket.level(now_s)))).encode()
                yield f"x-ratelimit-reset-{word}".encode(), _duration(bucket.wait_s(bucket.limit, now_s)).encode()

    def refusal(self, now_s: float, num_requests: int = 1, num_tokens: int = 1) -> RateLimitError | None:
        """Returns the refusal of so much, and counts it; None if the client may ask for it."""
        excess = self._account.excess(num_requests, num_tokens, now_s)
        if excess is None:
            return None
        self._table.refused[excess.limit] += 1
        what = f"{self._account.client} {excess.what} ({_setting(excess.limit)})"
        return RateLimitError(f"{what}; try again in {_duration(excess.wait_s)}", excess.wait_s)

    def _take(self, num_requests: int, num_tokens: int, now_s: float) -> None:
        with self._table.ledger.locked():
            if (refusal := self.refusal(now_s, num_requests, num_tokens)) is not None:
                raise refusal
            self._account.take(num_requests, num_tokens, now_s)
        self._num_requests += num_requests


class ClientTable:
    """The limits of all clients at this front end. refused: number of calls, by the limit that refused them"""

    def __init__(self, ledger: "Ledger | None" = None) -> None:
        """ledger: shared by all front ends; None: this is the only one"""
        self.refused: Counter[str] = Counter()
        self.ledger = ledger if ledger is not None else Ledger()

    def permit(self, client: Client, now_s: float) -> Permit:
        """Returns a permit for one call, which may enter and must leave.

        Raises QueueFullError if the client's row cannot be read now.
        """
        with self.ledger.locked():
            account = _Account(client, self.ledger, now_s)
            self.ledger.add(account.row, num_calls=1)
        return Permit(self, account)


def _setting(limit: str) -> str:
    return f"server.{limit}, or {limit} of its key"


def _duration(seconds: float) -> str:
    """Returns seconds as OpenAI's headers have them: "20ms", "1.5s", "1m0s"."""
    if seconds < 1:
        return f"{round(1e3 * seconds)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    return f"{int(seconds // 60)}m{int(seconds % 60)}s"


NUM_ROWS = 16_384
_WAYS = 32  # the rows of a set
_CELL = 8  # bytes
_SECRET_CELLS = 2
_KEY_CELLS, _STATE_CELLS = 2, 5  # of a row: the client; level and time of two buckets, and the time of last use
_USED_AT = 4
_MOST_WAIT_S = 0.05  # for the lock, which is held for microseconds
_HELD_S = 1.0  # after a wait for the lock has failed, calls are refused without waiting for so long
_MOST_KNOWN = 4096


def memory_bytes(num_front_ends: int, num_rows: int = NUM_ROWS) -> int:
    """Returns the size of the memory."""
    return _CELL * (_SECRET_CELLS + num_rows * (_KEY_CELLS + _STATE_CELLS + 2 * num_front_ends))


def rows_for(max_connections: int) -> int:
    """Returns a number of rows of which one busy client on each connection fills a quarter."""
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
        """Returns the row of a client, and whether it is new. The caller holds the lock.

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
        """Returns a client's key, which is not zero. A secret keeps others from filling one set on purpose."""
        if not any(self._secret):
            self._secret[:] = os.urandom(_CELL * _SECRET_CELLS)
        digest = hashlib.blake2b(name.encode(), digest_size=16, key=bytes(self._secret)).digest()
        return int.from_bytes(digest[:8], "little") | 1 << 63, int.from_bytes(digest[8:], "little")

    def _is_at(self, row: int, high: int, low: int) -> bool:
        return self._keys[_KEY_CELLS * row] == high and self._keys[_KEY_CELLS * row + 1] == low

    def _age(self, row: int) -> float:
        """Returns the time at which a row was last used; less for an empty row."""
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
        """Changes the counts in this front end's own column, which needs no lock."""
        at = self._number * self.num_rows + row
        self._open[at] += num_open
        self._calls[at] += num_calls

    def forget(self, number: int) -> None:
        """Clears the counts of a front end that has ended. Its buckets refill with time."""
        own = slice(number * self.num_rows, (number + 1) * self.num_rows)
        for column in (self._open, self._calls):
            column[own] = memoryview(bytes(_CELL * self.num_rows)).cast("q")


def shared_memory(num_front_ends: int, max_connections: int) -> int:
    """Returns the descriptor of new memory for a table that all front ends share; the caller closes it."""
    fd = os.memfd_create("moe_serve_clients")
    os.ftruncate(fd, memory_bytes(num_front_ends, rows_for(max_connections)))
    os.write(fd, os.urandom(_CELL * _SECRET_CELLS))
    return fd
