"""Pages outside the KV cache in memory that all ranks of a host share: what one has computed, any of them may take.

There is no lock, and no index but the memory itself. A page may lie in one of the few slots of its key's set, and takes
the one that was used longest ago. Ranks may write to one slot at the same time, or be killed while they do: a reader
copies a page first and believes its copy only if it was whole before and after, with the key and the checksum of what
was asked for. So nobody waits for anybody, and a page that is not there is computed again.
"""

import mmap
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.attention_dp.page_record import (
    HEADER_BYTES,
    KEY_AT,
    DamagedPage,
    PageForm,
    check_size,
    decode_page,
    encode_header,
)

_WAYS = 8  # slots of a set
PAGE_AT = 128  # of a slot, in bytes; the record's header ends there
_WORD = 8
_WRITTEN, _USED, _WRITER = range(3)  # the first words of a slot, in ns and as a process id; _WRITTEN is 0 meanwhile
_KEY_WORD = (PAGE_AT - HEADER_BYTES + KEY_AT) // _WORD
_ALIGNMENT = 64


@dataclass(frozen=True)
class HostPage:
    """data: [page_bytes] uint8, a copy;  is_own: this process has written it"""

    data: Tensor
    is_own: bool


def slot_bytes(page_bytes: int) -> int:
    """Returns what a page takes."""
    return PAGE_AT + -(-page_bytes // _ALIGNMENT) * _ALIGNMENT


class HostPages:
    """Pages in a file in memory. Reads, writes and `has` are safe from any process and thread of the host."""

    def __init__(self, descriptor: int | None, num_bytes: int, form: PageForm):
        """descriptor: of a file that other ranks have mapped, too, of num_bytes; None: this rank is alone with its own

        Raises ConfigError where not even one page fits.
        """
        self._page_bytes, self._form = form.num_bytes, form
        self._slot_bytes = slot_bytes(form.num_bytes)
        check_size("cache.host_gb", num_bytes, self._slot_bytes)
        num_slots = num_bytes // self._slot_bytes
        self._ways = min(_WAYS, num_slots)
        self.num_slots = num_slots // self._ways * self._ways
        memory = mmap.mmap(-1 if descriptor is None else descriptor, num_bytes)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._words = memoryview(memory)[: num_bytes // _WORD * _WORD].cast("q")
        self._own = os.getpid()

    def has(self, key: bytes) -> bool:
        """Returns whether there seems to be this page, which is then among those used last."""
        slot = self._find(key)
        if slot < 0:
            return False
        self._words[slot // _WORD + _USED] = time.monotonic_ns()
        return True

    def write(self, key: bytes, page: Tensor) -> None:
        """Keeps a page, for which the one used longest ago makes room. page: [page_bytes] uint8 on the CPU"""
        if self.has(key):
            return
        words, header = self._words, encode_header(key, self._form, page.numpy().data)
        slot = min(self._slots(key), key=lambda slot: words[slot // _WORD + _USED])
        word, start = slot // _WORD, slot + PAGE_AT
        words[word + _WRITTEN] = 0
        words[word + _USED] = time.monotonic_ns()
        self._bytes[start - HEADER_BYTES : start] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._bytes[start : start + self._page_bytes] = page
        words[word + _WRITER] = self._own
        words[word + _WRITTEN] = time.monotonic_ns()

    def read(self, key: bytes) -> HostPage | None:
        """Returns a page; None: there is none. Raises DamagedPage, having removed the page."""
        slot = self._find(key)
        if slot < 0:
            return None
        words, word, start = self._words, slot // _WORD, slot + PAGE_AT
        written_ns = words[word + _WRITTEN]
        record = self._bytes[start - HEADER_BYTES : start + self._page_bytes].clone()
        is_own = words[word + _WRITER] == self._own
        if words[word + _WRITTEN] != written_ns or not written_ns:
            return None  # another page has taken its slot
        try:
            page = decode_page(record.numpy().data, key, self._form)
        except DamagedPage:
            words[word + _WRITTEN] = 0
            raise
        words[word + _USED] = time.monotonic_ns()
        return HostPage(torch.frombuffer(page, dtype=torch.uint8), is_own)

    def clear(self) -> None:
        """Forgets all pages, those of other ranks too."""
        for slot in range(0, self.num_slots * self._slot_bytes, self._slot_bytes):
            self._words[slot // _WORD + _WRITTEN] = 0

    def _slots(self, key: bytes) -> range:
        """Returns where this page may lie: the first byte of each slot."""
        start = int.from_bytes(key[:_WORD], "little") % (self.num_slots // self._ways) * self._ways
        return range(start * self._slot_bytes, (start + self._ways) * self._slot_bytes, self._slot_bytes)

    def _find(self, key: bytes) -> int:
        """Returns the slot whose page begins to have this key; -1: there is none."""
        words, first = self._words, int.from_bytes(key[:_WORD], "little", signed=True)
        for slot in self._slots(key):
            word = slot // _WORD
            if words[word + _KEY_WORD] == first and words[word + _WRITTEN]:
                return slot
        return -1
