"""Dispatch and combine over shared memory, against plain copies of the same bytes and against gloo.

    python -m benchmarks.dispatch [--rounds 30] [--ranks 2,4]

Every round runs all variants one after the other on all ranks at once, each several times in a row, so that all find
the caches as they left them themselves. Of a run the slowest rank counts, of a round the best run; ratios are medians
over rounds of ratios within a round. So what else runs on the machine slows both sides, or neither. memcpy is the
fastest of torch copy_, memmove and a streaming copy, into the same shared segment.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.dispatch_variants import COPIES, HIDDEN, LARGE, NUM_EXPERTS, NUM_TOKENS, SMALL, TOPK, Times, measure
from tests.dispatch.shm.faults import PHASES, Report, run_fault
from tests.ranks import run_ranks

MOST_LATE = 12  # runs with a fault that are repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=30, help="a fifth of them with more ranks than cores")
    parser.add_argument("--ranks", default="2,4")
    args = parser.parse_args()
    facts = conditions()
    rows: list[dict[str, Any]] = []
    with huge_tmpfs() as folder:
        for num_ranks in map(int, args.ranks.split(",")):
            rounds = args.rounds if num_ranks <= len(os.sched_getaffinity(0)) else max(args.rounds // 5, 1)
            timings = Timings(run_ranks(num_ranks, measure, rounds, folder, timeout_s=1200))
            rows += summarise(num_ranks, timings, folder is not None)
    fault, num_late = fault_rows()
    notes = (
        f"T={NUM_TOKENS} tokens per rank, H={HIDDEN}, K={TOPK}, E={NUM_EXPERTS}, bf16 on the wire; ranks pinned, "
        "at raised priority where allowed, and in sessions of their own where each has a core. A variant runs "
        f"{LARGE} times in a row (small ones {SMALL} times, gloo and plain ones once); of a run the slowest rank "
        "counts, of a round the "
        "best run. Times and ratios are medians over rounds, in brackets from the tenth to the ninetieth "
        "percentile. CPU: the time that the rank itself computed, spinning included; where it is far below the "
        "other, something else had the core. Huge pages: the shared regions in a tmpfs mounted with huge=always, "
        "which needs root. Faults: 3 ranks, one of which is killed or stopped in each of the four phases, "
        "deadline 50 ms, counted from its end; runs that were repeated since another rank was late, too: "
        f"{num_late}."
    )
    print(save("dispatch", "Dispatch and combine over shared memory", rows + fault, facts, notes, per_cpu=True))


@contextlib.contextmanager
def huge_tmpfs() -> Iterator[str | None]:
    """Gives a folder whose files are in huge pages; None where it may not be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "huge=always,size=4G", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            yield None
            return
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


class Timings:
    """Seconds of each variant in each round, [rounds]: of its best run there, as the slowest rank took."""

    def __init__(self, per_rank: list[Times]):
        self.wall: dict[str, NDArray[np.float64]] = {}
        self.cpu: dict[str, NDArray[np.float64]] = {}
        for name in per_rank[0]:
            runs = np.array([times[name] for times in per_rank])  # [ranks, rounds, runs, 2]
            self.wall[name], self.cpu[name] = runs.max(axis=0).min(axis=1).T

    def fastest_copy(self, size: str) -> str:
        """Returns the name of the plain copy that takes the least time."""
        return min((f"memcpy {size} {kind}" for kind in COPIES), key=lambda name: float(np.median(self.wall[name])))


@dataclass
class Table:
    """The rows of one number of ranks."""

    num_ranks: int
    timings: Timings
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, metric: str, name: str, yardstick: str | None = None, against: str = "", goal: str = "") -> None:
        """Adds the times of a variant, and their ratios to those of the yardstick."""
        wall, cpu = self.timings.wall, self.timings.cpu
        ratio = cpu_ratio = ""
        if yardstick is not None:
            ratios = wall[name] / wall[yardstick]
            low, high = np.percentile(ratios, (10, 90))
            ratio = f"{np.median(ratios):.2f} ({low:.2f} … {high:.2f}) × {against}"
            cpu_ratio = f"{np.median(cpu[name] / cpu[yardstick]):.2f}"
        times = {"µs": float(np.median(wall[name]) * 1e6), "CPU µs": float(np.median(cpu[name]) * 1e6)}
        row = {"ranks": self.num_ranks, "metric": metric, **times, "ratio": ratio, "CPU ratio": cpu_ratio, "goal": goal}
        self.rows.append(row)


