"""Pages of prompts on their way from prefill ranks to decode ranks, through shared memory.

Each prefill rank has a file in memory (page_ring), which it writes and decode ranks read: records, then the pages of
these. Decode ranks of other hosts read copies of it (page_stream). It writes the pages of a request whenever they are
computed, over those that it wrote longest ago. It holds no address of another's pool, and waits for nobody. A record
(`page_record`) says all that its reader knows beforehand.

The reader copies a page into a block that only its request holds, and believes it when the record is, byte by byte, the
one that it asked for, and the checksum over record and page is that of the bytes that it has stored. Whatever a late,
foreign or dying writer does meanwhile, the block is computed again then. The number is drawn from request, attempt and
launch: where a request leaves a rank, its attempt rises, and nobody asks for the records of before.
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
from moe_serve.attention_dp.page_record import HEAD, INDEX_AT, KEY_AT, head_of, library, magic_of
from moe_serve.attention_dp.page_ring import RECORD_BYTES, PageRing
from moe_serve.attention_dp.page_stream import PageStream
from moe_serve.attention_dp.prefix_cache import KEY_BYTES
from moe_serve.attention_dp.request import Handover, Request

_SENT_AT_ONCE = 16  # pages whose records are written together, so that a reader can copy those while others follow
_HERE: Mapping[str, Callable[[], socket.socket]] = {}  # the decode ranks are on this host
_NEAR = 1024  # slots behind the last one taken, where the next hand-over's pages are as a rule
Heads = npt.NDArray[np.uint8]


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
        while first < end:
            slot, count = self._next, min(end - first, self._ring.num_slots - self._next, _SENT_AT_ONCE)
            self._send(request, first, first + count, slot)
            self._next = (slot + count) % self._ring.num_slots
            self.num_sent += count
            self._ring.num_sent += count
            for host, stream in enumerate(self._streams):
                stream.wrote(count, is_for_it=request.hand_over_to in (None, host))
            first += count

    def close(self) -> None:
        """Ends the connections with other hosts."""
        for stream in self._streams:
            stream.end()
        for stream in self._streams:
            stream.join()

    def _send(self, request: Request, first: int, end: int, slot: int) -> None:
        heads = heads_of(
            self._copier.magic, self._cache, self._launch_id, request.request_id, request.attempt, first,
            request.block_keys[first:end],
        )  # fmt: skip
        slots = slice(slot, slot + end - first)
        self._ring.records[slots] = 0
        sums = self._copier.copy(heads, self._ring.pages[slots], request.block_ids[first:end], into_pool=False)
        records = np.zeros((end - first, RECORD_BYTES), dtype=np.uint8)
        records[:, : HEAD.size] = heads
        records[:, HEAD.size : HEAD.size + 4] = sums.astype("<u4").view(np.uint8).reshape(-1, 4)
        self._ring.records[slots] = records


COUNTERS = ("from_prefill", "late", "checksum", "peer_lost", "elsewhere", "version", "evicted")


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
        self._next = [0] * len(self._rings)  # behind the last slot that was found, by prefill rank
        # By prefill rank: what was looked for and is not there, while no more pages than these have been sent.
        self._awaited: list[set[tuple[str, Handover, int]]] = [set() for _ in self._rings]
        self._awaited_at = [-1] * len(self._rings)
        self.counters = dict.fromkeys(COUNTERS, 0)

    def take(self, request: Request, handover: Handover, first: int, blocks: Sequence[int]) -> int:
        """Copies the pages of a request from index `first` on into blocks that only it holds; returns how many are
        right. Where that is not all, the reason is counted."""
        slots = self.find(request.request_id, handover, first, len(blocks))
        num_right, damage = 0, None
        if slots:
            num_right, damage = self._copy(request, handover, first, blocks, slots)
        self.counters["from_prefill"] += num_right
        if num_right < len(blocks):
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
        num_right, _ = self._copy(request, handover, first, blocks, slots)
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
            self._next[handover.rank] = slots[-1] + 1
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
        self, request: Request, handover: Handover, first: int, blocks: Sequence[int], slots: list[int]
    ) -> tuple[int, str | None]:
        """Copies pages; returns how many are right, and what is wrong with the next one, if there is a next one."""
        ring = self._rings[handover.rank]
        asked = heads_of(
            self._copier.magic, self._cache, handover.launch_id, request.request_id, handover.attempt, first,
            request.block_keys[first : first + len(slots)],
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
            sums[run] = self._copier.copy(heads[run], pages, blocks[begin:end], into_pool=True)
            begin = end
        given = np.ascontiguousarray(records[:, HEAD.size : HEAD.size + 4]).view("<u4").reshape(-1)
        right, same = are_right(given, sums), are_what_was_asked(heads, asked)
        taken = right & same
        if taken.all():
            return len(slots), None
        number = int(taken.argmin())  # the first that is not
        return number, "version" if right[number] else "checksum"


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
