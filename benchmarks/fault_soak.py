"""What the processes of a system hold while it is disturbed: memory, descriptors, threads, blocks, queues. Linux."""

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fault_system import FaultySystem

_WARM_UP_S = 60.0  # allocators and caches fill; left out of the table where the run is long enough
_FEW = 12  # samples: of fewer, none is left out


class Soak:
    """Samples of a running system: (seconds since the start, value) by whose they are, and by what was measured.

    whose: a name and a process id: of processes that took each other's place, the table has the one that lived longest
    """

    def __init__(self, system: FaultySystem, period_s: float):
        self.values: dict[tuple[str, int], dict[str, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._system = system
        self._period_s = period_s
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(self._period_s)

    def sample(self) -> None:
        """Measures once; what is just being started again is left out."""
        at_s = time.monotonic() - self._began_s
        processes = self._system.processes()
        for name, pid in processes.items():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                held = {
                    line.partition(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1
                }
                measured = {
                    "RSS, MiB": int(held["VmRSS"]) / 1024,
                    "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
                    "threads": float(held["Threads"]),
                }
            except (OSError, KeyError):
                continue  # it has ended meanwhile
            for what, value in measured.items():
                self.values[name, pid][what].append((at_s, value))
        shared = os.statvfs("/dev/shm")
        names = [name for name in os.listdir("/dev/shm") if name.startswith("moe_serve")]
        self._add(at_s, "/dev/shm: names of ours", len(names))
        self._add(at_s, "/dev/shm: MiB in use, by anybody", (shared.f_blocks - shared.f_bfree) * shared.f_bsize / 2**20)
        try:
            info = self._system.info()
        except OSError:
            return
        reports = [each["status"] for each in info["ranks"] if each["status"] is not None and each["phase"] == "ready"]
        self._add(
            at_s, "KV blocks in use, all ranks", sum(each["num_blocks"] - each["num_free_blocks"] for each in reports)
        )
        self._add(at_s, "open requests", info["requests"]["open"])
        self._add(at_s, "requests that wait for a rank", info["requests"]["waiting"])

    def _of_the_oldest(self) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
        for name in dict.fromkeys(name for name, _ in self.values):
            lives = [measured for (whose, _), measured in self.values.items() if whose == name]
            oldest = max(lives, key=lambda measured: max(map(len, measured.values())))
            yield from ((name, what, values) for what, values in oldest.items())

    def curve(self, whose: str, parts: int) -> list[dict[str, object]]:
        """Returns what the oldest process of a name held, as medians of so many parts of its life, one row each."""
        measured = {what: values for name, what, values in self._of_the_oldest() if name == whose}
        if not measured:
            return []
        times = [at_s for at_s, _ in next(iter(measured.values()))]
        length_s = (times[-1] - times[0]) / parts or 1.0
        rows: list[dict[str, object]] = []
        for part in range(parts):
            begins_s = times[0] + part * length_s
            held = {
                what: [value for at_s, value in values if begins_s <= at_s <= begins_s + length_s]
                for what, values in measured.items()
            }
            if all(held.values()):
                minutes = (begins_s - times[0]) / 60
                rows.append(
                    {"from minute": minutes} | {what: statistics.median(values) for what, values in held.items()}
                )
        return rows

    def _add(self, at_s: float, what: str, value: float) -> None:
        self.values["the system", 0][what].append((at_s, float(value)))

    def rows(self) -> list[dict[str, object]]:
        """Returns one row for each thing measured: medians of the first and the last sixth, the slope, the largest."""
        rows: list[dict[str, object]] = []
        for whose, what, values in self._of_the_oldest():
            later = [each for each in values if each[0] > values[0][0] + _WARM_UP_S]
            kept = later if len(later) >= _FEW else values
            if len(kept) < 2:
                continue
            part = max(1, len(kept) // 6)
            rows.append({
                "whose": whose,
                "what": what,
                "minutes": (kept[-1][0] - kept[0][0]) / 60,
                "samples": len(kept),
                "start": statistics.median(value for _, value in kept[:part]),
                "end": statistics.median(value for _, value in kept[-part:]),
                "slope per hour": 3600 * statistics.linear_regression(*zip(*kept, strict=True)).slope,
                "largest": max(value for _, value in kept),
            })  # fmt: skip
        return rows
