"""Where a host of decode ranks takes the pages that prefill ranks of other hosts send (page_stream).

The launcher listens, since it outlives the ranks of both. Each prefill rank has one connection, in a thread of its own:
who dials proves to be a rank of the prefill ranks' launch, and the newest process of a rank counts. Its pages go into
the copy of its memory, which the decode ranks have mapped.
"""

import socket
import threading
import time
from collections.abc import Sequence

from moe_serve.attention_dp.page_stream import PageMirror
from moe_serve.dispatch.hosts.handshake import PAGES, PAGES_TAKER, Party, key_of_launch
from moe_serve.errors import ReplacedError
from moe_serve.log import RareWarnings, get_logger
from moe_serve.socket_bytes import end

_MOST_UNPROVED = 64  # connections whose other ends have proved nothing yet: the oldest makes room for the next
_PAUSE_S = 0.05
log = get_logger(__name__)


class PageListener:
    """Listens until `close`."""

    def __init__(self, listener: socket.socket, descriptors: Sequence[int], token: str):
        """listener: is closed in the end;  descriptors: of the copies, by prefill rank;  token: of the system"""
        listener.setblocking(True)
        self._listener = listener
        self._own = listener.getsockname()[:2]
        self._launch_id = 0
        self._token = token
        self._warnings = RareWarnings(log)
        self._mirrors = [PageMirror(each) for each in descriptors]
        self._lock = threading.Lock()
        self._party: Party | None = None
        self._numbers: dict[int, int] = {}  # by rank, the newest process that has come
        self._connected: dict[int, socket.socket] = {}  # by rank, from which pages come
        self._unproved: dict[socket.socket, None] = {}  # the oldest first
        self._ends = False
        self._thread = threading.Thread(target=self._accept, name="pages of another host", daemon=True)
        self._thread.start()

    def begin(self, launch_id: int) -> None:
        """Takes connections of the ranks of this launch alone from now on."""
        if launch_id == self._launch_id:
            return
        with self._lock:
            self._launch_id = launch_id
            self._party = Party(PAGES_TAKER, 0, key_of_launch(self._token, launch_id), self._own)
            self._numbers.clear()
            for connected in self._connected.values():
                end(connected)

    def close(self) -> None:
        """Ends all connections."""
        self._ends = True
        end(self._listener)
        self._thread.join()
        self._listener.close()
        with self._lock:
            for connected in (*self._unproved, *self._connected.values()):
                end(connected)

    def _accept(self) -> None:
        while not self._ends:
            try:
                connected, (address, *_) = self._listener.accept()
            except OSError as error:  # it is closed, or there are no descriptors left for now
                if not self._ends:
                    self._warnings.warn("", "no prefill rank can connect to send pages: %s", error.strerror or error)
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                if len(self._unproved) >= _MOST_UNPROVED:
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    end(oldest)
                self._unproved[connected] = None
            try:
                threading.Thread(target=self._serve, args=(connected, address), name="pages", daemon=True).start()
            except RuntimeError as error:  # there are no threads left for now
                self._warnings.warn("", "no prefill rank can connect to send pages: %s", error)
                with self._lock:
                    self._unproved.pop(connected, None)
                connected.close()
                time.sleep(_PAUSE_S)

    def _serve(self, connected: socket.socket, address: str) -> None:
        with connected:
            rank = -1
            try:
                rank = self._welcome(connected)
                self._mirrors[rank].take(connected)
            except (OSError, ReplacedError) as error:
                who = f"prefill rank {rank} ({address})" if rank >= 0 else address
                if not self._ends:
                    why = getattr(error, "strerror", None) or error
                    self._warnings.warn(who, "no more pages come from %s: %s", who, why)
            finally:
                with self._lock:
                    self._unproved.pop(connected, None)
                    if self._connected.get(rank) is connected:
                        del self._connected[rank]

    def _welcome(self, connected: socket.socket) -> int:
        """Returns the prefill rank that has connected, in the place of an earlier connection. Raises OSError."""
        with self._lock:
            party = self._party
        if party is None:
            raise OSError("no prefill rank is started yet")
        visit = party.welcome(connected, self._newest, (PAGES,))
        if visit.problem:
            raise OSError(visit.problem)
        with self._lock:
            if self._party is not party or self._ends:
                raise OSError("its launch is over")
            self._numbers[visit.rank] = max(visit.number, self._numbers.get(visit.rank, 0))
            if (earlier := self._connected.get(visit.rank)) is not None:
                end(earlier)
            self._connected[visit.rank] = connected
            self._unproved.pop(connected, None)
        return visit.rank

    def _newest(self, rank: int) -> int | None:
        return self._numbers.get(rank, 0) if rank < len(self._mirrors) else None
