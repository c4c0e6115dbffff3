"""Dispatch and combine over shared memory, against plain copies of the same bytes and against gloo.

    python -m benchmarks.dispatch [--rounds 40] [--ranks 2,4]

Every round runs all variants one after the other on all ranks at once, each several times in a row, so that all find
the caches as they left them themselves; the slowest rank counts. Ratios are medians over rounds of ratios within a
round, so that a busy machine slows both sides. memcpy is the fastest of torch copy_, memmove and a streaming copy, into
the same shared segment.
"""

import argparse
import signal
from typing import Any

import numpy as np

from benchmarks.conditions import conditions, save
from benchmarks.dispatch_variants import HIDDEN, NUM_EXPERTS, NUM_TOKENS, TOPK, measure
from tests.dispatch.shm.faults import PHASES, Report, run_fault
from tests.ranks import run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", default="2,4")
    args = parser.parse_args()
    facts = conditions()
    rows: list[dict[str, Any]] = []
    for num_ranks in map(int, args.ranks.split(",")):
        per_rank = run_ranks(num_ranks, measure, args.rounds, timeout_s=1200)
        rows += summarise(num_ranks, per_rank)
    rows += fault_rows()
    notes = (
        f"T={NUM_TOKENS} tokens per rank, H={HIDDEN}, K={TOPK}, E={NUM_EXPERTS}, bf16 on the wire; ranks pinned, at "
        "raised priority where allowed. Times are medians over rounds of the slowest rank, all ranks running at once; "
        "`min` is the best round. `ratio`: the median of the ratios within a round, and in brackets best round over "
        "best round of the yardstick: neighbours on the machine take half of its memory bandwidth in some rounds, so a "
        "single round says little. `CPU time` is that of the copies alone: a rank that other work keeps off its core "
        "makes all others wait, which memcpy never does. Each variant runs 11 times in a row (20 the small ones, gloo "
        "and large plain ones once), and its median counts. Faults: 3 ranks, one of which is "
        "killed or stopped in each of the four phases, deadline 50 ms, counted from its end."
    )
    print(save("dispatch", "Dispatch and combine over shared memory", rows, facts, notes, per_cpu=True))


def fault_rows() -> list[dict[str, Any]]:
    """Returns how fast a lost rank is reported, the survivors go on, and the rank comes back."""
    rows = []
    for sign, how in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):
        reports: list[Report] = []
        for phase in PHASES * 3:
            reports += run_fault(3, 1, phase, sign, deadline_s=0.05).values()
        facts = [("reported", [r.reported_s for r in reports], "≤ 60 ms"),
                 ("first good step", [r.recovered_s for r in reports], "≤ 150 ms")]  # fmt: skip
        if sign == signal.SIGSTOP:
            facts.append(("back after its wake", [r.rejoined_s for r in reports], "≤ 1 s"))
        for what, seconds, goal in facts:
            rows.append(
                {"ranks": 3, "metric": f"rank {how}: {what}", "median µs": float(np.median(seconds) * 1e6),
                 "min µs": float(np.min(seconds) * 1e6), "ratio": f"max {np.max(seconds) * 1e3:.0f} ms", "goal": goal}
            )  # fmt: skip
    return rows


def summarise(num_ranks: int, per_rank: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    slowest = {name: np.max([times[name] for times in per_rank], axis=0) for name in per_rank[0]}

    def fastest(size: str) -> np.ndarray:
        kinds = [slowest[f"memcpy {size} {kind}"] for kind in ("copy_", "memmove", "streaming")]
        return kinds[int(np.argmin([np.median(kind) for kind in kinds]))]

    rows = []

    def row(metric: str, name: str, yardstick: np.ndarray | None, against: str, goal: str) -> None:
        took = slowest[name]
        rows.append(
            {
                "ranks": num_ranks,
                "metric": metric,
                "median µs": float(np.median(took) * 1e6),
                "min µs": float(np.min(took) * 1e6),
                "ratio": ""
                if yardstick is None
                else f"{np.median(took / yardstick):.2f} ({took.min() / yardstick.min():.2f}) × {against}",
                "goal": goal,
            }
        )

    for size in ("remote", "dedup", "slabs"):
        copied = fastest(size)
        rows.append(
            {"ranks": num_ranks, "metric": f"memcpy of the {size} rows", "median µs": float(np.median(copied) * 1e6),
             "min µs": float(np.min(copied) * 1e6), "ratio": "", "goal": ""}
        )  # fmt: skip
    goals = num_ranks == 2
    for name, label in (("shm", "compiled"), ("plain", "plain")):
        goal = "≤ 1.3" if name == "shm" and goals else ""
        row(f"dispatch, dedup rows in place, {label}", f"{name} arrival", fastest("dedup"), "memcpy dedup", goal)
        row(f"dispatch, dedup rows in place, {label}", f"{name} arrival", fastest("remote"), "memcpy remote", "")
        row(f"dispatch, dedup rows in place, {label}", f"{name} arrival", slowest["gloo dispatch"], "gloo", "≤ 1/6")
        goal = "≤ 1.0" if name == "shm" and goals else ""
        row(f"dispatch to expert rows, {label}", f"{name} dispatch", fastest("slabs"), "memcpy slabs", goal)
        row(f"dispatch to expert rows, {label}", f"{name} dispatch", slowest["gloo dispatch"], "gloo", "")
        if name == "shm":
            in_place = f"{name} combine in place"
            row("weighted combine, results written in place", in_place, fastest("slabs"), "memcpy slabs", goal)
        row(f"weighted combine, results elsewhere, {label}", f"{name} combine", fastest("slabs"), "memcpy slabs", goal)
        row(f"weighted combine, results elsewhere, {label}", f"{name} combine", slowest["gloo combine"], "gloo", "")
        limit = {2: "≤ 10 µs", 4: "≤ 40 µs"}.get(num_ranks, "")
        row(f"empty round (counts), {label}", f"{name} counts round", None, "", limit)
        row(f"empty dispatch, {label}", f"{name} empty dispatch", None, "", limit)
        row(f"one token, dispatch + combine, {label}", f"{name} one token", None, "", "≤ 60 µs")
    cpu = [slowest[f"cpu memcpy {kind}"] for kind in ("copy_", "memmove", "streaming")]
    memcpy_cpu = cpu[int(np.argmin([np.median(kind) for kind in cpu]))]
    goal = "≤ 1.0" if goals else ""
    row("copies of a dispatch to expert rows, CPU time", "cpu dispatch", memcpy_cpu, "memcpy slabs, CPU time", goal)
    row("copies of a combine in place, CPU time", "cpu combine in place", memcpy_cpu, "memcpy slabs, CPU time", goal)
    row("copies of a combine elsewhere, CPU time", "cpu combine", memcpy_cpu, "memcpy slabs, CPU time", "")
    goal = "≤ 1.05" if goals else ""
    row(
        "replicas + statistics (wait matrix in both)",
        "shm replicas dispatch",
        slowest["shm unreplicated dispatch"],
        "without",
        goal,
    )
    row("combine rank_sum, compiled", "shm rank_sum combine", slowest["shm combine"], "ordered, elsewhere", "")
    row("combine rank_sum, gloo", "gloo rank_sum combine", slowest["gloo combine"], "ordered on gloo", "")
    for kind in ("dispatch", "combine", "one token", "empty dispatch", "counts round"):
        row(f"gloo {kind}", f"gloo {kind}", None, "", "")
    return rows


if __name__ == "__main__":
    main()
