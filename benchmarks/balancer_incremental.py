"""Rows of benchmarks/balancer.py about `incremental`: its C loop beside numpy, prices and limits of moves, its gate."""

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from benchmarks.balancer_instances import Q3_EP16, V3_EP32, V3_EP64, V3_EP72, V3_EP144, Shape
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies import single_edits
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.objectives import sample_batches, split_balance
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.policies.problem import problem_of
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace

GOALS_MS = {V3_EP32.name: "<= 100 ms, ten windows old <= 200 ms", V3_EP72.name: "<= 130 ms, ten windows old <= 200 ms"}


def incremental_rows() -> Iterable[dict[str, Any]]:
    """One plan from a placement that is one window or ten windows old, in C and in numpy."""
    for shape in (V3_EP32, Q3_EP16, V3_EP72):
        loads = _loads(shape, 12)
        current = make_policy("refined").plan(PlanRequest(loads[0], shape.topology, shape.num_slots)).placement
        for age in (1, 10):
            request = PlanRequest(loads[age], shape.topology, shape.num_slots, current=current)
            for form, library in (("C", single_edits.find_library), ("numpy", lambda: None)):
                yield _row(shape, request, f"incremental, {form}", library, age, loads[age + 1])


def _row(shape: Shape, request: PlanRequest, name: str, library: Any, age: int, later: np.ndarray) -> dict[str, Any]:
    kept, single_edits.find_library = single_edits.find_library, library  # numpy: as without a compiler
    times = []
    try:
        for _ in range(5 if name.endswith("C") else 1):
            begin = time.process_time()
            plan = make_policy("incremental").plan(request)
            times.append(time.process_time() - begin)
    finally:
        single_edits.find_library = kept
    served = balancedness(rank_load(later, plan.placement))
    return {
        "axis": "plan time, incremental",
        "instance": f"{shape.words}, lognormal 0.6, rho 0.98, placement of {age} window{'s' if age > 1 else ''} ago",
        "policy": name,
        "seeds": 1,
        "time ms": round(1e3 * float(np.median(times)), 1),
        "mean": round(float(served.mean()), 4),
        "min": round(float(served.min()), 4),
        "other": f"{plan.num_moves} moves; mean and min are those of the next window",
        "goal": GOALS_MS.get(shape.name, ""),
    }


def link_rows() -> Iterable[dict[str, Any]]:
    """Ten windows, a plan in each, served by the exact split: edits for the even split beside those for the exact one.

    Both start from the plan of `refined` for the exact split. Served: mean over batches sampled from the next window.
    """
    for shape, rho in product((V3_EP32, V3_EP64, Q3_EP16), (0.98, 0.9, 0.8, 0.5)):
        loads = _loads(shape, 12, rho)
        first = PlanRequest(loads[0], shape.topology, shape.num_slots, planned_split="exact")
        start = make_policy("refined").plan(first).placement
        for split in ("even", "exact"):
            current, served, moved, times = start, [], [], []
            for index, (now, later) in enumerate(pairwise(loads[1:])):
                request = PlanRequest(now, shape.topology, shape.num_slots, current=current, planned_split=split)
                begin = time.process_time()
                plan = make_policy("incremental").plan(request)
                times.append(time.process_time() - begin)
                moved.append(_moves(current, plan.placement).sum())
                current = plan.placement
                problem = problem_of(replace(request, tokens=later))
                batches = sample_batches(problem.weight, problem.num_ranks, 1000 + index)
                served.append(split_balance(problem, current.by_rank, batches))
            share = np.mean(moved) / (shape.num_layers * shape.num_slots)
            yield {
                "axis": "edits for the exact split",
                "instance": f"{shape.words}, lognormal 0.6, rho {rho}, {len(moved)} plans, served by the exact split",
                "policy": f"incremental, planned split {split}",
                "seeds": 1,
                "time ms": round(1e3 * float(np.median(times)), 1),
                "mean": round(float(np.mean(served)), 4),
                "min": round(float(np.mean([each.min() for each in served])), 4),
                "other": f"{share:.2%} of slots moved by a plan",
                "goal": "" if split == "even" else "more even with fewer moves",
            }


def price_rows() -> Iterable[dict[str, Any]]:
    """Ten windows, a plan in each: a least gain per move, and moves for all layers together beside a cap per layer."""
    limits: list[dict[str, Any]] = [{"min_gain": 0.0}, {}]
    for each in (2, 8):
        limits += [{"max_moves": each}, {"max_total_moves": 58 * each}]
    for shape in (V3_EP32, V3_EP72):
        for limit in limits:
            words = ", ".join(f"{name} {value}" for name, value in limit.items()) or "min_gain of its own"
            row, moved = _followed(shape, "price of moves", words, limit)
            yield row | {
                "other": f"{_mean_sum(moved):.0f} moves a plan, {moved.sum(axis=2).max()} in the layer that moves most"
            }


