"""Pages of prompts on their way from prefill ranks to decode ranks, through shared memory.

Each prefill rank has a file in memory (page_ring), which it writes and decode ranks read: records, then the pages of
these. Decode ranks of other hosts read copies of it (page_stream). It writes the pages of a request whenever they are
computed, over those that it wrote longest ago. It holds no address of another's pool, and waits for nobody. A record
(`page_record`) says all that its reader knows beforehand.

The reader copies a page into a block that only its request holds, and believes it when the record is, byte by byte, the
one that it asked for, and the checksum over record and page is that of the bytes that it has stored. Whatever a late,
foreign or dying writer does meanwhile, the block is computed again then. The number is drawn from request, attempt and
launch: where a request leaves a rank, its attempt rises, and nobody asks for the records of before.

Of a model that keeps states, the state behind the last whole block in front of the prompt's last token goes behind the
pages, cut into pages of the same size: their keys follow from the block's, their indices from STATE_AT.
"""

import ctypes
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.page_record import HEAD, INDEX_AT, KEY_AT, STATE_AT, checksum_of, head_of, library, magic_of
from moe_serve.attention_dp.page_ring import RECORD_BYTES, PageRing
from moe_serve.attention_dp.page_stream import PageStream
from moe_serve.attention_dp.prefix_cache import KEY_BYTES, state_keys
from moe_serve.attention_dp.request import Handover, Request
from moe_serve.errors import ConfigError

_SENT_AT_ONCE = 16  # pages whose records are written together, so that a reader can copy those while others follow
_HERE: Mapping[str, Callable[[], socket.socket]] = {}  # the decode ranks are on this host
_NEAR = 1024  # slots from the first ones taken last, where the next pages are as a rule
Heads = npt.NDArray[np.uint8]
# Copies the pages from this one on, of those that are asked for, from or to rows [n, page_bytes]; returns checksums.
_Copy = Callable[[Heads, Heads, int], npt.NDArray[np.int64]]


class PageCopier:
    """Copies pages out of a pool and into it, with checksums. magic: of their records"""

    def __init__(self, cache: KvCache, library: ctypes.CDLL | None):
        self._cache, self._library = cache, library
        self.magic = magic_of(library)
        parts = cache.parts
        self._parts = np.array([address for address, _ in parts], dtype=np.int64)
        self._part_bytes = np.array([size for _, size in parts], dtype=np.int64)

    def copy(self, heads: Heads, pages: Heads, blocks: Sequence[int], into_pool: bool) -> npt.NDArray[np.int64]:
        """Copies pages and returns their checksums, which cover heads [n, HEAD.size] too.

        pages: n rows of [page_bytes] uint8 anywhere in memory;  into_pool: to the blocks, else from there
        """
        if self._library is None:
            return self._copy_plainly(heads, pages, blocks, into_pool)
        sums = np.empty(len(blocks), dtype=np.int64)
        first, stride = pages.ctypes.data, pages.strides[0]
        addresses = first + stride * np.arange(len(blocks), dtype=np.int64)
        at = np.array(blocks, dtype=np.int64)
        heads = np.ascontiguousarray(heads)
        self._library.copy_pages(
            len(blocks), heads.ctypes.data, heads.shape[1], addresses.ctypes.data, at.ctypes.data, len(self._parts),
            self._parts.ctypes.data, self._part_bytes.ctypes.data, int(into_pool), sums.ctypes.data,
        )  # fmt: skip
        return sums

    def _copy_plainly(
        self, heads: Heads, pages: Heads, blocks: Sequence[int], into_pool: bool
    ) -> npt.NDArray[np.int64]:
        sums = np.empty(len(blocks), dtype=np.int64)
        for number, block in enumerate(blocks):
            if into_pool:
                page = torch.from_numpy(pages[number].copy())
                self._cache.write_page(block, page)
            else:
                page = self._cache.read_page(block)
                pages[number] = page.numpy()
            sums[number] = zlib.crc32(page.numpy().data, zlib.crc32(heads[number].tobytes()))
        return sums


def number_of(launch_id: int, request_id: str, attempt: int) -> int:
    """Returns the number of a hand-over, by which its records are found."""
    name = f"{launch_id}:{attempt}:{request_id}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") or 1


