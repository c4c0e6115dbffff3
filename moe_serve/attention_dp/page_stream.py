"""The streams by which pages of a prefill rank reach the hosts of decode ranks, where these are others.

The prefill rank writes into its memory (page_ring) and waits for nobody. For each decode host, a thread sends what that
host is to have of it, slot for slot, into the copy of that memory there, where decode ranks look for records as on one
host: what they believe does not depend on the way here. A connection that ends is made again, and goes on behind the
last page that has come. What was written over meanwhile, or is for other hosts, is left out.

    begin:  magic, slots, bytes of a page, a random number of the sender    and back: magic, pages that have come
    then:   pages that were written before, number, so many records, so many pages; none as a sign of life
"""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

import numpy as np

from moe_serve.attention_dp.page_ring import RECORD_BYTES, PageRing
from moe_serve.errors import ConfigError, ReplacedError
from moe_serve.log import RareWarnings, get_logger
from moe_serve.socket_bytes import end, receive, receive_into, send

_MAGIC = b"moeflow1"
_BEGIN, _ANSWER, _HEAD = struct.Struct("<8sQQQ"), struct.Struct("<8sQ"), struct.Struct("<QI")
_MOST_PAGES = 16  # of a part
_LIFE_S = 1.0  # between two signs of life
QUIET_S = 10.0  # an end that takes or sends nothing for so long is given up
_REDIAL_S = 0.5
_END_S = 1.0  # for which the end of a rank waits for a stream
log = get_logger(__name__)


class PageStream:
    """The sending end, on a prefill rank."""

    def __init__(self, ring: PageRing, dial: Callable[[], socket.socket], address: str):
        """ring: of this rank, of which nothing is written yet;  address: of the other host, for messages

        dial: returns a connection that both ends trust; raises OSError, or ReplacedError where it is of no use to try
        again
        """
        self._ring, self._dial, self._address = ring, dial, address
        self._number = secrets.randbits(64)
        self._num_written = 0
        self._is_for_it = np.zeros(ring.num_slots, dtype=np.bool_)  # by slot
        self._changed = threading.Condition()
        self._ends = False
        self._connected: socket.socket | None = None
        self._warnings = RareWarnings(log)
        self._thread = threading.Thread(target=self._run, name=f"pages for {address}", daemon=True)
        self._thread.start()

    def wrote(self, count: int, is_for_it: bool) -> None:
        """Notes that so many pages more lie in the memory, whole, in slots that follow each other.

        is_for_it: whether the other host is to have them
        """
        with self._changed:
            slot = self._num_written % self._ring.num_slots
            self._is_for_it[slot : slot + count] = is_for_it
            self._num_written += count
            self._changed.notify_all()

    def end(self) -> None:
        """Ends the connection, and has the thread end."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            if self._connected is not None:
                end(self._connected)

    def join(self) -> None:
        """Waits a moment for the thread, which may be in a dial yet: nothing then comes of that."""
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._ends:
            try:
                connected = self._dial()
                with connected:
                    connected.settimeout(QUIET_S)
                    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    with self._changed:
                        if self._ends:
                            return
                        self._connected = connected
                    self._send_all(connected)
            except OSError as error:
                if not self._ends:
                    why = error.strerror or error
                    self._warnings.warn(
                        "pages", "no pages reach the decode host at %s, which computes them: %s", self._address, why
                    )
            except ReplacedError as error:
                log.warning("%s", error)
                return
            with self._changed:
                self._connected = None
                self._changed.wait_for(lambda: self._ends, _REDIAL_S)

    def _send_all(self, connected: socket.socket) -> None:
        """Sends pages as they are written. Raises OSError when the connection ends."""
        ring = self._ring
        send(connected, _BEGIN.pack(_MAGIC, ring.num_slots, ring.pages.shape[1], self._number))
        magic, num_sent = _ANSWER.unpack(receive(connected, _ANSWER.size))
        if magic != _MAGIC or num_sent > self._num_written:
            raise OSError("another program takes them")
        while True:
            num_written = self._wait_for_more(num_sent)
            if self._ends:
                return
            oldest = max(num_sent, num_written - ring.num_slots)
            slot = oldest % ring.num_slots
            count = min(num_written - oldest, _MOST_PAGES, ring.num_slots - slot)
            is_for_it = self._is_for_it[slot : slot + count].copy()
            if count and not is_for_it[0]:  # says how far it is, since the other end counts on that
                oldest += int(is_for_it.argmax()) if is_for_it.any() else count
                count = 0
            elif not is_for_it.all():
                count = int(is_for_it.argmin())
            records, pages = ring.records[slot : slot + count], ring.pages[slot : slot + count]
            send(connected, _HEAD.pack(oldest, count) + records.tobytes())
            send(connected, pages.reshape(-1).data)
            num_sent = oldest + count

    def _wait_for_more(self, num_sent: int) -> int:
        """Returns how many pages are written, once there are more than this, or it is time for a sign of life."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends or self._num_written > num_sent, _LIFE_S)
            return self._num_written


class PageMirror:
    """The receiving end: the copy of a prefill rank's memory on the host of the decode ranks."""

    def __init__(self, descriptor: int):
        """descriptor: of the copy"""
        self._descriptor = descriptor
        self._ring: PageRing | None = None
        self._number: int | None = None  # of the sender whose pages these are
        self._num_received = 0
        self._alone = threading.Lock()

    def take(self, connected: socket.socket) -> None:
        """Takes pages until the connection ends, and closes it; waits for an earlier call to return first.

        Raises OSError where it does not end as it should. Pages that have not come whole have no record.
        """
        with self._alone, connected:
            connected.settimeout(QUIET_S)
            magic, num_slots, page_bytes, number = _BEGIN.unpack(receive(connected, _BEGIN.size))
            ring = self._ring_for(page_bytes)
            if magic != _MAGIC or ring is None or ring.num_slots != num_slots:
                raise OSError(f"it sends {num_slots} slots of {page_bytes} bytes, which is not what lies here")
            if number != self._number:
                ring.records[:] = 0  # of the process before
                self._number, self._num_received = number, 0
            send(connected, _ANSWER.pack(_MAGIC, self._num_received))
            ring.connected[0] = 1
            try:
                while self._take_part(connected, ring):
                    pass
            finally:
                ring.connected[0] = 0

    def _ring_for(self, page_bytes: int) -> PageRing | None:
        if self._ring is None or self._ring.pages.shape[1] != page_bytes:
            size = os.fstat(self._descriptor).st_size
            if not 0 < page_bytes < size:
                return None
            try:
                self._ring, self._number = PageRing(self._descriptor, page_bytes, writes=True), None
            except ConfigError:
                return None
        return self._ring

    def _take_part(self, connected: socket.socket, ring: PageRing) -> bool:
        """Takes some pages; returns False where the connection has ended before them."""
        head = receive(connected, _HEAD.size, may_end=True)
        if not head:
            return False
        first, count = _HEAD.unpack(head)
        slot = first % ring.num_slots
        if count > _MOST_PAGES or slot + count > ring.num_slots:
            raise OSError(f"it sends slots {slot} to {slot + count} of {ring.num_slots}")
        records = receive(connected, count * RECORD_BYTES)
        slots = slice(slot, slot + count)
        ring.records[slots] = 0
        receive_into(connected, ring.pages[slots].reshape(-1).data)
        ring.records[slots].reshape(-1).data[:] = records
        self._num_received = first + count
        ring.num_sent += count
        return True
