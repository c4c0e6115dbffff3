"""The record of a page of the KV cache, on its way between ranks, in memory that ranks share, and in a file.

    magic, number of the hand-over, launch, attempt, index of the page, layers, tokens, bytes, key    and a checksum

A page on its way to a decode rank is of one attempt of a request. One that lies in a tier is of whoever needs its key:
number, launch, attempt and index are 0 there. Its reader compares a record with the one that it expects.
"""

import ctypes
import struct
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_serve.attention_dp.prefix_cache import KEY_BYTES
from moe_serve.c_library import find_c_library, processor_flags
from moe_serve.errors import ConfigError

# The magic's last byte says which checksum it is: CRC-32C, or without a compiler CRC-32.
HEAD = struct.Struct(f"<8sQQIIIIQ{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = HEAD.size + _CHECKSUM.size
STATE_AT = 1 << 31  # index of the first page of a state, on its way to a decode rank
INDEX_AT = struct.calcsize("<8sQQI")
KEY_AT = HEAD.size - KEY_BYTES


class DamagedPage(Exception):
    """A page that is not what its reader asked for. reason: "version" or "checksum", as in the metrics"""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class PageForm:
    """What all pages of a KV cache have in common. tokens: of a block;  num_bytes: of a page"""

    layers: int
    tokens: int
    num_bytes: int


@cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled copying and summing of pages; None: there is no compiler."""
    source, calls = Path(__file__).with_name("page_copy.c"), {"copy_pages": 10, "sum_page": 4}
    return find_c_library(source, calls, "pages are copied by Python, slowly", processor_flags())


def magic_of(library: ctypes.CDLL | None) -> bytes:
    """Returns the magic of records whose checksums this library computes."""
    return b"moepage\1" if library is not None else b"moepage\2"


def head_of(magic: bytes, form: PageForm, key: bytes, number: int = 0, launch_id: int = 0, attempt: int = 0) -> bytes:
    """Returns a record but for its checksum, of the first page."""
    return HEAD.pack(magic, number, launch_id, attempt, 0, form.layers, form.tokens, form.num_bytes, key)


def check_size(setting: str, num_bytes: int, least_bytes: int, has_state: bool = False) -> None:
    """Raises ConfigError where a tier has no room for one page, or twice for one and a state.

    setting: that gives its size
    """
    if num_bytes < least_bytes:
        what = "one page, a block of all layers," + " with the state behind it, twice over" * has_state
        raise ConfigError(
            f"{setting} gives {num_bytes / 1e9:.3g} GB but {what} takes "
            f"{least_bytes / 1e9:.3g} GB; raise {setting}, or leave it out"
        )


def encode_header(key: bytes, form: PageForm, page: memoryview) -> bytes:
    """Returns the record of a page for a tier."""
    head = head_of(magic_of(library()), form, key)
    return head + _CHECKSUM.pack(checksum_of(head, page))


def decode_page(record: memoryview, key: bytes, form: PageForm) -> memoryview:
    """Returns the page behind its record. Raises DamagedPage unless it is the whole page with this key and form."""
    if record.nbytes < HEADER_BYTES:
        raise DamagedPage("checksum")
    head, page = bytes(record[: HEAD.size]), record[HEADER_BYTES:]
    if head != head_of(magic_of(library()), form, key):
        raise DamagedPage("version")
    (given,) = _CHECKSUM.unpack_from(record, HEAD.size)
    if page.nbytes != form.num_bytes or checksum_of(head, page) != given:
        raise DamagedPage("checksum")
    return page


def checksum_of(head: bytes, page: memoryview) -> int:
    """Returns the checksum over a record and its page. page: bytes that lie one behind the other"""
    compiled = library()
    if compiled is None:
        return zlib.crc32(page, zlib.crc32(head))
    import numpy as np

    first, then = np.frombuffer(head, dtype=np.uint8), np.frombuffer(page, dtype=np.uint8)
    return int(compiled.sum_page(first.ctypes.data, first.nbytes, then.ctypes.data, then.nbytes))
