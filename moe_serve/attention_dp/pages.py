"""Tiers below a rank's KV cache: pages in memory beside the pool, and in files that outlive the process.

The ranks of a host share both, so that one takes what another has computed. What ranks of another host have in theirs
comes over the network (page_peers).

A *page* is what one block holds, of all layers. Its key is that of the prefix cache, a hash of all tokens up to its
end, seeded with the model, its weights and the arithmetic: whoever finds a page by the key that it needs, and finds its
checksum right, has the very values that it would compute. So a page that is late, lost or damaged is computed again.

A thread reads and writes files, another one asks other hosts, and the step loop waits for neither:

    down    when a prompt is computed, and when no request holds a published block any more, the page is copied; by the
            step loop where the block is to be written before the thread has come to it
    up      a prefill that has begun asks for the pages that follow what the pool holds; it waits for them while they
            come, and takes a bounded number of bytes in each step
    across  behind the last page that this host has, the prefill asks the rank of another host that its front end names

Of a model that keeps states, snapshots of them go down and come up too, cut into pages whose keys follow from that of
the block in front. Pages come up to the last block of a prefix behind which its state is there. Other hosts are not
asked then.

Files: a header, then the page. Ranks of one host share a folder, and so its pages and its quota.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from moe_serve.attention_dp.host_pages import HostPages
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.page_peers import MOST_ASKED, OtherHosts, PageServer, PeerPages
from moe_serve.attention_dp.page_record import HEADER_BYTES, DamagedPage, PageForm, decode_page, encode_header
from moe_serve.attention_dp.prefix_cache import state_keys
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger
from moe_serve.process_facts import is_private, not_private

_SUFFIX = ".page"
_FETCHED_BYTES = 256 << 20  # of pages that have been read and not taken yet, over all requests
_QUEUED_PAGES = 16384  # blocks to be copied down; more are left out
_COPIED_BYTES = 256 << 20  # of pages that were copied since their blocks are written, and wait for the thread
_PATIENCE_S = 1.0  # for which a prefill waits for its next page, and for all beyond what computing them takes
_COMPUTING_S = 0.02  # a page, as long as that is not known
_SLOW_PAGES = 100  # that were left out since they take longer than computing; then the way is tried again
_ASKED_BYTES = 8 << 20  # of pages that another host is asked for at once
_WRITTEN_S = 60.0  # after which a file that is not finished never will be
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSE_S = 10.0  # for which a rank that ends waits for its last files
log = get_logger(__name__)


class PageFolder:
    """Files of pages in a folder of a model, within a quota for all models of the path. One thread writes; others read.

    Ranks and launches may share a path: a file's name and header say all that its values depend on, a file appears
    whole, and the bytes that are used are counted in one place, under a lock. The smallest quota holds for all.
    """

    def __init__(self, path: Path, identity: bytes, quota_bytes: int):
        """identity: of model, weights and arithmetic: it names the folder, since other pages can never be found

        Raises ConfigError where the path cannot be written, or others can write to it, and OSError for a full disk.
        """
        self.path, self.quota_bytes = path, quota_bytes
        self.folder = path / blake2b(identity, digest_size=8).hexdigest()
        try:
            self._open()
        except OSError as error:
            if error.errno in _FULL:
                raise
            raise ConfigError(
                f"cache.path {path} cannot be written ({error.strerror}); name a folder that can, or leave out "
                "cache.disk_gb"
            ) from None

    def _open(self) -> None:
        """Makes the folder, tries it, and counts what is there."""
        path = self.path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(path.stat()):
            raise ConfigError(not_private("cache.path", path))
        self.folder.mkdir(mode=0o700, exist_ok=True)
        probe = self.folder / f"probe-{os.getpid()}"
        try:
            probe.write_bytes(b"1")
        finally:
            probe.unlink(missing_ok=True)
        for part in self.folder.glob("*.[0-9]*"):  # of ranks that were killed while they wrote
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _WRITTEN_S:
                    part.unlink()
        self._part = f".{os.getpid()}{secrets.token_hex(4)}"  # a process id alone is not unique where containers share
        self._count = os.open(path / "used", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._use(0, anew=True)
        except OSError:
            os.close(self._count)
            raise

    def has(self, key: bytes) -> bool:
        """Returns whether there is a file for this page, which may be damaged."""
        return self._file(key).exists()

    def write(self, key: bytes, form: PageForm, page: memoryview) -> None:
        """Writes a page, whole or not at all. Raises OSError. The oldest files make room where the quota is used up."""
        target = self._file(key)
        part = target.with_suffix(self._part)
        try:
            with open(part, "wb", opener=_private) as file:
                file.write(encode_header(key, form, page))
                file.write(page)
            part.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._use(HEADER_BYTES + page.nbytes)

    def read(self, key: bytes, form: PageForm) -> memoryview | None:
        """Returns a page; None: there is none. Raises DamagedPage, having removed the file, or OSError."""
        file = self._file(key)
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as opened:
            size = os.fstat(descriptor).st_size
            record = bytearray(min(size, HEADER_BYTES + form.num_bytes + 1))
            num_read = opened.readinto(record) or 0
        try:
            page = decode_page(memoryview(record)[:num_read], key, form)
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
        self._use(0, anew=True)

    def _use(self, num_bytes: int, anew: bool = False) -> None:
        """Counts bytes that were written, and makes room. anew: count what is there, as after a process was killed"""
        fcntl.flock(self._count, fcntl.LOCK_EX)
        try:
            used = int.from_bytes(os.pread(self._count, 8, 0), "little") + num_bytes
            if anew or used > self.quota_bytes:
                used = self._shrink()
            os.pwrite(self._count, used.to_bytes(8, "little"), 0)
        finally:
            fcntl.flock(self._count, fcntl.LOCK_UN)

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


def open_folder(path: Path, identity: bytes, quota_bytes: int) -> PageFolder | None:
    """Returns the files of pages, as PageFolder; None: the disk is full, which a line says.

    A rank that is started again must serve then as those do whose tier was switched off. Raises ConfigError as it does.
    """
    try:
        return PageFolder(path, identity, quota_bytes)
    except OSError as error:
        _say_off(path, error)
        return None


def _say_off(path: Path, error: OSError) -> None:
    log.warning(
        "cache.path %s: %s; no more pages of the KV cache go to files or come from them, which are computed again "
        "instead; make room or mend the disk, then start again", path, error.strerror or error,
    )  # fmt: skip


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@dataclass
class Fetch:
    """Pages that a prefill waits for. Its thread appends to `pages`, the step loop takes from their begin.

    keys: of the pages that it would take, in order;  holder: the rank of another host that is asked, too; None: none is
    num_blocks: of a model with states: how many of the first pages are of blocks, behind which those of a state follow;
                None: it is not known yet, and keys are of all blocks
    done: no more will come
    heard_s: when the last page came;  waited_s: for which the prefill had none to take
    waits_s: since when it has none; None: there are some
    """

    keys: Sequence[bytes]
    holder: int | None = None
    num_blocks: int | None = None
    pages: "deque[Tensor]" = field(default_factory=deque)
    num_read: int = 0
    num_taken: int = 0
    done: bool = False
    given_up: bool = False
    heard_s: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    waits_s: float | None = None


# fmt: off
COUNTERS = (
    "from_host", "from_sibling", "from_disk", "from_other_host", "to_other_host", "down", "late", "slow", "peer_lost",
    "checksum", "version", "evicted", "no_room"
)
# fmt: on


class Price:
    """What pages take on one way, learned from those that came. Where computing takes less time they are left out, but
    for some now and then, since that may have changed.

    page_s: what a page takes; None: not known
    """

    def __init__(self, page_s: float | None = None, delay_s: float = 0.0):
        """delay_s: what it takes to ask for pages"""
        self.page_s, self._delay_s = page_s, delay_s
        self._num_left_out = 0

    def is_worth_it(self, num_pages: int, computing_s: float | None) -> bool:
        """Returns whether so many pages come sooner than they are computed, or should be tried all the same.

        computing_s: what a page takes to compute; None: not known
        """
        if self._num_left_out >= _SLOW_PAGES:
            self.page_s, self._num_left_out = None, 0
        page_s = self.page_s  # which another thread may forget meanwhile
        if page_s is None or computing_s is None:
            return True
        return self._delay_s + num_pages * page_s <= num_pages * computing_s

    def leave_out(self, num_pages: int) -> None:
        """Notes that pages were left out."""
        self._num_left_out += num_pages

    def learn(self, num_pages: int, took_s: float) -> None:
        """Notes that pages have come, and what they took together."""
        page_s = max(0.0, took_s - self._delay_s) / num_pages
        self.page_s = page_s if self.page_s is None else 0.8 * self.page_s + 0.2 * page_s


class PageTiers:
    """The pages of one rank outside its pool. All calls are of the step loop; threads do what takes time.

    counters: totals since the start: pages that came up from memory, where this process had put them (from_host) or
              another rank of the host (from_sibling), from files (from_disk), and from ranks of other hosts, or went
              there (from_other_host, to_other_host); that went down; and why others were computed again or did not go
              down, by reason
    computing_s: what a rank takes to compute the tokens of a page, as measured last; None: not known yet
    """

    def __init__(
        self, cache: KvCache, host: HostPages | None, folder: PageFolder | None, others: OtherHosts | None = None
    ):
        """host, folder: pages in memory and in files; None: none are kept there
        others: whose ranks give pages to this one, and take them; None: there are none
        """
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.page_bytes = cache.page_bytes
        self.computing_s: float | None = None
        self._cache, self._host, self._folder = cache, host, folder
        self._of_files = Price()
        self._down: OrderedDict[bytes, int | Tensor] = OrderedDict()  # blocks to be copied, or pages that are, in order
        self._num_copied = 0  # of these pages
        self._key_of: dict[int, bytes] = {}  # of these blocks
        self._fetches: deque[Fetch] = deque()
        self._fetched_bytes = 0
        self._copied: bytes | None = None  # the key whose block the thread copies now
        self._clear = self._closed = False
        self._across: deque[Fetch] = deque()  # whose next pages this host does not have
        self._of_network = Price() if others is None else Price(others.page_s, others.delay_s)
        lock = threading.RLock()
        self._lock, self._news_across = threading.Condition(lock), threading.Condition(lock)
        self._thread = threading.Thread(target=self._work, name="kv-pages", daemon=True)
        self._peers = self._server = self._asking = None
        if others is not None:
            self._server = PageServer(others, cache.page_form, self._give)
            self._peers = PeerPages(others, cache.page_form)
            self._asking = threading.Thread(target=self._ask_others, args=(self._peers,), name="kv-peers", daemon=True)
            self._asking.start()
        self._thread.start()

    @property
    def cost_across(self) -> float | None:
        """What a page of another host takes, over computing it; None: not known, or there are no other hosts."""
        page_s = None if self._peers is None else self._of_network.page_s
        return None if page_s is None or self.computing_s is None else page_s / self.computing_s

    # ---- down

    def keep(self, key: bytes, block: int) -> None:
        """Has the page of a published block copied down."""
        is_in_memory = self._host is not None and self._host.has(key)
        with self._lock:
            if key in self._down or key == self._copied:  # a second entry would lose its block when the copy ends
                return
            if self._folder is None and (is_in_memory or self._host is None):
                return
            if len(self._down) >= _QUEUED_PAGES:
                self.counters["no_room"] += 1
                return
            self._down[key] = block
            self._key_of[block] = key
            self._lock.notify()

    def keep_state(self, key: bytes, slot: int) -> int | None:
        """Copies the state in a slot, which is that behind the block with this key, for the thread to take it down;
        returns how many bytes it has copied. None: it is not kept, for want of room."""
        if self._has_state(key):
            return 0
        keys = state_keys(key, range(self.num_state_pages))
        with self._lock:
            if keys[-1] in self._down or keys[-1] == self._copied:
                return 0
            if self._num_copied and (self._num_copied + len(keys)) * self.page_bytes > _COPIED_BYTES:
                self.counters["no_room"] += 1
                return None
        pages = [torch.empty(self.page_bytes, dtype=torch.uint8) for _ in keys]
        for index, page in enumerate(pages):
            self._cache.read_state_page(slot, index, page)
        with self._lock:
            self._num_copied += len(keys) - len(self._down.keys() & set(keys))
            self._down.update(zip(keys, pages, strict=True))
            self._lock.notify()
        return len(keys) * self.page_bytes

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

    def fetch(self, keys: Sequence[bytes], holder: int | None = None) -> Fetch:
        """Begins to bring up the pages with these keys, up to the first that neither a tier has, nor the holder.

        holder: the rank of another host that is asked for those that this host does not have; None: none is
        """
        fetch = Fetch(keys, holder)
        with self._lock:
            self._fetches.append(fetch)
            self._lock.notify()
        return fetch

    def take(self, fetch: Fetch, blocks: Sequence[int]) -> int:
        """Copies the pages that have come to the first of these blocks; returns how many."""
        return self._take(fetch, len(blocks), lambda number, page: self._cache.write_page(blocks[number], page))

    def take_state(self, fetch: Fetch, slot: int, first: int, count: int) -> int:
        """Copies the pages of a state that have come, from page `first` of it on and at most `count`, to a slot that
        nobody reads; returns how many."""
        return self._take(fetch, count, lambda number, page: self._cache.write_state_page(slot, first + number, page))

    @property
    def num_state_pages(self) -> int:
        """The pages of a state; 0: the model keeps none."""
        return self._cache.num_state_pages

    def _take(self, fetch: Fetch, most: int, write: Callable[[int, Tensor], None]) -> int:
        """Hands at most so many pages that have come to `write`, with their numbers; returns how many."""
        num_taken = 0
        while num_taken < most and fetch.pages:
            write(num_taken, fetch.pages.popleft())
            num_taken += 1
        if num_taken:
            fetch.num_taken += num_taken
            if fetch.waits_s is not None:  # until they came, not until this step
                fetch.waited_s += max(0.0, fetch.heard_s - fetch.waits_s)
                fetch.waits_s = None
            with self._lock:
                self._fetched_bytes -= num_taken * self.page_bytes
                self._lock.notify()
                self._news_across.notify()
        return num_taken

    def is_coming(self, fetch: Fetch) -> bool:
        """Returns whether a prefill should wait for more pages; not, where it has waited too long for the next one, or
        for all so far: about as long again as they would have taken to compute."""
        if fetch.pages:
            fetch.waits_s = None
            return True
        now_s = time.monotonic()
        if fetch.waits_s is not None:
            fetch.waited_s += now_s - fetch.waits_s
        fetch.waits_s = now_s
        with self._lock:
            if fetch.pages or fetch.done:
                return bool(fetch.pages)
            page_s = _COMPUTING_S if self.computing_s is None else self.computing_s
            if now_s - fetch.heard_s < _PATIENCE_S and fetch.waited_s < _PATIENCE_S + fetch.num_taken * page_s:
                return True
            self._count("late")
            self.drop(fetch)
        return False

    def drop(self, fetch: Fetch) -> None:
        """Ends a fetch whose pages nobody takes any more."""
        with self._lock:
            fetch.given_up = fetch.done = True
            self._fetched_bytes -= len(fetch.pages) * self.page_bytes
            fetch.pages.clear()
            self._lock.notify()
            self._news_across.notify()

    def flush(self) -> None:
        """Forgets all pages, and removes the files of this model."""
        with self._lock:
            self._down.clear()
            self._num_copied = 0
            self._key_of.clear()
            self._copied, self._clear = None, True
            self._lock.notify()

    def close(self) -> None:
        """Waits for the pages that are to go down, and ends the threads."""
        with self._lock:
            self._closed = True
            self._lock.notify()
            self._news_across.notify()
        if self._server is not None and self._peers is not None and self._asking is not None:
            self._server.close()
            self._peers.close()
            self._asking.join(_CLOSE_S)
        self._thread.join(_CLOSE_S)

    # ---- the thread of this host's tiers

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
                if clear and self._host is not None:
                    self._host.clear()
                if clear and self._folder is not None:
                    self._folder.clear()
                if fetch is not None:
                    self._read_next(fetch)
                else:
                    self._copy_next()
            except OSError as error:
                self._switch_off(error)

    def _read_next(self, fetch: Fetch) -> None:
        """Reads one page of a fetch, or ends it here: another host may have the next one."""
        if fetch.num_blocks is None and self.num_state_pages:
            self._choose_border(fetch)
        page, where = self._find(fetch.keys[fetch.num_read]) if fetch.num_read < len(fetch.keys) else (None, "")
        if page is not None:
            self._add(fetch, page, where)
            return
        with self._lock:
            self._fetches.popleft()
            if fetch.holder is None or self._peers is None:
                fetch.done = True
            else:
                self._across.append(fetch)
                self._news_across.notify()

    def _choose_border(self, fetch: Fetch) -> None:
        """Has a fetch bring the pages up to the last block behind which there seems to be a state, and that."""
        keys = fetch.keys
        num_here = next((number for number, key in enumerate(keys) if not self._has(key)), len(keys))
        for number in range(num_here, 0, -1):
            if not self._has_state(keys[number - 1]):
                continue
            of_state = state_keys(keys[number - 1], range(self.num_state_pages))
            folder, last, num_pages = self._folder, of_state[-1], number + len(of_state)
            is_in_memory = self._host is not None and self._host.has(last)
            if not (is_in_memory or folder is None or self._is_worth_reading(folder, last, num_pages, number)):
                break
            fetch.keys, fetch.num_blocks = [*keys[:number], *of_state], number
            return
        fetch.keys, fetch.num_blocks = [], 0

    def _has_state(self, key: bytes) -> bool:
        """Returns whether there seem to be all pages of the state behind the block with this key."""
        end = self.num_state_pages
        (last,) = state_keys(key, range(end - 1, end))  # which is written last: most states that are not here end here
        return self._has(last) and all(map(self._has, state_keys(key, range(end - 1))))

    def _has(self, key: bytes) -> bool:
        """Returns whether there seems to be this page. Safe from any thread."""
        folder = self._folder
        return (self._host is not None and self._host.has(key)) or (folder is not None and folder.has(key))

    def _add(self, fetch: Fetch, page: Tensor, where: str) -> bool:
        """Leaves a page for the step loop. Returns False where nobody takes it any more. where: its counter"""
        with self._lock:
            if fetch.given_up:
                return False
            self.counters[where] += 1
            self._fetched_bytes += self.page_bytes
            fetch.num_read += 1
            fetch.pages.append(page)
            fetch.heard_s = time.monotonic()
            return True

    def _find(self, key: bytes) -> tuple[Tensor | None, str]:
        """Returns the page with this key, and the counter of its tier. Safe from any thread. Raises OSError."""
        if self._host is not None:
            with self._counting_damage():
                if (kept := self._host.read(key)) is not None:
                    return kept.data, "from_host" if kept.is_own else "from_sibling"
        folder = self._folder
        if folder is None or not self._is_worth_reading(folder, key):
            return None, ""
        began_s, found = time.perf_counter(), None
        with self._counting_damage():
            found = folder.read(key, self._cache.page_form)
        if found is None:
            return None, ""
        self._of_files.learn(1, time.perf_counter() - began_s)
        page = torch.frombuffer(found, dtype=torch.uint8)
        if self._host is not None:
            self._host.write(key, page)
        return page, "from_disk"

    @contextlib.contextmanager
    def _counting_damage(self) -> Iterator[None]:
        try:
            yield
        except DamagedPage as error:
            self._count(error.reason)

    def _count(self, fate: str, number: int = 1) -> None:
        with self._lock:
            self.counters[fate] += number

    def _is_worth_reading(self, folder: PageFolder, key: bytes, num_pages: int = 1, num_blocks: int = 1) -> bool:
        """Returns whether files bring so many pages, one of them this, sooner than so many blocks are computed. Now and
        then some are read all the same."""
        computing_s = None if self.computing_s is None else self.computing_s * num_blocks / num_pages
        if self._of_files.is_worth_it(num_pages, computing_s):
            return True
        if folder.has(key):
            self._of_files.leave_out(num_pages)
            self._count("slow", num_pages)
        return False

    def _copy_next(self) -> None:
        """Copies the page that has waited longest, and lets it go where its block was written meanwhile."""
        with self._lock:
            if not self._down:
                return
            key, held = next(iter(self._down.items()))
            folder, is_in_memory = self._folder, self._host is None or self._host.has(key)
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
        if self._host is not None:
            self._host.write(key, page)
        if folder is not None:
            folder.write(key, self._cache.page_form, page.numpy().data)
        if is_needed:
            self.counters["down"] += 1

    def _switch_off(self, error: OSError) -> None:
        """Goes on without files, after a fault of the disk."""
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            _say_off(folder.path, error)

    # ---- the threads of other hosts' tiers

    def _ask_others(self, peers: PeerPages) -> None:
        while True:
            with self._lock:
                self._news_across.wait_for(lambda: self._across or self._closed)
                if self._closed:
                    return
                fetch = self._across.popleft()
            try:
                while not fetch.done and self._ask(peers, fetch):
                    pass
            finally:
                fetch.done = True

    def _ask(self, peers: PeerPages, fetch: Fetch) -> bool:
        """Asks for some pages of a fetch, and leaves them for the step loop; returns whether to ask for more."""
        assert fetch.holder is not None
        most = max(1, min(MOST_ASKED, _ASKED_BYTES // self.page_bytes))
        keys = fetch.keys[fetch.num_read : fetch.num_read + most]
        with self._lock:
            self._news_across.wait_for(lambda: self._fetched_bytes < _FETCHED_BYTES or fetch.given_up or self._closed)
        if not keys or fetch.given_up or self._closed:
            return False
        if not self._of_network.is_worth_it(len(keys), self.computing_s):
            self._of_network.leave_out(len(keys))
            self._count("slow", len(keys))
            return False
        num_read, why = 0, "evicted"
        try:
            pages, began_s = peers.read(fetch.holder, keys), time.perf_counter()
            with contextlib.closing(pages):
                for page in pages:
                    num_read += 1
                    if not self._add(fetch, page, "from_other_host"):
                        break
            if num_read:
                self._of_network.learn(num_read, time.perf_counter() - began_s)
        except DamagedPage as error:
            why = error.reason
        except OSError:
            why = "peer_lost"
        with self._lock:
            if num_read < len(keys) and not fetch.given_up:  # which is counted, where its prompt is computed
                self._count(why)
                fetch.done = True
        return not fetch.done

    def _give(self, key: bytes) -> Tensor | None:
        """Returns a page for a rank of another host; None: it is not here."""
        try:
            page, _ = self._find(key)
        except OSError as error:
            self._switch_off(error)
            return None
        if page is not None:
            self._count("to_other_host")
        return page
