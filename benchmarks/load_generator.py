"""Sends requests over raw sockets from one thread and one epoll, so that the load takes little of the server's cores.

A client library, or asyncio's streams, would take more time for a request than the server does for a refusal.
"""

import contextlib
import select
import socket
import time
from collections import Counter, deque
from dataclasses import dataclass, field

HEALTH_PERIOD_S = 0.1
_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass
class Tally:
    """What one phase came to. Seconds until the whole answer, by status; requests for which no connection was free

    seconds: the phase took;  cpu_s: of this process;  late_s: by how much sending fell behind, at most
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    late_s: float = 0.0
    num_sent: int = 0
    num_without_connection: int = 0
    latencies: dict[int, list[float]] = field(default_factory=dict)
    health: list[float] = field(default_factory=list)

    def rate(self, status: int) -> float:
        """Answers with a status per second."""
        return len(self.latencies.get(status, ())) / self.seconds

    @property
    def statuses(self) -> Counter[int]:
        return Counter({status: len(found) for status, found in self.latencies.items()})


@dataclass
class _Open:
    """One connection. sent_s: when its request was sent; data: of the answer so far; length: of the whole answer"""

    socket: socket.socket
    is_health: bool = False
    sent_s: float = 0.0
    data: bytes = b""
    length: int = 0


class LoadGenerator:
    """Connections to one server, over which phases of load are sent."""

    def __init__(self, port: int, request: bytes, num_connections: int):
        self._port = port
        self._request = request
        self._epoll = select.epoll()
        self._open: dict[int, _Open] = {}
        self._idle: deque[_Open] = deque(self._connect(False) for _ in range(num_connections))
        self._health: _Open | None = self._connect(True)  # None while its answer is awaited

    def closed_loop(self, at_once: int, seconds: float, settle_s: float = 2.0) -> Tally:
        """Keeps so many requests open. settle_s: before the answers count"""
        return self._run(seconds, settle_s, 0.0, at_once)

    def open_loop(self, rate: float, seconds: float, settle_s: float = 2.0) -> Tally:
        """Sends so many requests per second, whatever comes back."""
        return self._run(seconds, settle_s, rate, 0)

    def close(self) -> None:
        for connection in self._open.values():
            connection.socket.close()
        self._epoll.close()

    def _run(self, seconds: float, settle_s: float, rate: float, at_once: int) -> Tally:
        tally = Tally()
        begin_s = next_s = next_health_s = time.monotonic()
        settled_s, cpu_s = begin_s + settle_s, time.process_time()
        settled = False
        while (now_s := time.monotonic()) < settled_s + seconds:
            if not settled and now_s >= settled_s:
                tally, settled, cpu_s = Tally(), True, time.process_time()
            if rate:
                while next_s <= now_s:
                    tally.late_s = max(tally.late_s, now_s - next_s)
                    next_s += 1 / rate
                    self._send_one(tally)
            else:
                while self._num_busy < at_once and self._idle:
                    self._send_one(tally)
            if next_health_s <= now_s and self._health is not None:
                next_health_s = now_s + HEALTH_PERIOD_S
                connection, self._health = self._health, None
                self._send(connection, _HEALTH)
            wait_s = min(next_s if rate else now_s + 1, max(next_health_s, now_s + 0.001)) - time.monotonic()
            self._take(max(0.0, wait_s), tally)
        tally.seconds, tally.cpu_s = seconds, time.process_time() - cpu_s
        ends_s = time.monotonic() + 120
        while (self._num_busy or self._health is None) and time.monotonic() < ends_s:  # the next phase begins empty
            self._take(0.1, Tally())
        assert not self._num_busy, f"{self._num_busy} requests had no answer within 120 s"
        return tally

    @property
    def _num_busy(self) -> int:
        return len(self._open) - 1 - len(self._idle)

    def _send_one(self, tally: Tally) -> None:
        if not self._idle:
            tally.num_without_connection += 1
            return
        tally.num_sent += 1
        self._send(self._idle.pop(), self._request)

    def _send(self, connection: _Open, request: bytes) -> None:
        connection.sent_s = time.monotonic()
        with contextlib.suppress(OSError):  # the reset shows when it is read
            connection.socket.send(request)

    def _take(self, wait_s: float, tally: Tally) -> None:
        """Reads answers, for so long at most."""
        for number, _ in self._epoll.poll(wait_s):
            connection = self._open[number]
            try:
                data = connection.socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._replace(connection, tally)
                continue
            connection.data += data
            if not connection.length:
                head, end, _ = connection.data.partition(b"\r\n\r\n")
                if not end:
                    continue
                size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                connection.length = len(head) + len(end) + int(size)
            if len(connection.data) >= connection.length:
                self._finish(connection, tally)

    def _finish(self, connection: _Open, tally: Tally) -> None:
        took_s = time.monotonic() - connection.sent_s
        status = int(connection.data[9:12])
        connection.data, connection.length = b"", 0
        if connection.is_health:
            tally.health.append(took_s)
            self._health = connection
        else:
            tally.latencies.setdefault(status, []).append(took_s)
            self._idle.append(connection)

    def _replace(self, connection: _Open, tally: Tally) -> None:
        """The server has closed a connection: counted as status 0 where an answer was due."""
        del self._open[connection.socket.fileno()]
        connection.socket.close()
        new = self._connect(connection.is_health)
        if connection.is_health:
            self._health = new
            return
        if connection in self._idle:
            self._idle.remove(connection)
        else:
            tally.latencies.setdefault(0, []).append(time.monotonic() - connection.sent_s)
        self._idle.append(new)

    def _connect(self, is_health: bool) -> _Open:
        connection = _Open(socket.create_connection(("127.0.0.1", self._port), timeout=30), is_health)
        connection.socket.setblocking(False)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._epoll.register(connection.socket.fileno(), select.EPOLLIN)
        self._open[connection.socket.fileno()] = connection
        return connection