class PageSender:
    """The writing end, on a prefill rank. num_sent: pages"""

    def __init__(
        self, descriptor: int, cache: KvCache, launch_id: int, dials: Mapping[str, Callable[[], socket.socket]] = _HERE
    ):
        """dials: by address of each decode host, as in PageFiles

        Raises ConfigError where the file is too small for a page.
        """
        self._copier = PageCopier(cache, library())
        self._ring = PageRing(descriptor, cache.page_bytes, writes=True)
        self._ring.records[:] = 0  # of a process before this one
        self._cache, self._launch_id = cache, launch_id
        self._streams = [PageStream(self._ring, dial, address) for address, dial in dials.items()]
        self._next = 0
        self.num_sent = 0

    @property
    def num_slots(self) -> int:
        """The pages that are there at a time."""
        return self._ring.num_slots

    def send(self, request: Request, first: int, end: int) -> None:
        """Writes the pages of a request's blocks first..end, which are full."""

        def copy(heads: Heads, pages: Heads, at: int) -> npt.NDArray[np.int64]:
            blocks = request.block_ids[first + at : first + at + len(heads)]
            return self._copier.copy(heads, pages, blocks, into_pool=False)

        self._send_all(request, first, request.block_keys[first:end], copy)

    def send_state(self, request: Request, key: bytes, slot: int | None) -> None:
        """Writes the state behind the block with this key, after the pages of the request.

        slot: that holds it; None: none does. An empty page behind all of a state tells the reader, who may wait
        """

        def copy(heads: Heads, pages: Heads, at: int) -> npt.NDArray[np.int64]:
            sums = np.empty(len(heads), dtype=np.int64)
            for number, (head, page) in enumerate(zip(heads, pages, strict=True)):
                if slot is None:
                    page[:] = 0
                else:
                    self._cache.read_state_page(slot, at + number, torch.from_numpy(page))
                sums[number] = checksum_of(head.tobytes(), page.data)
            return sums

        num_pages = self._cache.num_state_pages
        if slot is None:
            self._send_all(request, STATE_AT + num_pages, [bytes(KEY_BYTES)], copy)
        else:
            self._send_all(request, STATE_AT, state_keys(key, range(num_pages)), copy)

    def _send_all(self, request: Request, index: int, keys: Sequence[bytes], copy: _Copy) -> None:
        """Writes pages with these keys, the first of which has this index."""
        at = 0
        while at < len(keys):
            slot, count = self._next, min(len(keys) - at, self._ring.num_slots - self._next, _SENT_AT_ONCE)
            heads = heads_of(
                self._copier.magic, self._cache, self._launch_id, request.request_id, request.attempt, index + at,
                keys[at : at + count],
            )  # fmt: skip
            slots = slice(slot, slot + count)
            self._ring.records[slots] = 0
            sums = copy(heads, self._ring.pages[slots], at)
            records = np.zeros((count, RECORD_BYTES), dtype=np.uint8)
            records[:, : HEAD.size] = heads
            records[:, HEAD.size : HEAD.size + 4] = sums.astype("<u4").view(np.uint8).reshape(-1, 4)
            self._ring.records[slots] = records
            self._next = (slot + count) % self._ring.num_slots
            self.num_sent += count
            self._ring.num_sent += count
            for host, stream in enumerate(self._streams):
                stream.wrote(count, is_for_it=request.hand_over_to in (None, host))
            at += count

    def close(self) -> None:
        """Ends the connections with other hosts."""
        for stream in self._streams:
            stream.end()
        for stream in self._streams:
            stream.join()


COUNTERS = ("from_prefill", "late", "checksum", "peer_lost", "elsewhere", "version", "evicted", "no_snapshot")


