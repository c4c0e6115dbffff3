"""What a planner's placements are worth: balance now and in the next window, experts moved, bytes, step time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.leaderboard.entries import Entry
from benchmarks.leaderboard.instances import Instance
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement, count_moves
from moe_serve.eplb.replay.replay import Scorer
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology


@dataclass(frozen=True)
class Row:
    """One planner on one instance; means over its plans unless said otherwise.

    plan_ms:      median CPU time of a plan of all layers, one thread
    now:          mean / max rank load on the window that was planned for, mean over layers
    served:       the same on the next window
    worst:        of served, the lowest layer of all windows
    moves:        share of the slots whose rank must receive an expert
    node_gib:     weights of experts that a node must receive from other nodes, GiB
    step_ms:      predicted time of a step in the next window
    duplicates:   slots of a layer that repeat an expert of their rank, most of all
    failed:       why there is no result; the other fields are then 0
    """

    instance: str
    entry: str
    plan_ms: float = 0.0
    now: float = 0.0
    served: float = 0.0
    worst: float = 0.0
    moves: float = 0.0
    node_gib: float = 0.0
    step_ms: float = 0.0
    duplicates: int = 0
    failed: str = ""


def measure(entry: Entry, instance: Instance, limit_s: float) -> Row:
    """Returns the row of an entry, whatever it does. limit_s: wall time for all its plans."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.npz"
        request = {"entry": asdict(entry), "instance": instance.name, "plans": instance.plans}
        command = [sys.executable, "-m", "benchmarks.leaderboard.child", json.dumps(request), str(result)]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            code, errors = _run(command, limit_s, os.environ | one_thread)
        except subprocess.TimeoutExpired:
            return Row(instance.name, entry.name, failed=f"not ready after {limit_s:g} s")
        if code or not result.is_file():
            last = (errors.strip() or f"ended with code {code}").splitlines()[-1]
            return Row(instance.name, entry.name, failed=last[:200])
        with np.load(result, allow_pickle=False) as file:
            placements, cpu_s = file["placements"], file["cpu_s"]
    try:
        return score(entry.name, instance, placements, cpu_s)
    except PlacementError as error:
        return Row(instance.name, entry.name, failed=str(error)[:200])


def _run(command: list[str], limit_s: float, environ: dict[str, str]) -> tuple[int, str]:
    """Returns the exit code and what stderr says; nothing that the command started outlives it."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environ, start_new_session=True
    )
    try:
        errors = process.communicate(timeout=limit_s)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, errors


def score(name: str, instance: Instance, placements: NDArray[np.int64], cpu_s: NDArray[np.float64]) -> Row:
    """Returns the row of placements [plans, L, P]. Raises PlacementError for one that cannot serve."""
    trace = instance.trace()
    windows = list(trace)
    costs, topology = instance.costs(), instance.shape.topology
    scorer = Scorer(topology, trace.topk, costs)
    before = instance.start(windows[0])
    if placements.size and (placements.min() < -1 or placements.max() >= before.num_logical):
        raise PlacementError(
            f"plan returned experts {placements.min()} to {placements.max()}; give ids below {before.num_logical}"
        )
    now, served, moves, node_moves, steps, duplicates = [], [], [], [], [], 0
    for table, window, following in zip(placements, windows[1:-1], windows[2:], strict=True):
        after = Placement(table.astype(np.int32), before.num_logical, before.num_ranks)
        now.append(balancedness(rank_load(window.tokens, after)).mean())
        found = scorer.score(following, after)
        served.append(found.balancedness)
        assert found.step_s is not None
        steps.append(found.step_s)
        by_rank = (before.num_layers, before.num_ranks, -1)
        old, new = (one.physical_to_logical.reshape(by_rank) for one in (before, after))
        moves.append(count_moves(old, new).sum() / new.size)
        node_moves.append(int(count_new_experts(before, after, topology).sum()))
        duplicates = max(duplicates, int(after.num_duplicates.max()))
        before = after
    return Row(
        instance.name,
        name,
        plan_ms=1e3 * float(np.median(cpu_s)),
        now=float(np.mean(now)),
        served=float(np.mean(served)),
        worst=float(np.min(served)),
        moves=float(np.mean(moves)),
        node_gib=float(np.mean(node_moves)) * costs.expert_bytes / 2**30,
        step_ms=1e3 * float(np.mean(steps)),
        duplicates=duplicates,
    )


def count_new_experts(before: Placement, after: Placement, topology: Topology) -> NDArray[np.int64]:
    """Returns how many experts the nodes of each layer must receive from other nodes, [L] int64.

    An expert travels to a node once, however many ranks of the node then hold it.
    """
    held = [_on_nodes(placement, topology) for placement in (before, after)]
    count: NDArray[np.int64] = (held[1] & ~held[0]).sum(axis=(1, 2))
    return count


def _on_nodes(placement: Placement, topology: Topology) -> NDArray[np.bool_]:
    """[L, nodes, E]: whether a rank of the node holds the expert."""
    by_node = placement.physical_to_logical.reshape(placement.num_layers, topology.num_nodes, -1)
    held = np.zeros((placement.num_layers, topology.num_nodes, placement.num_logical + 1), dtype=np.bool_)
    np.put_along_axis(held, by_node.astype(np.int64), True, axis=2)  # an empty slot, -1, falls on the last column
    return held[:, :, :-1]


def shortened(instance: Instance, plans: int | None) -> Instance:
    """Returns the instance with another number of plans; None = its own."""
    return instance if plans is None else replace(instance, plans=plans)
