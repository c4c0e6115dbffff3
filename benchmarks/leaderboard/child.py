"""Runs one planner on one instance in a process of its own, which may fail, hang or take all memory it is allowed.

    python -m benchmarks.leaderboard.child '{"entry": {...}, "instance": "v3-ep32-drift", "plans": 5}' RESULT.npz

RESULT.npz: placements [plans, L, P] int64 and cpu_s [plans] float64. What the planner prints is dropped; a planner
that raises leaves its last line on stderr.
"""

import contextlib
import io
import json
import resource
import sys
from dataclasses import replace

import numpy as np

from benchmarks.leaderboard.entries import Entry, plan_function
from benchmarks.leaderboard.instances import INSTANCES, Instance

MEMORY = 8 << 30
_getrusage = resource.getrusage  # before a planner is loaded, which could put another clock in its place


def main() -> None:
    request = json.loads(sys.argv[1])
    entry = Entry(**request["entry"])
    instance = next(one for one in INSTANCES if one.name == request["instance"])
    instance = replace(instance, plans=request["plans"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            placements, times = plans(entry, instance)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}".splitlines()[0])
    np.savez(sys.argv[2], placements=np.stack(placements), cpu_s=np.array(times))


def plans(entry: Entry, instance: Instance) -> tuple[list[np.ndarray], list[float]]:
    function = plan_function(entry)
    shape = instance.shape
    windows = instance.windows()
    current = instance.start(next(windows)).physical_to_logical
    placements, times = [], []
    for _, window in zip(range(instance.plans), windows, strict=False):
        arguments = (shape.num_slots, shape.topology.num_ranks, shape.topology.num_nodes, instance.num_groups)
        begin = _cpu_seconds()
        found = function(window.tokens.copy(), *arguments, current.copy())
        times.append(_cpu_seconds() - begin)
        found = np.asarray(found)
        if found.shape != current.shape or found.dtype.kind not in "iu":
            raise ValueError(f"plan returned {found.dtype} {list(found.shape)}, not integers {list(current.shape)}")
        placements.append(found.astype(np.int64))
        current = found.astype(np.int32)
    return placements, times


def _cpu_seconds() -> float:
    """Returns the CPU time of this process and of those that it has started and waited for."""
    uses = [_getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


if __name__ == "__main__":
    main()
