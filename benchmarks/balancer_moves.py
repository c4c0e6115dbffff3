"""Churn, split, economics and replay rows of benchmarks/balancer.py."""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.balancer_instances import Q3_EP16, SEEDS, V3_EP32, V3_EP72, V3_EP144, V3_EP320, Shape, load
from benchmarks.balancer_loads import FlippingLoad
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.files.traces import write_trace
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest, PlanRules
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.replay import Scorer, replay
from moe_serve.eplb.replay.run import make_runs
from moe_serve.eplb.replay.settings import ReplaySettings, starting_placement
from moe_serve.eplb.replay.synthetic import FAMILIES, SyntheticLoad, synthetic_trace

CHURN_WINDOWS = 8


def churn_rows() -> Iterable[dict[str, Any]]:
    """Slow drift, a plan in every window: served balance and slots moved of `deepseek` (EPLB) and `incremental`."""
    goals = ((V3_EP32, 0.06), (Q3_EP16, 0.06), (V3_EP72, 0.15), (V3_EP144, 0.15))
    for shape, budget in goals:
        drift = SyntheticLoad(
            "lognormal", CHURN_WINDOWS, shape.num_layers, shape.num_logical, rho=0.98, tokens_per_step=100_000
        )
        found: dict[str, list[tuple[float, float, float]]] = {}
        for seed in SEEDS[:2]:
            trace = synthetic_trace(replace(drift, seed=seed))
            # A system that was balanced before: its first placement fits the first window, and drift does the rest.
            first = PlanRequest(next(iter(trace)).tokens, shape.topology, shape.num_slots)
            settings = ReplaySettings(
                shape.topology,
                shape.num_slots,
                start=make_policy("refined").plan(first).placement,
                rules=PlanRules(max_moves=int(budget * shape.num_slots)),
            )
            report = replay(trace, ["deepseek", "incremental"], settings)
            for result in report.policies:
                # The first plan is made from the window that the start was made from: nothing to do.
                share = result.moves[1:].mean() / (shape.num_slots * shape.num_layers)
                plan_ms = 1e3 * float(np.median(result.plan_s[1:]))
                found.setdefault(result.name, []).append((float(result.served[1:].mean()), float(share), plan_ms))
        theirs = np.mean([served for served, _, _ in found["deepseek"]])
        for name, seeds in found.items():
            served, share, plan_ms = np.mean(seeds, axis=0)
            yield {
                "axis": "moves under drift, rho 0.98",
                "instance": f"{shape.words}, lognormal 0.6",
                "policy": name,
                "seeds": len(seeds),
                "time ms": round(float(plan_ms), 2),
                "mean": round(float(served), 4),
                "min": "",
                "other": f"{share:.1%} of slots a rebalance, served {served - theirs:+.4f} to EPLB",
                "goal": "" if name == "deepseek" else f"<= {budget:.0%} within 0.01",
            }


