"""Planning rows: time, balance and duplicates of one call per seed, beside DeepSeek's eplb.py."""

import importlib.util
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancer_instances import (
    HELD_OUT_SEEDS,
    Q3_EP16,
    Q3_EP32,
    Q3_EP64,
    SEEDS,
    V3_EP32,
    V3_EP72,
    V3_EP144,
    Shape,
    load,
)
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest

Planner = Callable[[NDArray[np.int64], Shape], tuple[Placement, float | None]]  # -> placement, off-home share


def load_eplb(path: Path) -> Any:
    """Returns DeepSeek's eplb.py as a module."""
    spec = importlib.util.spec_from_file_location("deepseek_eplb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def eplb_planner(eplb: Any, hierarchical: bool = False) -> Planner:
    """Returns DeepSeek's code as a planner; global unless hierarchical."""
    import torch

    torch.set_num_threads(1)

    def plan(tokens: NDArray[np.int64], shape: Shape) -> tuple[Placement, float | None]:
        groups, nodes = (shape.num_groups, shape.topology.num_nodes) if hierarchical else (1, 1)
        weight = torch.from_numpy(tokens)
        table, _, _ = eplb.rebalance_experts(weight, shape.num_slots, groups, nodes, shape.topology.num_ranks)
        return Placement(table.numpy(), shape.num_logical, shape.topology.num_ranks), None

    return plan


def our_planner(policy: str, off_home: float = 1.0, **options: Any) -> Planner:
    """Returns one of our policies as a planner."""

    def plan(tokens: NDArray[np.int64], shape: Shape) -> tuple[Placement, float | None]:
        groups = shape.num_groups if off_home < 1 else None
        request = PlanRequest(tokens, shape.topology, shape.num_slots, num_groups=groups, off_home=off_home)
        made = make_policy(policy, **options).plan(request)
        away = None if made.off_home is None or off_home == 1 else float(made.off_home.mean())
        return made.placement, away

    return plan


def measure(
    axis: str, goal: str, shape: Shape, kind: str, skew: float | None, name: str, planner: Planner, seeds: Iterable[int]
) -> dict[str, Any]:
    """Returns a row: median CPU time of a call, mean over seeds of the mean layer, worst layer of all seeds."""
    times, means, worst, duplicates, away = [], [], [], 0, []
    for seed in seeds:
        tokens = load(shape, kind, seed, skew)
        begin = time.process_time()
        placement, off_home = planner(tokens, shape)
        times.append(time.process_time() - begin)
        balance = balancedness(rank_load(tokens, placement))
        means.append(float(balance.mean()))
        worst.append(float(balance.min()))
        duplicates = max(duplicates, int(placement.num_duplicates.max()))
        if off_home is not None:
            away.append(off_home)
    return {
        "axis": axis,
        "instance": f"{shape.words}, {kind}{'' if skew is None else f' {skew:g}'}",
        "policy": name,
        "seeds": len(means),
        "time ms": round(1e3 * float(np.median(times)), 2),
        "mean": round(float(np.mean(means)), 4),
        "min": round(float(np.min(worst)), 4),
        "other": f"{duplicates} duplicates a layer at most" + (f", {np.mean(away):.1%} off home" if away else ""),
        "goal": goal,
    }


def rows(eplb: Any, eplb_seeds: int, only: str = "") -> Iterable[dict[str, Any]]:
    """Yields the planning rows. eplb None: without DeepSeek's code. eplb_seeds: of it; a call takes seconds."""
    theirs = eplb_planner(eplb) if eplb is not None else None
    fast, full = our_planner("greedy"), our_planner("refined")
    ours = {"greedy": fast, "refined": full}
    tasks: list[tuple[str, str, Shape, str, float | None, dict[str, Planner]]] = [
        ("plan time EP32", "greedy <= 5 ms, refined <= 100 ms", V3_EP32, "lognormal", 0.6, ours),
        ("plan time EP32", "", V3_EP32, "zipf", 0.8, ours),
        ("plan time EP144", "<= 100 ms at EPLB's balance; <= 2 s search", V3_EP144, "lognormal", 0.6, ours),
        (">= 4 slots a rank", "mean >= 0.998, min >= 0.995", V3_EP72, "lognormal", 0.6, {"refined": full}),
        (">= 4 slots a rank", "mean >= 0.998, min >= 0.995", Q3_EP16, "lognormal", 0.6, {"refined": full}),
        (">= 4 slots a rank", "mean >= 0.998, min >= 0.995", Q3_EP32, "lognormal", 0.6, {"refined": full}),
        ("2-4 slots a rank", ">= 0.998", V3_EP72, "zipf", 0.5, {"refined": full}),
        ("2-4 slots a rank", ">= 0.82", V3_EP144, "zipf", 0.5, ours),
        ("2-4 slots a rank", ">= 0.99", Q3_EP64, "zipf", 1.0, {"refined": full}),
    ]
    for axis, goal, shape, kind, skew, planners in tasks:
        if only not in axis:
            continue
        if theirs is not None:
            yield measure(axis, "", shape, kind, skew, "DeepSeek eplb.py", theirs, SEEDS[:eplb_seeds])
        for name, planner in planners.items():
            yield measure(axis, goal, shape, kind, skew, name, planner, SEEDS)
            yield measure(axis, goal, shape, kind, skew, f"{name}, held-out seeds", planner, HELD_OUT_SEEDS)
    for kind, skew, dial, goal in (
        ("hot", 0.3, 0.2, ">= 0.90 at <= 20 % off home"),
        ("group", 0.6, 0.08, ">= 0.90 at <= 8 % off home"),
    ):
        if only not in "node hierarchy":
            continue
        if eplb is not None:
            hard = eplb_planner(eplb, hierarchical=True)
            yield measure("node hierarchy", "", V3_EP32, kind, skew, "DeepSeek eplb.py", hard, SEEDS[:eplb_seeds])
        soft = our_planner("refined", dial)
        yield measure("node hierarchy", goal, V3_EP32, kind, skew, f"refined, off_home {dial:g}", soft, SEEDS)
        yield measure("node hierarchy", goal, V3_EP32, kind, skew, "held-out seeds", soft, HELD_OUT_SEEDS)
