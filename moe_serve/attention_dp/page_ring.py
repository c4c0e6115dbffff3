"""The memory of one prefill rank for pages on their way to decode ranks, as all who have mapped it see it.

It holds records (page_record), then their pages. On a host of decode ranks it is the memory that the prefill rank
writes, or where that is on another host a copy of it, slot for slot (page_stream).
"""

import mmap
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_serve.errors import ConfigError

RECORD_BYTES = 128
_PAGE = mmap.PAGESIZE
_FIELDS = np.dtype(
    {"names": ["number", "index"], "formats": ["<u8", "<u4"], "offsets": [8, 28], "itemsize": RECORD_BYTES}
)


@dataclass(frozen=True)
class PageFiles:
    """The files of such memory, as a rank is given them.

    descriptors: by prefill rank; a prefill rank has its own alone
    dials:       of a prefill rank, by address of a decode host: connect with it, as for PageStream; none: they are on
                 this host
    are_copies:  of a decode rank: whether the prefill ranks are on other hosts
    """

    descriptors: Sequence[int]
    dials: Mapping[str, Callable[[], socket.socket]] = field(default_factory=dict)
    are_copies: bool = False


class PageRing:
    """The file of one prefill rank: num_slots records of RECORD_BYTES, and from the next page of memory on their pages.
    Two words are behind the records. The first says how many pages were written; readers look for records when it has
    changed. The second says in a copy whether there is a connection by which pages come: 1, or 0.

    records: [num_slots, RECORD_BYTES] uint8;  pages: [num_slots, page_bytes] uint8;  num_sent, connected: [1] uint64
    """

    def __init__(self, descriptor: int, page_bytes: int, writes: bool):
        """Raises ConfigError where the file is too small for a page."""
        size = os.fstat(descriptor).st_size
        self.num_slots = max(0, size - _PAGE) // (RECORD_BYTES + page_bytes)
        if not self.num_slots:
            raise ConfigError(
                f"parallel.handover_gb is {size / 1e9:g}, less than one block of the KV cache takes; it holds pages "
                f"that are handed over, of {page_bytes / 1e9:g} GB each; give it room for the longest prompts"
            )
        kind = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
        # Populated, since the first page fault of each 4 KiB costs as much as copying them ten times.
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = np.frombuffer(mmap.mmap(descriptor, size, shared, kind), dtype=np.uint8)
        records = self.num_slots * RECORD_BYTES
        first = -(-(records + 16) // _PAGE) * _PAGE  # within what num_slots leaves
        self.records = memory[:records].reshape(-1, RECORD_BYTES)
        words = memory[records : records + 16].view(np.uint64)
        self.num_sent, self.connected = words[:1], words[1:]
        self.pages = memory[first : first + self.num_slots * page_bytes].reshape(-1, page_bytes)
        self.fields = self.records.view(_FIELDS).reshape(-1)