class PageReceiver:
    """The reading end, on a decode rank.

    counters: pages that have come, and why the rest of a prompt was computed again, by reason
    """

    def __init__(self, descriptors: Sequence[int], cache: KvCache, wait_s: float | None = None):
        """descriptors: of the files, by prefill rank;  cache: not used yet
        wait_s: how long a request waits for pages at most, where other hosts send them; None: they are written here

        Raises ConfigError where a file is too small for a page.
        """
        self._copier = PageCopier(cache, library())
        self._rings = [PageRing(each, cache.page_bytes, writes=False) for each in descriptors]
        self._wait_s = wait_s
        cache.touch()  # whose blocks are new to the system, too, where pages of the first prompts come
        self._cache, self.page_bytes = cache, cache.page_bytes
        self._next = [0] * len(self._rings)  # the first slot that was found last, by prefill rank
        # By prefill rank: what was looked for and is not there, while no more pages than these have been sent.
        self._awaited: list[set[tuple[str, Handover, int]]] = [set() for _ in self._rings]
        self._awaited_at = [-1] * len(self._rings)
        self.counters = dict.fromkeys(COUNTERS, 0)

    def take(self, request: Request, handover: Handover, first: int, blocks: Sequence[int]) -> int:
        """Copies the pages of a request from index `first` on into blocks that only it holds; returns how many are
        right. Where that is not all, the reason is counted."""
        keys = request.block_keys[first : first + len(blocks)]
        return self._take(request, handover, first, keys, self._into(blocks))

    def take_state(self, request: Request, handover: Handover, key: bytes, first: int, count: int, slot: int) -> int:
        """Copies pages first..first+count of the state behind the block with this key into a slot that nobody reads;
        returns, and counts, as `take` does."""

        def copy(heads: Heads, pages: Heads, at: int) -> npt.NDArray[np.int64]:
            sums = np.empty(len(heads), dtype=np.int64)
            for number, (head, row) in enumerate(zip(heads, pages, strict=True)):
                page = row.copy()  # which nobody changes between check and use
                sums[number] = checksum_of(head.tobytes(), page.data)
                self._cache.write_state_page(slot, first + at + number, torch.from_numpy(page))
            return sums

        keys = state_keys(key, range(first, first + count))
        return self._take(request, handover, STATE_AT + first, keys, copy)

    def copy_block(self, block: int, to: int) -> None:
        """Copies what a block of the cache holds to another."""
        self._cache.write_page(to, self._cache.read_page(block))

    @property
    def num_state_pages(self) -> int:
        """The pages of a state; 0: the model keeps none."""
        return self._cache.num_state_pages

    def _into(self, blocks: Sequence[int]) -> _Copy:
        return lambda heads, pages, at: self._copier.copy(heads, pages, blocks[at : at + len(heads)], into_pool=True)

    def _take(self, request: Request, handover: Handover, first: int, keys: Sequence[bytes], copy: _Copy) -> int:
        slots = self.find(request.request_id, handover, first, len(keys))
        num_right, damage = 0, None
        if slots:
            num_right, damage = self._copy(request, handover, first, keys, slots, copy)
        self.counters["from_prefill"] += num_right
        if num_right < len(keys):
            self.counters[damage or handover.why_short or self._why_missing(request, handover, first)] += 1
        return num_right

    def num_there(self, request: Request, handover: Handover, first: int, count: int) -> int:
        """Returns how many pages of a request are to be taken now; 0: it waits for those that another host sends."""
        if self._wait_s is None or handover.why_short or not self._is_connected(handover.rank):
            return count
        if time.monotonic() - request.arrived_s > self._wait_s:
            return count
        rank, asked = handover.rank, (request.request_id, handover, first)
        num_sent = self.num_sent(rank)
        if num_sent != self._awaited_at[rank]:
            self._awaited_at[rank] = num_sent
            self._awaited[rank].clear()
        elif asked in self._awaited[rank]:
            return 0
        if num_there := len(self.find(request.request_id, handover, first, count)):
            return num_there
        if self._has_passed(request, handover, first):
            return count
        self._awaited[rank].add(asked)
        return 0

    def _has_passed(self, request: Request, handover: Handover, index: int) -> bool:
        """Returns whether a later page of a hand-over is there. They come in order, so this one comes no more: decode
        ranks had it when the prompt was sent, maybe."""
        fields = self._rings[handover.rank].fields
        own = fields["number"] == number_of(handover.launch_id, request.request_id, handover.attempt)
        return bool((fields["index"][own] > index).any())

    def _is_connected(self, rank: int) -> bool:
        return bool(self._rings[rank].connected[0])

    def _why_missing(self, request: Request, handover: Handover, index: int) -> str:
        """Returns why a page of a prompt that was computed to its end is not here."""
        if index >= STATE_AT and self.find(request.request_id, handover, STATE_AT + self.num_state_pages, 1):
            return "no_snapshot"
        if self._wait_s is None or self._has_passed(request, handover, index):
            return "evicted"
        return "late" if self._is_connected(handover.rank) else "peer_lost"

    def num_sent(self, rank: int) -> int:
        """Returns a number that changes when a prefill rank has sent more pages."""
        return int(self._rings[rank].num_sent[0])

    def take_early(
        self, request: Request, handover: Handover, first: int, blocks: Sequence[int], slots: list[int]
    ) -> int:
        """Copies pages of a prompt that is computed still, as `take`; no reason is counted, since `take` comes later.

        slots: from `find`, as many as blocks
        """
        keys = request.block_keys[first : first + len(slots)]
        num_right, _ = self._copy(request, handover, first, keys, slots, self._into(blocks))
        self.counters["from_prefill"] += num_right
        return num_right

    def find(self, request_id: str, handover: Handover, first: int, count: int) -> list[int]:
        """Returns the slots that claim to hold pages first.. of a hand-over, as far as there is one after the other."""
        number = number_of(handover.launch_id, request_id, handover.attempt)
        start = self._next[handover.rank]
        slots = self._find(handover.rank, number, first, count, start, start + _NEAR)
        if len(slots) < count:  # the whole ring takes 0.3 ms where it has 24,000 slots
            slots = self._find(handover.rank, number, first, count, 0, None)
        if slots:
            self._next[handover.rank] = slots[0]  # since `take` finds again what `num_there` has
        return slots

    def _find(self, rank: int, number: int, first: int, count: int, start: int, end: int | None) -> list[int]:
        """Returns what `find` does, as far as it is in slots start..end. end: None: of the ring"""
        fields = self._rings[rank].fields[start:end]
        found = np.flatnonzero(fields["number"] == number)
        slot_of = dict(zip(fields["index"][found].tolist(), (start + found).tolist(), strict=True))
        slots = []
        for index in range(first, first + count):
            if index not in slot_of:
                break
            slots.append(slot_of[index])
        return slots

    def _copy(
        self, request: Request, handover: Handover, first: int, keys: Sequence[bytes], slots: list[int], copy: _Copy
    ) -> tuple[int, str | None]:
        """Copies pages; returns how many are right, and what is wrong with the next one, if there is a next one."""
        ring = self._rings[handover.rank]
        asked = heads_of(
            self._copier.magic, self._cache, handover.launch_id, request.request_id, handover.attempt, first,
            keys[: len(slots)],
        )  # fmt: skip
        records = ring.records[slots]  # a copy, as they are now
        heads = records[:, : HEAD.size]
        sums = np.empty(len(slots), dtype=np.int64)
        begin = 0
        while begin < len(slots):  # pages that lie one behind the other go at once
            end = begin + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1:
                end += 1
            run = slice(begin, end)
            pages = ring.pages[slots[begin] : slots[end - 1] + 1]
            sums[run] = copy(heads[run], pages, begin)
            begin = end
        given = np.ascontiguousarray(records[:, HEAD.size : HEAD.size + 4]).view("<u4").reshape(-1)
        right, same = are_right(given, sums), are_what_was_asked(heads, asked)
        taken = right & same
        if taken.all():
            return len(slots), None
        number = int(taken.argmin())  # the first that is not
        return number, "version" if right[number] else "checksum"