def split_rows() -> Iterable[dict[str, Any]]:
    """One layer, many batches: exact splits in Python and compiled, beside HiGHS. Times: best of 20 or 3 rounds."""
    from moe_serve.eplb.split.exact import UNPROVEN
    from moe_serve.eplb.split.layer import LayerSlots
    from moe_serve.eplb.split.make import make_split
    from moe_serve.eplb.split.policy import find_library

    for shape, tokens_per_rank in ((V3_EP32, 32), (Shape("V3 320", 58, 256, 320, V3_EP32.topology), 32)):
        plan = make_policy("refined").plan(PlanRequest(load(shape, "lognormal", 0), shape.topology, shape.num_slots))
        row = plan.placement.physical_to_logical[0]
        layer, library = LayerSlots.of(row, shape.topology, shape.num_logical), find_library()
        rng = np.random.default_rng(0)
        weights = load(shape, "lognormal", 0)[0] / load(shape, "lognormal", 0)[0].sum()
        batches = rng.multinomial(tokens_per_rank * shape.topology.num_ranks * 8, weights, size=200)
        fast = 0.0035 if shape.num_slots == 288 else 0.0055
        replicated = int((plan.placement.replica_count[0] > 1).sum())
        optimum = [_highs(batch, row, shape.topology.num_ranks) for batch in batches[:40]]
        for name, split, used in (
            ("exact, Python", "exact", None),
            ("exact, compiled", "exact", library),
            ("even", "even", None),
        ):
            policy = make_split(split, layer, used)
            shares = [policy.split(batch) for batch in batches]
            proven = 1 - policy.outcomes[UNPROVEN] / max(1, policy.outcomes.sum())
            each = min(_time_each(policy.split, batches) for _ in range(20 if used is not None else 3))
            most = [int(s.reshape(shape.topology.num_ranks, -1).sum(axis=1).max()) for s in shares]
            equal = sum(most[i] == int(np.ceil(best - 1e-6)) for i, (best, _) in enumerate(optimum))
            mean = batches.sum(axis=1).mean() / shape.topology.num_ranks
            yield {
                "axis": "per-batch split",
                "instance": f"1x256 -> {shape.num_slots}/32, {replicated} replicated, {tokens_per_rank} tokens a rank",
                "policy": name,
                "seeds": len(batches),
                "time ms": round(1e3 * each, 5),
                "mean": round(float(mean / np.mean(most)), 4),
                "min": "",
                "other": f"{equal} of {len(optimum)} at ceil of the LP optimum"
                + (f", {proven:.1%} certified" if split == "exact" else ""),
                "goal": {"exact, Python": "exact, <= 0.5 ms", "exact, compiled": f"exact, <= {fast} ms"}.get(name, ""),
            }
        yield {
            "axis": "per-batch split",
            "instance": f"1x256 -> {shape.num_slots}/32, {replicated} replicated, {tokens_per_rank} tokens a rank",
            "policy": "scipy HiGHS (LP, solve only)",
            "seeds": len(optimum),
            "time ms": round(1e3 * float(np.median([seconds for _, seconds in optimum])), 3),
            "mean": "",
            "min": "",
            "other": "",
            "goal": "",
        }


def _time_each(split: Callable[[np.ndarray], np.ndarray], batches: np.ndarray) -> float:
    """Returns the CPU seconds of one call, as Python pays them."""
    begin = time.process_time()
    for batch in batches:
        split(batch)
    return (time.process_time() - begin) / len(batches)


