"""Tiers below a rank's KV cache: pages in memory beside the pool, and in files that outlive the process.

A *page* is what one block holds, of all layers. Its key is that of the prefix cache, a hash of all tokens up to its
end, seeded with the model, its weights and the arithmetic: whoever finds a page by the key that it needs, and finds its
checksum right, has the very values that it would compute. So a page that is late, lost or damaged is computed again.

A thread reads and writes files, and the step loop waits for none:

    down    when no request holds a published block any more, its page is copied; by the step loop where the block is to
            be written before the thread has come to it
    up      a prefill that has begun asks for the pages that follow what the pool holds; it waits for them while they
            come, and takes a bounded number of bytes in each step

Files: a header, then the page. Ranks of one host share a folder, and so its pages and its quota.
"""

import contextlib
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.prefix_cache import KEY_BYTES
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger
from moe_serve.process_facts import is_private

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sIQI")  # magic, key, layers, bytes of the page, their CRC-32
_MAGIC = b"moekv\0\0\1"  # its last byte is the version of the format
_SUFFIX = ".page"
_FETCHED_BYTES = 256 << 20  # of pages that have been read and not taken yet, over all requests
_QUEUED_PAGES = 16384  # blocks to be copied down; more are left out
_COPIED_BYTES = 256 << 20  # of pages that were copied since their blocks are written, and wait for the thread
_PATIENCE_S = 1.0  # for which a prefill waits for its next page
_WRITTEN_S = 60.0  # after which a file that is not finished never will be
_CLOSE_S = 10.0  # for which a rank that ends waits for its last files
log = get_logger(__name__)


class DamagedPage(Exception):
    """A page that is not what its reader asked for. reason: "version" or "checksum", as in the metrics"""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def encode_header(key: bytes, num_layers: int, page: memoryview) -> bytes:
    """Returns the header of a page. The checksum is zlib's CRC-32, which every Python has."""
    return _HEADER.pack(_MAGIC, key, num_layers, page.nbytes, zlib.crc32(page))


def decode_page(record: memoryview, key: bytes, num_layers: int, page_bytes: int) -> memoryview:
    """Returns the page in a record. Raises DamagedPage unless it is the whole page with this key and form."""
    if record.nbytes < _HEADER.size:
        raise DamagedPage("checksum")
    magic, found, layers, size, checksum = _HEADER.unpack_from(record)
    if (magic, found, layers, size) != (_MAGIC, key, num_layers, page_bytes):
        raise DamagedPage("version")
    page = record[_HEADER.size :]
    if page.nbytes != size or zlib.crc32(page) != checksum:
        raise DamagedPage("checksum")
    return page


class PageFolder:
    """Files of pages in a folder of a model, within a quota for all models of the path. Used by one thread."""

    def __init__(self, path: Path, identity: bytes, quota_bytes: int):
        """identity: of model, weights and arithmetic: it names the folder, since other pages can never be found

        Raises ConfigError where the path cannot be written, or others can write to it.
        """
        self.path, self.quota_bytes = path, quota_bytes
        self.folder = path / blake2b(identity, digest_size=8).hexdigest()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(path.stat()):
                raise ConfigError(
                    f"cache.path {path} belongs to another user, or others can write to it; chmod go-w it, or name "
                    "another folder"
                )
            self.folder.mkdir(mode=0o700, exist_ok=True)
            probe = self.folder / f"probe-{os.getpid()}"
            probe.write_bytes(b"1")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"cache.path {path} cannot be written ({error.strerror}); name a folder that can, or leave out "
                "cache.disk_gb"
            ) from None
        for part in self.folder.glob("*.[0-9]*"):  # of ranks that were killed while they wrote
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _WRITTEN_S:
                    part.unlink()
        self._used = self._shrink()

    def has(self, key: bytes) -> bool:
        """Returns whether there is a file for this page, which may be damaged."""
        return self._file(key).exists()

    def write(self, key: bytes, num_layers: int, page: memoryview) -> None:
        """Writes a page, whole or not at all. Raises OSError. The oldest files make room where the quota is used up."""
        target = self._file(key)
        part = target.with_suffix(f".{os.getpid()}")
        try:
            with open(part, "wb", opener=_private) as file:
                file.write(encode_header(key, num_layers, page))
                file.write(page)
            part.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._used += _HEADER.size + page.nbytes
        if self._used > self.quota_bytes:
            self._used = self._shrink()

    def read(self, key: bytes, num_layers: int, page_bytes: int) -> memoryview | None:
        """Returns a page; None: there is none. Raises DamagedPage, having removed the file, or OSError."""
        file = self._file(key)
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as opened:
            size = os.fstat(descriptor).st_size
            record = bytearray(min(size, _HEADER.size + page_bytes + 1))
            num_read = opened.readinto(record) or 0
        try:
            page = decode_page(memoryview(record)[:num_read], key, num_layers, page_bytes)
        except DamagedPage:
            file.unlink(missing_ok=True)
            raise
        with contextlib.suppress(OSError):
            os.utime(file)  # the files that are oldest by this time make room first
        return page

    def clear(self) -> None:
        """Removes all pages of this model."""
        for file in self.folder.glob("*" + _SUFFIX):
            file.unlink(missing_ok=True)
        self._used = self._shrink()

    def _file(self, key: bytes) -> Path:
        return self.folder / (key.hex() + _SUFFIX)

    def _shrink(self) -> int:
        """Removes the oldest files beyond the quota, those of other models too; returns the bytes that are left."""
        files = []
        for file in self.path.glob("*/*" + _SUFFIX):
            with contextlib.suppress(OSError):  # another rank has removed it
                facts = file.stat()
                files.append((facts.st_mtime_ns, facts.st_size, file))
        used = sum(size for _, size, _ in files)
        if used > self.quota_bytes:
            for _, size, file in sorted(files):
                file.unlink(missing_ok=True)
                used -= size
                if used <= 0.9 * self.quota_bytes:
                    break
        return used


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@dataclass
class Fetch:
    """Pages that a prefill waits for. Its thread appends to `pages`, the step loop takes from their begin.

    keys: of the pages that it would take, in order;  done: no more will come
    """

    keys: Sequence[bytes]
    pages: "deque[Tensor]" = field(default_factory=deque)
    num_read: int = 0
    num_taken: int = 0
    done: bool = False
    given_up: bool = False
    heard_s: float = field(default_factory=time.monotonic)