def check_room_for_state(num_pages: int, cache: KvCache) -> None:
    """Raises ConfigError where a front end's share of a prefill rank's memory, num_pages, holds no prompt with its
    state."""
    need = 1 + cache.num_state_pages
    if cache.num_state_pages and num_pages < need:
        raise ConfigError(
            f"parallel.handover_gb has room for {num_pages} pages of a front end on their way, but a request's state "
            f"and one block take {need}, of {cache.page_bytes / 1e9:.3g} GB each; raise parallel.handover_gb"
        )


def are_right(given: npt.NDArray[np.uint32], computed: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns which records have the checksum of what was stored: [n]."""
    found: npt.NDArray[np.bool_] = given == computed
    return found


def are_what_was_asked(heads: Heads, asked: Heads) -> npt.NDArray[np.bool_]:
    """Returns which records say of their pages all that their reader knows of them: [n]."""
    found: npt.NDArray[np.bool_] = (heads == asked).all(axis=1)
    return found


def heads_of(
    magic: bytes, cache: KvCache, launch_id: int, request_id: str, attempt: int, first: int, keys: Sequence[bytes]
) -> Heads:
    """Returns the records of the pages with these keys, but for their checksums: [len(keys), HEAD.size] uint8."""
    number = number_of(launch_id, request_id, attempt)
    one = head_of(magic, cache.page_form, bytes(KEY_BYTES), number, launch_id, attempt)
    heads = np.frombuffer(one * len(keys), dtype=np.uint8).reshape(-1, HEAD.size).copy()
    indices = np.arange(first, first + len(keys), dtype="<u4")
    heads[:, INDEX_AT : INDEX_AT + 4] = indices.view(np.uint8).reshape(-1, 4)
    heads[:, KEY_AT:] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
    return heads
