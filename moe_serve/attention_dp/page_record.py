"""The record in which a page of the KV cache lies in a file or in memory."""

import struct
import zlib

from moe_serve.attention_dp.prefix_cache import KEY_BYTES
from moe_serve.errors import ConfigError

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sIQI")  # magic, key, layers, bytes of the page, their CRC-32
HEADER_BYTES, KEY_AT = _HEADER.size, 8
_MAGIC = b"moekv\0\0\1"  # its last byte is the version of the format


class DamagedPage(Exception):
    """A page that is not what its reader asked for. reason: "version" or "checksum", as in the metrics"""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def check_size(setting: str, num_bytes: int, least_bytes: int) -> None:
    """Raises ConfigError where a tier has no room for one page. setting: that gives its size"""
    if num_bytes < least_bytes:
        raise ConfigError(
            f"{setting} gives {num_bytes / 1e9:.3g} GB but one page, a block of all layers, takes "
            f"{least_bytes / 1e9:.3g} GB; raise {setting}, or leave it out"
        )


def encode_header(key: bytes, num_layers: int, page: memoryview) -> bytes:
    """Returns the header of a page. The checksum is zlib's CRC-32, which every Python has."""
    return _HEADER.pack(_MAGIC, key, num_layers, page.nbytes, zlib.crc32(page))


def decode_page(record: memoryview, key: bytes, num_layers: int, page_bytes: int) -> memoryview:
    """Returns the page in a record. Raises DamagedPage unless it is the whole page with this key and form."""
    if record.nbytes < HEADER_BYTES:
        raise DamagedPage("checksum")
    magic, found, layers, size, checksum = _HEADER.unpack_from(record)
    if (magic, found, layers, size) != (_MAGIC, key, num_layers, page_bytes):
        raise DamagedPage("version")
    page = record[HEADER_BYTES:]
    if page.nbytes != size or zlib.crc32(page) != checksum:
        raise DamagedPage("checksum")
    return page
