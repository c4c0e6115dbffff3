"""Signs of life of the ranks of one host: each counts up in its own page of shared memory, from a thread of its own.

A step may take long: while a rank computes, reads or waits, its thread counts on. Only a process that is stopped, or
whose machine hangs, does not. Silence is counted in beats of the rank that listens, so time in which that rank itself
was stopped counts for nobody.
"""

import threading
import time
import weakref
from collections.abc import Sequence

from moe_serve.dispatch.shm.region import Int64Array

BEAT_S = 0.25
_WORD = 8  # of the owner's page, on a cache line of its own: a beat disturbs no flag


class Heartbeat:
    """The signs of life of one rank, and what it sees of those of the others.

    pages: of all ranks (`owner_words`)
    """

    def __init__(self, rank: int, pages: Sequence[Int64Array]):
        self._rank = rank
        self._beats = [page[_WORD : _WORD + 1] for page in pages]
        self._seen = [0] * len(pages)
        self._silent = [0] * len(pages)
        self._started = False

    def start(self) -> None:
        """Starts the thread, once. It ends when nobody refers to this object any more."""
        if not self._started:
            self._started = True
            threading.Thread(target=_beat, args=(weakref.ref(self),), name="heartbeat", daemon=True).start()

    def silent_s(self, rank: int) -> float:
        """Returns for how long a rank has given no sign of life; 0 before its first one."""
        return self._silent[rank] * BEAT_S

    def beat(self) -> None:
        """Gives a sign of life, and looks for those of the others."""
        self._beats[self._rank][0] += 1
        for rank, beats in enumerate(self._beats):
            count = int(beats[0])
            self._silent[rank] = self._silent[rank] + 1 if count == self._seen[rank] and count else 0
            self._seen[rank] = count


def _beat(reference: "weakref.ref[Heartbeat]") -> None:
    while True:
        heartbeat = reference()
        if heartbeat is None:
            return
        heartbeat.beat()
        del heartbeat
        time.sleep(BEAT_S)
