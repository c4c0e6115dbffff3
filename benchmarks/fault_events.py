"""What can be done to a running system: kill, stop or slow processes, cut connections, fill a disk, send bad input."""

import asyncio
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

from benchmarks.fault_streams import stream
from benchmarks.fault_system import FaultySystem

_APART_S = 2.0  # two kills, at most
# One cycle. A killed rank is the fault that matters most.
CYCLE = (
    "kill a rank", "reset connections of ranks", "kill the planner", "kill a rank", "stop a rank for 1 s",
    "kill a rank", "slow a rank to half for 2 s", "kill all ranks", "bad input", "kill a rank",
    "cut the network for 6 s", "full disk for 3 s",
)  # fmt: skip
# Of a system with several front ends.
FRONT_ENDS = ("kill a front end, then a rank", "kill a rank, then a front end", "kill a front end", "kill a rank")
SPARES_RANKS = tuple(name for name in CYCLE if name not in ("kill a rank", "kill all ranks"))
SPARES_ONE_RANK = tuple(name for name in CYCLE if name != "kill all ranks")


class Faults:
    """The faults of a system by name; one that returns False found nothing to do. kills: of each kind of process

    spared: a rank that "kill a rank" leaves alive; None: it may take any
    cut_off: ports of the clients whose front end was killed
    """

    def __init__(self, system: FaultySystem, seed: int, spared: int | None = None):
        self.kills: Counter[str] = Counter()
        self.num_resets = self.num_two_sides = 0
        self.cut_off: set[int] = set()
        self._system = system
        self._spared = spared
        self._draw = random.Random(seed)
        self.by_name: dict[str, Callable[[], Awaitable[bool | None]]] = {
            "kill a rank": self._kill_rank,
            "kill all ranks": self._kill_all_ranks,
            "kill the planner": self._kill_planner,
            "stop a rank for 1 s": self._stop_rank,
            "slow a rank to half for 2 s": self._slow_rank,
            "reset connections of ranks": self._reset_connections,
            "cut the network for 6 s": self._cut_network,
            "full disk for 3 s": self._fill_disk,
            "bad input": self._bad_input,
            "kill a front end": self._kill_front_end,
            "kill a front end, then a rank": lambda: self._kill_both("front end", "rank"),
            "kill a rank, then a front end": lambda: self._kill_both("rank", "front end"),
        }

    def _kill(self, kind: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.kills[kind] += 1

    def _any_rank(self) -> int:
        return self._system.rank_pid(self._draw.choice(self._system.serving_ranks()))

    async def _kill_rank(self) -> None:
        others = [rank for rank in self._system.serving_ranks() if rank != self._spared]
        self._kill("rank, alone", self._system.rank_pid(self._draw.choice(others)))

    async def _kill_front_end(self) -> None:
        await self._kill_both("front end")

    async def _kill_both(self, *kinds: str) -> None:
        """Kills one of each, the second one while the first is started again, or soon after."""
        found = self._system.processes()
        victims = {kind: self._draw.choice([pid for name, pid in found.items() if kind in name]) for kind in kinds}
        for number, kind in enumerate(kinds):
            if number:
                await asyncio.sleep(self._draw.uniform(0.0, _APART_S))
            if kind == "front end":
                self.cut_off |= self._system.kill_front_end(victims[kind])
                self.kills[kind] += 1
            else:
                self._kill("rank, alone", victims[kind])

    async def _kill_all_ranks(self) -> None:
        for pid in [self._system.rank_pid(rank) for rank in self._system.serving_ranks()]:
            self._kill("rank, with all others", pid)

    async def _kill_planner(self) -> bool:
        for _ in range(50):  # it is started with the first plan after a restart
            found = self._system.processes().get("planner")
            if found is not None:
                self._kill("planner", found)
                return True
            await asyncio.sleep(0.1)
        return False

    async def _stop_rank(self) -> None:
        pid = self._any_rank()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    async def _slow_rank(self) -> None:
        pid = self._any_rank()
        for _ in range(20):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.05)

    async def _reset_connections(self) -> None:
        self.num_resets += self._system.cut()

    async def _cut_network(self) -> None:
        await self._system.network.carry_nothing(6.0)

    async def _fill_disk(self) -> None:
        """No rank may make a file larger: a write to the trace fails as on a full disk (with EFBIG, not ENOSPC)."""
        most = max(8192, self._system.trace.stat().st_size)
        pids = [self._system.rank_pid(rank) for rank in self._system.serving_ranks()]
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        await asyncio.sleep(3.0)
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def _bad_input(self) -> None:
        for data in (b"{", b"[]", b'{"text": 5}', b'{"input_ids": [-1]}', b"\xff" * 4096, b"[" * 5000):
            status, _, _ = await stream(self._system.connect, data)
            assert 400 <= status < 500, status