def rank_limit_rows() -> Iterable[dict[str, Any]]:
    """Ten windows, a plan in each: at most so many experts to one rank of a layer."""
    for shape in (V3_EP32, V3_EP72, V3_EP144):
        for rho, most in product((0.98, 0.9), (None, 2, 1)):
            limit = {} if most is None else {"max_rank_moves": most}
            row, moved = _followed(shape, "experts to one rank", f"max_rank_moves {most}", limit, rho)
            busiest = moved.max(axis=2)
            yield row | {
                "other": f"{_mean_sum(moved):.0f} moves a plan; the busiest rank of a layer receives "
                f"{busiest.mean():.2f} on average, {busiest.max()} at most"
            }


def _followed(
    shape: Shape, axis: str, words: str, limit: dict[str, Any], rho: float = 0.98
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the row of ten plans, each from the last, and the experts that each rank received, [plans, L, R]."""
    loads = _loads(shape, 12, rho)
    current = make_policy("refined").plan(PlanRequest(loads[0], shape.topology, shape.num_slots)).placement
    served, moved, times = [], [], []
    for now, later in pairwise(loads[1:]):
        begin = time.process_time()
        plan = make_policy("incremental").plan(
            PlanRequest(now, shape.topology, shape.num_slots, current=current, **limit)
        )
        times.append(time.process_time() - begin)
        moved.append(_moves(current, plan.placement))
        current = plan.placement
        served.append(balancedness(rank_load(later, current)))
    return {
        "axis": axis,
        "instance": f"{shape.words}, lognormal 0.6, rho {rho}, {len(moved)} plans",
        "policy": f"incremental, {words}",
        "seeds": 1,
        "time ms": round(1e3 * float(np.median(times)), 1),
        "mean": round(float(np.mean(served)), 4),
        "min": round(float(np.mean([each.min() for each in served])), 4),
        "goal": "",
    }, np.array(moved)


def _mean_sum(moved: np.ndarray) -> float:
    return float(moved.sum(axis=(1, 2)).mean())


def gate_rows() -> Iterable[dict[str, Any]]:
    """60 drifting windows: the gate's time over that of the policy that moves in every window, by the same prices."""
    for rho, steps, seed in ((0.98, 1000, 0), (0.98, 200, 0), (0.98, 200, 1), (0.9, 1000, 0), (0.9, 200, 0)):
        drift = SyntheticLoad("lognormal", 60, rho=rho, steps_per_window=steps, tokens_per_step=4096, seed=seed)
        costs = ProfileCosts(CostModel(load_hardware("H800"), load_model_profile("DeepSeek-V3"), V3_EP32.topology))
        settings = ReplaySettings(
            V3_EP32.topology,
            V3_EP32.num_slots,
            costs=costs,
            gate_cost=costs.gate(),
            latency_steps=2,
        )
        always, gated = replay(synthetic_trace(drift), ["incremental", "gate:incremental"], settings, jobs=2).policies
        seconds = [float(run.step_s.sum() * steps + run.stall_s.sum()) for run in (always, gated)]
        served = gated.served.mean(axis=1)[10:]
        zigzag = abs(served[::2].mean() - served[1::2].mean())
        yield {
            "axis": "gate under drift",
            "instance": f"{V3_EP32.words} on H800, lognormal 0.6, rho {rho}, 60 windows of {steps} steps",
            "policy": "gate:incremental",
            "seeds": 1,
            "time ms": "",
            "mean": round(float(gated.served.mean()), 4),
            "min": round(float(gated.served.min()), 4),
            "other": f"time / moving in every window: {seconds[1] / seconds[0]:.4f}, which serves "
            f"{always.served.mean():.4f}; even and odd windows differ by {zigzag:.4f}",
            "goal": "<= 1.01",
        }


def _loads(shape: Shape, num_windows: int, rho: float = 0.98) -> list[np.ndarray]:
    drift = SyntheticLoad("lognormal", num_windows, shape.num_layers, shape.num_logical, rho=rho)
    return [record.tokens for record in synthetic_trace(replace(drift, tokens_per_step=100_000))]


def _moves(old: Placement, new: Placement) -> np.ndarray:
    """Returns how many experts each rank receives, [L, R]."""
    shape = (old.num_layers, old.num_ranks, -1)
    held, wanted = (placement.physical_to_logical.reshape(shape) for placement in (old, new))
    missing = ~(wanted[..., :, None] == held[..., None, :]).any(axis=3) & (wanted >= 0)
    return np.asarray(missing.sum(axis=2))