COUNTERS = ("from_host", "from_disk", "down", "late", "checksum", "version", "evicted", "no_room")


class PageTiers:
    """The pages of one rank outside its pool. All calls are of the step loop; a thread does what takes time.

    counters: totals since the start: pages that came up from memory (from_host) and from files (from_disk), that went
              down, and why others were computed again or did not go down, by reason
    """

    def __init__(self, cache: KvCache, host_bytes: int, folder: PageFolder | None):
        """host_bytes: for pages in memory; 0: none are kept there"""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.page_bytes = cache.page_bytes
        self._cache, self._host_bytes, self._folder = cache, host_bytes, folder
        self._host: OrderedDict[bytes, Tensor] = OrderedDict()  # the page used longest ago first
        self._down: OrderedDict[bytes, int | Tensor] = OrderedDict()  # blocks to be copied, or pages that are, in order
        self._num_copied = 0  # of these pages
        self._key_of: dict[int, bytes] = {}  # of these blocks
        self._fetches: deque[Fetch] = deque()
        self._fetched_bytes = 0
        self._copied: bytes | None = None  # the key whose block the thread copies now
        self._clear = self._closed = False
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="kv-pages", daemon=True)
        self._thread.start()

    # ---- down

    def keep(self, key: bytes, block: int) -> None:
        """Has the page of a published block that no request holds now copied down."""
        with self._lock:
            if key in self._host:
                self._host.move_to_end(key)
            is_wanted = self._folder is not None or (self._host_bytes > 0 and key not in self._host)
            if key in self._down or not is_wanted:
                return
            if len(self._down) >= _QUEUED_PAGES:
                self.counters["no_room"] += 1
                return
            self._down[key] = block
            self._key_of[block] = key
            self._lock.notify()

    def written(self, blocks: Iterable[int]) -> None:
        """Says that these blocks will be written now: what the thread has not copied yet is copied here, if it fits."""
        with self._lock:
            for block in blocks:
                key = self._key_of.pop(block, None)
                if key is None:
                    continue
                self._down.pop(key, None)
                if self._copied == key:
                    self._copied = None
                if self._num_copied * self.page_bytes < _COPIED_BYTES:
                    self._down[key] = self._cache.read_page(block)
                    self._num_copied += 1
                else:
                    self.counters["evicted"] += 1
            self._lock.notify()

    # ---- up

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        """Begins to bring up the pages with these keys, up to the first that no tier has."""
        fetch = Fetch(keys)
        with self._lock:
            self._fetches.append(fetch)
            self._lock.notify()
        return fetch

    def take(self, fetch: Fetch, blocks: Sequence[int]) -> int:
        """Copies the pages that have come to the first of these blocks; returns how many."""
        num_taken = 0
        while num_taken < len(blocks) and fetch.pages:
            page = fetch.pages.popleft()
            self._cache.write_page(blocks[num_taken], page)
            num_taken += 1
        if num_taken:
            fetch.num_taken += num_taken
            with self._lock:
                self._fetched_bytes -= num_taken * self.page_bytes
                self._lock.notify()
        return num_taken

    def is_coming(self, fetch: Fetch) -> bool:
        """Returns whether a prefill should wait for more pages; not, where it has waited too long for the next one."""
        if fetch.pages or fetch.done:
            return bool(fetch.pages)
        if time.monotonic() - fetch.heard_s < _PATIENCE_S:
            return True
        self.counters["late"] += 1
        self.drop(fetch)
        return False

    def drop(self, fetch: Fetch) -> None:
        """Ends a fetch whose pages nobody takes any more."""
        with self._lock:
            fetch.given_up = fetch.done = True
            self._fetched_bytes -= len(fetch.pages) * self.page_bytes
            fetch.pages.clear()
            self._lock.notify()

    def flush(self) -> None:
        """Forgets all pages, and removes the files of this model."""
        with self._lock:
            self._host.clear()
            self._down.clear()
            self._num_copied = 0
            self._key_of.clear()
            self._copied, self._clear = None, True
            self._lock.notify()

    def close(self) -> None:
        """Waits for the pages that are to go down, and ends the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(_CLOSE_S)

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._fetches and self._fetches[0].done:
                    self._fetches.popleft()
                may_read = self._fetches and self._fetched_bytes < _FETCHED_BYTES and not self._closed
                if not (may_read or self._down or self._clear):
                    if self._closed:
                        return
                    self._lock.wait()
                    continue
                clear, self._clear = self._clear, False
                fetch = self._fetches[0] if may_read else None
            try:
                if clear and self._folder is not None:
                    self._folder.clear()
                if fetch is not None:
                    self._read_next(fetch)
                else:
                    self._copy_next()
            except OSError as error:
                self._switch_off(error)

    def _read_next(self, fetch: Fetch) -> None:
        """Reads one page of a fetch, or ends it."""
        page, where = self._find(fetch.keys[fetch.num_read]) if fetch.num_read < len(fetch.keys) else (None, "")
        with self._lock:
            if fetch.given_up:
                return
            if page is None:
                fetch.done = True
                return
            self.counters[where] += 1
            self._fetched_bytes += self.page_bytes
            fetch.num_read += 1
            fetch.pages.append(page)
            fetch.heard_s = time.monotonic()

    def _find(self, key: bytes) -> tuple[Tensor | None, str]:
        """Returns the page with this key, and the counter of its tier."""
        with self._lock:
            page = self._host.get(key)
            if page is not None:
                self._host.move_to_end(key)
                return page, "from_host"
        if self._folder is None:
            return None, ""
        try:
            found = self._folder.read(key, len(self._cache.layouts), self.page_bytes)
        except DamagedPage as error:
            self.counters[error.reason] += 1
            return None, ""
        if found is None:
            return None, ""
        page = torch.frombuffer(found, dtype=torch.uint8)
        with self._lock:
            self._put_in_host(key, page)
        return page, "from_disk"

    def _copy_next(self) -> None:
        """Copies the page that has waited longest, and lets it go where its block was written meanwhile."""
        with self._lock:
            if not self._down:
                return
            key, held = next(iter(self._down.items()))
            folder, is_in_memory = self._folder, self._host_bytes == 0 or key in self._host
        if folder is not None and folder.has(key):
            folder = None
        with self._lock:
            if self._down.get(key) is not held:
                return  # its block is written now: the page has taken its place
            del self._down[key]
            if isinstance(held, int):
                self._copied = key
            else:
                self._num_copied -= 1
        is_needed = folder is not None or not is_in_memory
        page = self._cache.read_page(held) if isinstance(held, int) and is_needed else held
        with self._lock:
            if isinstance(held, int):
                if self._copied != key:
                    return
                self._copied = None
                self._key_of.pop(held, None)
            if isinstance(page, int):
                return
            self._put_in_host(key, page)
        if folder is not None:
            folder.write(key, len(self._cache.layouts), page.numpy().data)
        if is_needed:
            self.counters["down"] += 1

    def _put_in_host(self, key: bytes, page: Tensor) -> None:
        """Keeps a page in memory, for which those used longest ago make room. The caller holds the lock."""
        if self._host_bytes < self.page_bytes:
            return
        self._host[key] = page
        while len(self._host) * self.page_bytes > self._host_bytes:
            self._host.popitem(last=False)

    def _switch_off(self, error: OSError) -> None:
        """Goes on without files, after a fault of the disk."""
        folder = self._folder
        if folder is not None:
            log.warning(
                "cache.path %s: %s; no more pages of the KV cache go to files or come from them, which are computed "
                "again instead; make room or mend the disk, then start again", folder.path, error.strerror or error,
            )  # fmt: skip
        with self._lock:
            self._folder = None
