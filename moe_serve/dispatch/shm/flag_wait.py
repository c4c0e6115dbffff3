"""Waits for flags of peers: spin, then yield, then sleep. Whether to go on waiting is decided in membership.py.

A rank reads only flags in its own region. It spins for about as long as a running peer needs; with more threads than
cores it does not spin at all, since the peer may need this very core, and workers of the peers may use it.
"""

import os
import time
from collections.abc import Callable

from moe_serve.dispatch.shm.region import Int64Array
from moe_serve.dispatch.shm.shared_cores import SharedCores

SPINS = 100  # reads, 10 µs, before the time slice is given up, where each rank has a core
YIELD_S = 0.002  # how long a rank only yields; most computing steps end within it
LONGEST_SLEEP_S = 0.001
CHECK_S = 0.005  # how often a waiting rank checks whether its peers live


class FlagWait:
    """Waits until flags hold a value."""

    def __init__(
        self,
        num_ranks: int,
        deadline_s: float,
        check: Callable[[list[int], str, int, float], None],
        cores: SharedCores | None = None,
    ):
        """check(missing ranks, phase, sequence, waited_s): raises PeerError where waiting is useless"""
        self.waited_s = [0.0] * num_ranks
        """Seconds that this rank has waited for each other one since the start, spinning not counted: its row of the
        wait matrix. A rank that is late for all shows as a column."""
        self._kept_s = [0.0] * num_ranks
        self._check = check
        self._check_s = min(CHECK_S, deadline_s / 5)
        self._cores = cores
        self.spins = SPINS if num_ranks <= len(os.sched_getaffinity(0)) and cores is None else 1

    def keep(self) -> None:
        """Keeps the waits so far: their step is done."""
        self._kept_s[:] = self.waited_s

    def drop(self) -> None:
        """Forgets the waits since the last `keep`: their step is void."""
        self.waited_s[:] = self._kept_s

    def add(self, waited_ns: Int64Array) -> None:
        """Counts waits of the C helper, [R]."""
        for rank, waited in enumerate(waited_ns):
            self.waited_s[rank] += float(waited) * 1e-9

    def __call__(
        self,
        flags: Int64Array,
        wanted: int,
        ranks: list[int],
        phase: str,
        sequence: int,
        or_more: bool = False,
    ) -> None:
        """Returns when flags[r] is `wanted` (or more) for every r of `ranks`. flags: [R], a view of memory.

        Raises PeerError naming rank, phase and sequence number.
        """
        if self._cores is None:
            return self._wait(flags, wanted, ranks, phase, sequence, or_more)
        with self._cores.lent():
            return self._wait(flags, wanted, ranks, phase, sequence, or_more)

    def _wait(self, flags: Int64Array, wanted: int, ranks: list[int], phase: str, sequence: int, or_more: bool) -> None:
        looks = 0
        started_s = counted_s = 0.0
        for rank in ranks:
            while (flags[rank] < wanted) if or_more else (flags[rank] != wanted):
                looks += 1
                if looks < self.spins:
                    continue
                now_s = time.monotonic()
                if started_s == 0.0:
                    started_s = checked_s = counted_s = now_s
                waited_s = now_s - started_s
                if waited_s < YIELD_S:
                    os.sched_yield()
                else:
                    time.sleep(min(LONGEST_SLEEP_S, waited_s / 20))
                if now_s - checked_s > self._check_s:
                    checked_s = now_s
                    missing = [r for r in ranks if (flags[r] < wanted if or_more else flags[r] != wanted)]
                    if missing:
                        self._check(missing, phase, sequence, waited_s)
            if started_s:
                now_s = time.monotonic()
                self.waited_s[rank] += now_s - counted_s
                counted_s = now_s