def _highs(batch: np.ndarray, row: np.ndarray, num_ranks: int) -> tuple[float, float]:
    """Returns (LP optimum of the largest rank load, CPU seconds of the solve)."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    slots = np.flatnonzero(row >= 0)
    per_rank = len(row) // num_ranks
    count = len(slots)
    objective = np.zeros(count + 1)
    objective[-1] = 1
    upper = coo_matrix(
        (
            np.concatenate([np.ones(count), -np.ones(num_ranks)]),
            (
                np.concatenate([slots // per_rank, np.arange(num_ranks)]),
                np.concatenate([np.arange(count), np.full(num_ranks, count)]),
            ),
        ),
        shape=(num_ranks, count + 1),
    )
    equal = coo_matrix((np.ones(count), (row[slots], np.arange(count))), shape=(len(batch), count + 1))
    begin = time.process_time()
    found = linprog(objective, A_ub=upper.tocsr(), b_ub=np.zeros(num_ranks), A_eq=equal.tocsr(), b_eq=batch)
    return float(found.fun), time.process_time() - begin


SCALES: dict[str, dict[str, float]] = {
    "own prices": {},
    "compute -30 %, links +30 %": {"gemm_efficiency": 0.7, "hbm_efficiency": 0.7, "link_efficiency": 1.3,
                                   "nic_efficiency_low_latency": 1.3, "nic_efficiency_normal": 1.3},
    "compute +30 %, links -30 %": {"gemm_efficiency": 1.3, "hbm_efficiency": 1.3, "link_efficiency": 0.7,
                                   "nic_efficiency_low_latency": 0.7, "nic_efficiency_normal": 0.7},
}  # fmt: skip


def economics_rows(windows: int = 40) -> Iterable[dict[str, Any]]:
    """The gate on every synthetic family and on a load that flips after each move, scored with other hardware."""
    for family in (*FAMILIES, "flips after each move"):
        shape = SyntheticLoad(family if family in FAMILIES else "lognormal", windows, tokens_per_step=4096)
        records = iter(synthetic_trace(shape)) if family in FAMILIES else None
        ratios, moves, served = _gated(shape, records)
        yield {
            "axis": "economics",
            "instance": f"{V3_EP32.words} on H800, {family}, {windows} windows of {shape.steps_per_window} steps",
            "policy": "gate:incremental",
            "seeds": 1,
            "time ms": "",
            "mean": round(served, 4),
            "min": "",
            "other": "time / doing nothing: "
            + ", ".join(f"{ratio:.4f} ({words})" for words, ratio in zip(SCALES, ratios, strict=True))
            + f"; {moves} experts moved",
            "goal": "<= 1.01",
        }


def _gated(shape: SyntheticLoad, records: Iterator[LoadRecord] | None) -> tuple[list[float], int, float]:
    """Returns (time / time of "do nothing" for each of SCALES, experts moved, mean served balancedness).

    The gate knows the first prices only, so it acts alike on all; each hardware scores what it did. records None: the
    adversary, which sees every move and answers with the other load.
    """
    hardware, model, topology = load_hardware("H800"), load_model_profile("DeepSeek-V3"), V3_EP32.topology
    costs = [ProfileCosts(CostModel(hardware.scaled(**factors), model, topology)) for factors in SCALES.values()]
    settings = ReplaySettings(
        topology,
        V3_EP32.num_slots,
        costs=costs[0],
        gate_cost=costs[0].gate(),
        latency_steps=2,
    )
    start = starting_placement(synthetic_trace(shape), topology, V3_EP32.num_slots)
    run = make_runs("gate:incremental", start, settings)[0]
    scorers = [Scorer(topology, shape.topk, each) for each in costs]
    adversary = FlippingLoad(shape)
    total, floor = np.zeros(len(costs)), np.zeros(len(costs))
    moves, balance = 0, []
    for window in range(shape.num_windows):
        served = run.before(window * shape.steps_per_window, shape.steps_per_window)
        moved = served.moved.num_moves if served.moved is not None else 0
        record = adversary.next_window(moved > 0) if records is None else next(records)
        scores = [scorer.score_served(record, served) for scorer in scorers]
        base = [scorer.score(record, start) for scorer in scorers]
        for index, factors in enumerate(SCALES.values()):
            # Moves take longer at most by the slowest of the scaled parts.
            stall = (served.stall_s or 0.0) / min(factors.values(), default=1.0)
            total[index] += (scores[index].step_s or np.nan) * record.num_steps + stall
            floor[index] += (base[index].step_s or np.nan) * record.num_steps
        moves += moved
        balance.append(float(scores[0].balancedness.mean()))
        run.after(record)
    return (total / floor).tolist(), moves, float(np.mean(balance))


def replay_rows(num_windows: int = 1000) -> Iterable[dict[str, Any]]:
    """Windows of 58 x 256 from an .npz, EP32 and EP320: wall clock, CPU time and memory of the command."""
    fast, all_four = ["deepseek", "greedy", "refined"], ["deepseek", "greedy", "refined", "incremental"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        write_trace(synthetic_trace(SyntheticLoad(num_windows=num_windows)), path)
        yield _replay_row(path, num_windows, [*fast, "static"], 1, "<= 60 s, <= 1 GB")
        yield _replay_row(path, num_windows, all_four, 10, "<= 45 s")
        yield _replay_row(path, num_windows, ["incremental"], 1, "<= 60 s of CPU, <= 1 GB", V3_EP320)


def _replay_row(
    path: Path, num_windows: int, policies: list[str], interval: int, goal: str, shape: Shape = V3_EP32
) -> dict[str, Any]:
    cluster = ["--nodes", str(shape.topology.num_nodes), "--slots", str(shape.num_slots)]
    named = [word for name in policies for word in ("-p", name)]
    command = [sys.executable, "tools/replay_load.py", str(path), *cluster, "--json", "--interval", str(interval)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command + named, cwd=Path(__file__).parents[1], capture_output=True, check=True)
    seconds = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert policies[-1].encode() in done.stdout
    return {
        "axis": "replay",
        "instance": f"{num_windows} windows x {shape.words}, plans every {interval} windows",
        "policy": " + ".join(policies),
        "seeds": 1,
        "time ms": round(1e3 * seconds),
        "mean": "",
        "min": "",
        "other": f"{usage.ru_maxrss / 1e6:.2f} GB in the largest process, "
        f"{usage.ru_utime - before.ru_utime:.0f} s of CPU on all cores",
        "goal": goal,
    }
