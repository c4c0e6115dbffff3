"""How one rank's region of symmetric memory is divided: an owner's page, its outbox, and one lane from every source.

Each byte has one writer for ever: the owner writes page and outbox, source r writes lane r. So a rank that comes late,
or writes on after the others gave it up, can spoil nothing but what is then not read. On the way out rows are pushed
into the lanes of the ranks that want them; on the way home results stay in the outbox of the rank that made them, and
the ranks whose tokens they are fetch them there: where the experts write them in place, nobody copies them at all.

A lane holds two buffers for every kind of call, counted by its sequence number:

    flags    16 words of int64 on cache lines of their own: stamps of what this source has sent here, and of what it has
             read (see the names below)
    counts   [max_counts] int64                       what exchange_counts gathers
    head     [S + 1] int64                            entries for each slot here, and how many rows follow
    entries  [T_max * K] int32                        slot of each entry, by token, then k; FIRST begins a row
    weights  [T_max * K] float32                      of the entries, where results are summed before they go home
    rows     [T_max, row_bytes]                       encoded rows, one for each token that comes here, by token
    starts   [S] int64                                where in this source's outbox the results of each slot begin

An outbox has two buffers in the same way, each of [R * T_max * K, home_row_bytes] encoded results. A canary behind each
part changes when somebody writes too far.

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
COUNTS_READ, ROWS_READ, HOME_READ = 6, 7, 8  # stamp of the last call whose data this source has read
OWNER_WORDS = 512  # the owner's page: a process may look at it while waiting
CANARY = 0x5AFE_C0DE_0F_CA11
FIRST = 1 << 30  # in an entry: a new row begins
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RegionShape:
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
            "weights": 4 * entries,
            "rows": self.max_tokens * self.row_bytes,
            "starts": 8 * self.slots_per_rank,
        }

    @property
    def max_results(self) -> int:
        """Rows of one buffer of the outbox: all tokens of all ranks may come here, each to K slots."""
        return self.num_ranks * self.max_tokens * self.topk

    @property
    def results_bytes(self) -> int:
        return self.max_results * self.home_row_bytes

    @property
    def outbox_bytes(self) -> int:
        return 2 * (_lines(self.results_bytes) + LINE_BYTES)

    @property
    def lane_bytes(self) -> int:
        return 8 * NUM_FLAGS + 2 * sum(_lines(size) + LINE_BYTES for size in self.part_bytes.values())

    @property
    def num_bytes(self) -> int:
        """Size of the whole region of one rank."""
        return 8 * OWNER_WORDS + self.outbox_bytes + self.num_ranks * self.lane_bytes


class Lane:
    """What one source writes into one rank's region; lists are indexed by buffer."""

    def __init__(self, region: Tensor, shape: RegionShape, source: int):
        start = _first_lane(shape) + source * shape.lane_bytes
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
        self.weights: list[Float32Array] = [part.numpy().view(np.float32) for part in parts["weights"]]
        self.rows = [part.view(-1, shape.row_bytes) for part in parts["rows"]]
        self.starts: list[Int64Array] = [part.numpy().view(np.int64) for part in parts["starts"]]
        self._canaries = canaries

    def set_canaries(self) -> None:
        """Called once by the writer of this lane, before its first call."""
        for canary in self._canaries:
            canary[:] = CANARY

    def overrun(self) -> bool:
        """Returns whether somebody wrote past the end of a part."""
        return any((canary != CANARY).any() for canary in self._canaries)


class Outbox:
    """What a rank keeps for the others to fetch; lists are indexed by buffer."""

    def __init__(self, region: Tensor, shape: RegionShape):
        self.rows: list[Tensor] = []
        self._canaries: list[Int64Array] = []
        start = 8 * OWNER_WORDS
        for _ in range(2):
            self.rows.append(region[start : start + shape.results_bytes].view(-1, shape.home_row_bytes))
            start += _lines(shape.results_bytes)
            self._canaries.append(region[start : start + LINE_BYTES].numpy().view(np.int64))
            start += LINE_BYTES

    def set_canaries(self) -> None:
        """Called once by the owner, before its first call."""
        for canary in self._canaries:
            canary[:] = CANARY

    def overrun(self) -> bool:
        """Returns whether the owner wrote past the end of a buffer."""
        return any((canary != CANARY).any() for canary in self._canaries)


def owner_words(region: Tensor) -> Int64Array:
    """Returns the owner's page: [OWNER_WORDS] int64."""
    return region[: 8 * OWNER_WORDS].numpy().view(np.int64)


def all_flags(region: Tensor, shape: RegionShape) -> Int64Array:
    """Returns the flags of all lanes of a region: [R, NUM_FLAGS] int64, a view."""
    lanes = region[_first_lane(shape) :][: shape.num_ranks * shape.lane_bytes].view(shape.num_ranks, shape.lane_bytes)
    return torch.as_strided(lanes, (shape.num_ranks, 8 * NUM_FLAGS), (shape.lane_bytes, 1)).numpy().view(np.int64)


def _first_lane(shape: RegionShape) -> int:
    return 8 * OWNER_WORDS + shape.outbox_bytes


def _lines(size: int) -> int:
    """Returns size rounded up to whole cache lines."""
    return -(-size // LINE_BYTES) * LINE_BYTES
