"""Pages that ranks of other hosts keep in their tiers (pages.py), over a stream from the one that asks to each of them.

    reader    says how its pages are named and made      the server, whether its own are the same
    reader    asks for pages by their keys, in order     the server sends the record and the page of each, up to the
                                                         first that it does not have

The reader believes a page as it believes a file: by its record, which must be the one that it asked for, and by the
checksum (page_record). Where anything else comes, or nothing in time, it closes the stream, and with it goes whatever
was on its way. Both ends of a stream have proved to be ranks of one launch before it gets here.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from moe_serve.attention_dp.page_record import (
    HEADER_BYTES,
    DamagedPage,
    PageForm,
    decode_page,
    encode_header,
    head_of,
    library,
    magic_of,
)
from moe_serve.attention_dp.prefix_cache import KEY_BYTES
from moe_serve.log import RareWarnings, get_logger
from moe_serve.socket_bytes import end, receive, receive_into, send

MOST_ASKED = 1024  # keys of one question
_MAGIC = b"moekept1"
_NUMBER = struct.Struct("<I")
_YES, _NO = b"\1", b"\0"
_IDLE_S = 60.0  # after which a server closes the stream of a reader that asks nothing
_QUIET_S = 1.0  # an end that sends or takes nothing for so long is given up
_REST_S = 5.0  # for which a rank is not asked again after that
log = get_logger(__name__)


@dataclass(frozen=True)
class OtherHosts:
    """How a rank reaches those of other hosts, and what is known of the way.

    dial:    returns a new TCP connection with a rank that has proved to be of this launch. Raises OSError
    listen:  has a function called with each connection that such a rank has dialled, and the rank's number; once
    names:   on which the keys of all pages depend: model, weights, arithmetic
    page_s, delay_s: what a page takes on the way, and a question, as measured at the start; None: not known
    """

    dial: Callable[[int], socket.socket]
    listen: Callable[[Callable[[socket.socket, int], object]], object]
    names: bytes
    page_s: float | None = None
    delay_s: float = 0.0

    def hello(self, form: PageForm) -> bytes:
        """Returns what a reader says first: ranks that say the same find pages by the same keys."""
        made = head_of(magic_of(library()), form, bytes(KEY_BYTES))
        return _MAGIC + blake2b(made + self.names, digest_size=16).digest()


class PageServer:
    """Gives pages to ranks of other hosts, each in a thread of its own, until `close`."""

    def __init__(self, others: OtherHosts, form: PageForm, find: Callable[[bytes], Tensor | None]):
        """find: returns the page with a key, [page_bytes] uint8, or None; called from any thread"""
        self._hello, self._form, self._find = others.hello(form), form, find
        self._connected: dict[int, socket.socket] = {}  # by rank, of which the newest counts
        self._lock = threading.Lock()
        self._ends = False
        others.listen(self._take)

    def close(self) -> None:
        """Ends all streams, and takes no more."""
        with self._lock:
            self._ends = True
            for connected in self._connected.values():
                end(connected)

    def _take(self, connected: socket.socket, rank: int) -> None:
        with self._lock:
            if self._ends:
                connected.close()
                return
            if (earlier := self._connected.get(rank)) is not None:
                end(earlier)
            self._connected[rank] = connected
        try:
            name = f"pages for rank {rank}"
            threading.Thread(target=self._serve, args=(connected, rank), name=name, daemon=True).start()
        except RuntimeError:  # there are no threads left for now
            connected.close()

    def _serve(self, connected: socket.socket, rank: int) -> None:
        with connected, contextlib.suppress(OSError):
            _prepare(connected)
            is_same = receive(connected, len(self._hello)) == self._hello
            send(connected, _YES if is_same else _NO)
            while is_same and self._answer(connected):
                pass
        with self._lock:
            if self._connected.get(rank) is connected:
                del self._connected[rank]

    def _answer(self, connected: socket.socket) -> bool:
        """Answers one question. Returns False where the reader has ended instead. Raises OSError."""
        connected.settimeout(_IDLE_S)
        if not (asked := receive(connected, _NUMBER.size, may_end=True)):
            return False
        connected.settimeout(_QUIET_S)
        (num_keys,) = _NUMBER.unpack(asked)
        if num_keys > MOST_ASKED:
            raise OSError(f"it asks for {num_keys} pages")
        keys = receive(connected, num_keys * KEY_BYTES)
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            if (page := self._find(key)) is None:
                send(connected, _NO)
                break
            data = page.numpy().data
            send(connected, _YES + encode_header(key, self._form, data))
            send(connected, data)
        return True


@dataclass
class _Stream:
    """used_s: when it was made, or used last"""

    connected: socket.socket
    used_s: float


class PeerPages:
    """Reads pages from ranks of other hosts. Used by one thread, but for `close`."""

    def __init__(self, others: OtherHosts, form: PageForm):
        self._dial, self._hello, self._form = others.dial, others.hello(form), form
        self._streams: dict[int, _Stream] = {}  # by rank
        self._rests: dict[int, tuple[float, OSError | DamagedPage]] = {}  # by rank: until when, and why
        self._ends = False
        self._warnings = RareWarnings(log)

    def read(self, rank: int, keys: Sequence[bytes]) -> Generator[Tensor, None, None]:
        """Asks a rank for at most MOST_ASKED pages. Returns them as they come, each [page_bytes] uint8, up to the first
        that it does not have. Where the iteration is left before its end, the stream is closed.

        Call and iteration raise OSError where there is no connection, or nothing comes in time, and DamagedPage where a
        page is not what was asked for. For a while then further calls raise the same.
        """
        with self._noting_failure(rank):
            stream = self._stream_to(rank)
            send(stream.connected, _NUMBER.pack(len(keys)) + b"".join(keys))
        return self._pages(rank, stream, keys)

    def close(self) -> None:
        """Ends all streams; from any thread."""
        self._ends = True
        for stream in list(self._streams.values()):
            end(stream.connected)

    def _pages(self, rank: int, stream: _Stream, keys: Sequence[bytes]) -> Generator[Tensor, None, None]:
        is_whole = False
        try:
            with self._noting_failure(rank):
                for key in keys:
                    if receive(stream.connected, len(_NO)) == _NO:
                        break
                    record = memoryview(bytearray(HEADER_BYTES + self._form.num_bytes))
                    receive_into(stream.connected, record)
                    yield torch.frombuffer(decode_page(record, key, self._form), dtype=torch.uint8)
            is_whole, stream.used_s = True, time.monotonic()
        finally:
            if not is_whole:
                self._drop(rank)

    def _stream_to(self, rank: int) -> _Stream:
        now_s = time.monotonic()
        if (rest := self._rests.get(rank)) is not None and now_s < rest[0]:
            raise rest[1].with_traceback(None)
        stream = self._streams.get(rank)
        if stream is not None and now_s - stream.used_s < _IDLE_S / 2:  # later its other end may close it any time
            return stream
        self._drop(rank)
        connected = self._dial(rank)
        stream = self._streams[rank] = _Stream(connected, now_s)
        if self._ends:
            raise OSError("this rank ends")
        _prepare(connected)
        send(connected, self._hello)
        if receive(connected, len(_YES)) != _YES:
            raise DamagedPage("version")
        return stream

    @contextlib.contextmanager
    def _noting_failure(self, rank: int) -> Iterator[None]:
        """Closes the stream after a failure, and lets the rank rest."""
        try:
            yield
        except (OSError, DamagedPage) as error:
            self._drop(rank)
            until_s, _ = self._rests.get(rank, (0.0, error))
            if time.monotonic() >= until_s:
                self._rests[rank] = time.monotonic() + _REST_S, error
                self._warn(rank, error)
            raise

    def _warn(self, rank: int, error: OSError | DamagedPage) -> None:
        why: object = "a page is damaged"
        if isinstance(error, OSError):
            why = error.strerror or error
        elif error.reason == "version":
            why = (
                "it names pages otherwise, since files of the model differ there in name, size or time of change; copy "
                "them with their times (rsync -t)"
            )
        if not self._ends:
            self._warnings.warn(f"{rank}", "no pages come from rank %d, so they are computed: %s", rank, why)

    def _drop(self, rank: int) -> None:
        stream = self._streams.pop(rank, None)
        if stream is not None:
            stream.connected.close()


def _prepare(connected: socket.socket) -> None:
    connected.settimeout(_QUIET_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