def summarise(num_ranks: int, timings: Timings, with_huge_pages: bool) -> list[dict[str, Any]]:
    """Returns the rows of the table. Goals are those of two ranks, each with a core."""
    table, two = Table(num_ranks, timings), num_ranks == 2
    copies = {size: timings.fastest_copy(size) for size in ("remote", "dedup", "slabs")}
    for size, copy in copies.items():
        table.add(f"memcpy of the {size} rows ({copy.split()[-1]})", copy)
    slabs = copies["slabs"]
    for name, label in (("shm", "compiled"), ("plain", "plain")):
        goal = "≤ 1.0" if two and name == "shm" else ""
        metric = f"dispatch, one row per rank, {label}"
        table.add(metric, f"{name} arrival", copies["dedup"], "memcpy dedup", goal)
        table.add(metric, f"{name} arrival", copies["remote"], "memcpy remote")
        table.add(metric, f"{name} arrival", "gloo dispatch", "gloo", "≤ 1/6")
        table.add(f"dispatch to expert rows, {label}", f"{name} dispatch", slabs, "memcpy slabs", goal)
        table.add(f"dispatch to expert rows, {label}", f"{name} dispatch", "gloo dispatch", "gloo")
        if name == "shm":
            table.add("weighted combine, results in place", "shm combine in place", slabs, "memcpy slabs", goal)
        table.add(f"weighted combine, results elsewhere, {label}", f"{name} combine", slabs, "memcpy slabs")
        table.add(f"weighted combine, results elsewhere, {label}", f"{name} combine", "gloo combine", "gloo")
        limit = {2: "≤ 10 µs", 4: "≤ 40 µs"}.get(num_ranks, "")
        table.add(f"empty round (counts), {label}", f"{name} counts round", goal=limit)
        table.add(f"empty dispatch, {label}", f"{name} empty dispatch", goal=limit)
        table.add(f"one token, dispatch + combine, {label}", f"{name} one token", goal="≤ 60 µs")
    table.add("replicas + statistics", "replicas", "no replicas", "dispatch without", "≤ 1.05" if two else "")
    table.add("combine rank_sum, compiled", "shm rank_sum combine", "shm combine", "ordered, elsewhere")
    if with_huge_pages:
        copy = timings.fastest_copy("slabs, huge pages")
        table.add("huge pages: memcpy of the slabs rows", copy, slabs, "with pages of 4 KiB")
        for call in ("dispatch", "combine in place"):
            table.add(f"huge pages: {call}", f"huge {call}", f"shm {call}", "with pages of 4 KiB")
    table.add("combine rank_sum, gloo", "gloo rank_sum combine", "gloo combine", "ordered on gloo")
    for kind in ("dispatch", "combine", "one token", "empty dispatch", "counts round"):
        table.add(f"gloo {kind}", f"gloo {kind}")
    return table.rows


def fault_rows() -> tuple[list[dict[str, Any]], int]:
    """Returns how fast a lost rank is reported, the survivors go on, and the rank comes back; and runs to no purpose.

    On a busy machine a rank that nobody stopped may miss the deadline, too; that run is repeated.
    """
    rows, num_late = [], 0
    for sign, how in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):
        reports: list[Report] = []
        for phase in PHASES * 3:
            while True:
                try:
                    reports += run_fault(3, 1, phase, sign, deadline_s=0.05).values()
                    break
                except AssertionError:
                    num_late += 1
                    if num_late > MOST_LATE:
                        raise
        facts = [("reported", [r.reported_s for r in reports], "≤ 60 ms"),
                 ("first good step", [r.recovered_s for r in reports], "≤ 150 ms")]  # fmt: skip
        if sign == signal.SIGSTOP:
            facts.append(("back after its wake", [r.rejoined_s for r in reports], "≤ 1 s"))
        for what, seconds, goal in facts:
            rows.append(
                {"ranks": 3, "metric": f"rank {how}: {what}", "µs": float(np.median(seconds) * 1e6), "CPU µs": "",
                 "ratio": f"at most {np.max(seconds) * 1e3:.0f} ms", "CPU ratio": "", "goal": goal}
            )  # fmt: skip
    return rows, num_late


if __name__ == "__main__":
    main()
