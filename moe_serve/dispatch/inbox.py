"""How one rank's region of symmetric memory is divided: an owner's page, and one lane from every source rank.

Each byte has one writer for ever: the owner writes its page, source r writes lane r. So a rank that comes late, or
writes on after the others gave it up, can spoil nothing but its own lane, which is then not read. A lane holds two
buffers for every kind of call, counted by its sequence number:

    flags    16 words of int64 on cache lines of their own: stamps of what this source has sent here, and of what it has
             read (see the names below)
    counts   [max_counts] int64                       what exchange_counts gathers
    head     [S + 1] int64                            entries for each slot here, and how many rows follow
    entries  [T_max * K] int32                        row of each entry, by slot, then by flat index
    rows     [T_max, row_bytes]                       encoded rows, one for each token that comes here, by token
    home     [T_max * K, home_row_bytes]              encoded results of this source's experts, in the order of entries

A canary behind each part of a lane changes when somebody writes too far.

Shape words: R ranks, S slots of one rank, T_max most tokens of a dispatch, K topk.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LINE_BYTES = 64
NUM_FLAGS = 16  # words: two cache lines, since processors fetch lines in pairs
COUNTS, ROWS, HOME = 0, 2, 4  # + buffer: stamp of the call whose data lie there
COUNTS_READ, ROWS_READ, HOME_READ = 6, 7, 8  # stamp of the last call whose data this source has read in its own region
OWNER_WORDS = 512  # the owner's page: a process may look at it while waiting
CANARY = 0x5AFE_C0DE_0F_CA11
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class InboxShape:
    """row_bytes: of an encoded row on the way out;  home_row_bytes: of a result on the way home."""

    num_ranks: int
    slots_per_rank: int
    topk: int
    max_tokens: int
    row_bytes: int
    home_row_bytes: int
    max_counts: int

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part of one buffer of a lane, canaries not counted."""
        entries = self.max_tokens * self.topk
        return {
            "counts": 8 * self.max_counts,
            "head": 8 * (self.slots_per_rank + 1),
            "entries": 4 * entries,
            "rows": self.max_tokens * self.row_bytes,
            "home": entries * self.home_row_bytes,
        }

    @property
    def lane_bytes(self) -> int:
        return 8 * NUM_FLAGS + 2 * sum(_lines(size) + LINE_BYTES for size in self.part_bytes.values())

    @property
    def num_bytes(self) -> int:
        """Size of the whole region of one rank."""
        return 8 * OWNER_WORDS + self.num_ranks * self.lane_bytes


class Lane:
    """What one source writes into one rank's region; lists are indexed by buffer."""

    def __init__(self, region: Tensor, shape: InboxShape, source: int):
        start = 8 * OWNER_WORDS + source * shape.lane_bytes
        self.flags: Int64Array = region[start : start + 8 * NUM_FLAGS].numpy().view(np.int64)
        start += 8 * NUM_FLAGS
        parts: dict[str, list[Tensor]] = {name: [] for name in shape.part_bytes}
        canaries = []
        for _ in range(2):
            for name, size in shape.part_bytes.items():
                parts[name].append(region[start : start + size])
                start += _lines(size)
                canaries.append(region[start : start + LINE_BYTES].numpy().view(np.int64))
                start += LINE_BYTES
        self.counts: list[Int64Array] = [part.numpy().view(np.int64) for part in parts["counts"]]
        self.head: list[Int64Array] = [part.numpy().view(np.int64) for part in parts["head"]]
        self.entries: list[Int32Array] = [part.numpy().view(np.int32) for part in parts["entries"]]
        self.rows = [part.view(-1, shape.row_bytes) for part in parts["rows"]]
        self.home = [part.view(-1, shape.home_row_bytes) for part in parts["home"]]
        self._canaries = canaries

    def set_canaries(self) -> None:
        """Called once by the writer of this lane, before its first call."""
        for canary in self._canaries:
            canary[:] = CANARY

    def overrun(self) -> bool:
        """Returns whether somebody wrote past the end of a part."""
        return any((canary != CANARY).any() for canary in self._canaries)


def owner_words(region: Tensor) -> Int64Array:
    """Returns the owner's page: [OWNER_WORDS] int64."""
    return region[: 8 * OWNER_WORDS].numpy().view(np.int64)


def all_flags(region: Tensor, shape: InboxShape) -> Int64Array:
    """Returns the flags of all lanes of a region: [R, NUM_FLAGS] int64, a view."""
    lanes = region[8 * OWNER_WORDS :][: shape.num_ranks * shape.lane_bytes].view(shape.num_ranks, shape.lane_bytes)
    return torch.as_strided(lanes, (shape.num_ranks, 8 * NUM_FLAGS), (shape.lane_bytes, 1)).numpy().view(np.int64)


def _lines(size: int) -> int:
    """Returns size rounded up to whole cache lines."""
    return -(-size // LINE_BYTES) * LINE_BYTES
