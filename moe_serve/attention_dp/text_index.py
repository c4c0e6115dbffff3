"""Where the last tokens of a text came before in the texts of a rank, in bounded memory: what followed may come again.

Prompt lookup decoding (Saxena 2023), with an index over the texts of many requests as in SuffixDecoding
(arXiv 2411.04975). A text follows the place that it repeats while it does; else the newest places of its last three
tokens are compared, and the one before which most tokens are equal is taken. How far drafts can be trusted is learnt by
the number of equal tokens, and for each text. Compiled (text_index.c), since a step may take half a millisecond.
"""

from array import array
from ctypes import CDLL
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_serve.c_library import load_c_library, processor_flags
from moe_serve.errors import ConfigError

CHUNK = 128  # tokens that are written over together
_CHUNK = np.dtype([("scope", "u8"), *[(name, "u4") for name in ("text", "length", "before", "after")]])
_TEXT = np.dtype(
    [("scope", "u8"), *[(name, "u4") for name in ("text", "last", "source", "matched", "followed", "offered")],
     ("right", "f4"), ("tried", "f4")]
)  # fmt: skip
_NUMBERS = ("num_chunks", "next_chunk", "head_bits", "num_texts", "chunks", "tokens", "earlier", "heads", "texts")
_INDEX = np.dtype([*[(name, "i8") for name in _NUMBERS], ("right", "f4", (2, 6)), ("tried", "f4", (2, 6))])
_CHUNK_BYTES = CHUNK * (4 + 4) + _CHUNK.itemsize  # a token, and the place before it in its chain
_LEAST_BYTES = 1 << 14


@cache
def index_library() -> CDLL:
    """Returns the compiled index. Raises ConfigError where it cannot be built: there is no other."""
    source = Path(__file__).with_name("text_index.c")
    try:
        return load_c_library(source, {"begin_text": 3, "look": 10}, processor_flags())[0]
    except ConfigError as error:
        raise ConfigError(f"drafts from text have a compiled index: {error}; or set speculation.mode: off") from None


class Found(NamedTuple):
    """What may come next in some texts. Valid until the next look.

    number:     of all drafts
    num_drafts: [num_texts] int32;  are_own: [num_texts] int32, 1: found in the text itself
    drafts:     [num_texts, most] int32
    chances:    [num_texts, most] float32, of each draft to be right with all before it; 0: there is none
    """

    number: int
    num_drafts: NDArray[np.int32]
    are_own: NDArray[np.int32]
    drafts: NDArray[np.int32]
    chances: NDArray[np.float32]


class TextIndex:
    """The texts of a rank, those of each scope apart. The oldest tokens are forgotten first."""

    def __init__(self, max_bytes: int, most: int):
        """most: drafts of one text. Raises ConfigError where there is no compiler."""
        self._library = index_library()
        self._most = most
        max_bytes = max(max_bytes, _LEAST_BYTES)
        head_bits = (max_bytes // 16).bit_length() - 1  # a quarter of the memory, or half as much
        # A 128th is left for what else it has: the open texts, what looks return, the compiled code.
        num_chunks = (max_bytes - max_bytes // 128 - 4 * 2**head_bits) // _CHUNK_BYTES
        self.num_bytes = num_chunks * _CHUNK_BYTES + 4 * 2**head_bits
        self.num_tokens = num_chunks * CHUNK
        # Zeros of the system, which become memory where they are first written to. Heads do at once: tokens write to
        # them all over, with a page fault for each.
        self._chunks = np.zeros(num_chunks, _CHUNK)
        self._tokens, self._earlier = np.zeros((2, self.num_tokens), np.int32)
        self._heads = np.zeros(2**head_bits, np.uint32)
        self._heads.fill(0)
        self._index = np.zeros(1, _INDEX)
        self._index["num_chunks"], self._index["head_bits"] = num_chunks, head_bits
        self._index["num_texts"] = 1  # chunks that nobody has taken have number 0
        self._index["right"], self._index["tried"] = 1.0, 2.0
        for name in ("chunks", "tokens", "earlier", "heads"):
            self._index[name] = getattr(self, f"_{name}").ctypes.data
        self._at = self._index.ctypes.data
        self._texts = np.zeros(0, _TEXT)
        self._free: list[int] = []
        self._make_room_for(1)

    def begin(self, scope: str) -> int:
        """Returns the number of a new text, until it ends. scope: whose texts it is compared with"""
        if not self._free:
            size = len(self._texts)
            self._free = list(range(size, 2 * size + 8))
            self._texts = np.concatenate([self._texts, np.zeros(size + 8, _TEXT)])
            self._index["texts"] = self._texts.ctypes.data
        number = self._free.pop()
        digest = int.from_bytes(blake2b(scope.encode(), digest_size=8).digest(), "little", signed=True)
        self._library.begin_text(self._at, number, digest)
        return number

    def end(self, number: int) -> None:
        """Ends a text. Its tokens stay until they are written over; its number may be that of another."""
        self._free.append(number)

    def read(self, number: int, token_ids: list[int]) -> None:
        """Adds tokens to a text."""
        self._look([number], [len(token_ids)], token_ids, 0)

    def look(self, numbers: list[int], counts: list[int], token_ids: list[int]) -> Found:
        """Adds tokens to texts, and returns what may come next in each.

        counts: how many of `token_ids` each text gets, one after the other
        """
        if len(numbers) != len(self._counts[0]):
            self._make_room_for(len(numbers))
        number = self._look(numbers, counts, token_ids, self._most)
        return Found(number, self._counts[0], self._counts[1], self._drafts, self._chances)

    def _look(self, numbers: list[int], counts: list[int], token_ids: list[int], most: int) -> int:
        arrays = array("i", numbers), array("i", counts), array("i", token_ids)
        given = [each.buffer_info()[0] for each in arrays]
        number: int = self._library.look(self._at, len(numbers), *given, most, *self._addresses)
        return number

    def _make_room_for(self, num_texts: int) -> None:
        self._counts = np.zeros((2, num_texts), np.int32)
        self._drafts = np.zeros((num_texts, self._most), np.int32)
        self._chances = np.zeros((num_texts, self._most), np.float32)
        found = self._counts[0], self._counts[1], self._drafts, self._chances
        self._addresses = [each.ctypes.data for each in found]
