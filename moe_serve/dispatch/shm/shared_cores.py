"""Lets ranks that have more threads than cores give each other the cores on which they wait.

Each rank has a word in its owner's page: the core of its main thread, + 1, with WAITS while that waits for a peer. The
pool of the compiled kernels reads them before each piece (kernels/cpu/cores.h): workers compute on a core while no main
thread computes there. The words are hints, which others may change too; no wait and no result depends on them.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from moe_serve.dispatch.shm.region import Int64Array
from moe_serve.kernels.cpu.library import cpu_library

WAITS = 0x8000_0000  # as in kernels/cpu/cores.h and shared_cores.h
_WORD = 16  # of the owner's page, on a cache line of its own
Uint32Array = npt.NDArray[np.uint32]


class SharedCores:
    """The words of all ranks of one host. From now on this process's pool follows them, until `close`."""

    def __init__(self, rank: int, pages: Sequence[Int64Array]):
        """pages: of all ranks (`owner_words`)"""
        self._words: list[Uint32Array] = [page[_WORD : _WORD + 1].view(np.uint32)[:1] for page in pages]
        self._own = self._words[rank]
        self._table = np.array([word.__array_interface__["data"][0] for word in self._words], dtype=np.int64)
        cpu_library().share_cores(rank, self.table_at, len(pages), self._words)

    @property
    def table_at(self) -> int:
        """Where the addresses of the words are, [R] int64."""
        at: int = self._table.__array_interface__["data"][0]
        return at

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lends this rank's core while it waits."""
        self._own[0] |= WAITS
        try:
            yield
        finally:
            self._own[0] &= ~WAITS & 0xFFFF_FFFF

    def give_all_but(self, ranks: Iterable[int]) -> None:
        """Frees the cores of the ranks that take no part; one that is late and rejoins takes its own again."""
        for rank in set(range(len(self._words))) - set(ranks):
            self._words[rank][0] |= WAITS

    def close(self) -> None:
        """Ends the sharing; workers compute on any core."""
        cpu_library().end_sharing()


def are_shared(num_ranks: int, threads: int) -> bool:
    """Returns whether ranks of this host that have one core each have more threads than that."""
    cores = len(os.sched_getaffinity(0))
    return num_ranks > 1 and threads > 1 and cores < 2 * num_ranks
