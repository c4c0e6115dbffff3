"""Plans for a series of windows beside plans for their sum and for the latest window: balance served in the next one.

    python -m benchmarks.balancer_series [--seeds 2] [--layers 4] [--windows 24]

Equal limits of moves per layer and plan, and a plan in every window, from a placement that fits the first one. "sum",
"fading sum" and "latest" are policy incremental on the last four windows together, all alike or fading, and on the last
one alone.
"""

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

HISTORY, DECAY = 4, 0.5
TOPOLOGY, NUM_LOGICAL, NUM_SLOTS = Topology(4, 8), 256, 288
LOADS: dict[str, dict[str, Any]] = {
    "days and nights, turning every window": {"family": "swing", "period": 1},
    "days and nights, turning every 4 windows": {"family": "swing", "period": 4},
    "bursts of domains": {"family": "bursts", "period": 5},
    "slow drift, rho 0.98": {"family": "lognormal", "rho": 0.98},
    "fast drift, rho 0.9": {"family": "lognormal", "rho": 0.9},
    "jumps": {"family": "jumps", "period": 8},
}
BUDGETS = (4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--windows", type=int, default=24)
    arguments = parser.parse_args()
    facts = conditions()
    rows: list[dict[str, Any]] = []
    for words, options in LOADS.items():
        for budget in BUDGETS:
            for plan in ("sum", "fading sum", "latest", "series"):
                courses = [follow(plan, budget, options, seed, arguments) for seed in range(arguments.seeds)]
                served, worst, moves, plan_ms = np.mean(courses, axis=0)
                rows.append(
                    {
                        "load": words,
                        "max_moves": budget,
                        "planned for": plan,
                        "served": f"{served:.4f}",
                        "worst layer": f"{worst:.4f}",
                        "moves a layer and plan": f"{moves:.2f}",
                        "plan ms a layer": f"{plan_ms:.1f}",
                    }
                )
                print(rows[-1], flush=True)
    notes = (
        f"{arguments.layers}x{NUM_LOGICAL} on {NUM_SLOTS} slots of {TOPOLOGY.num_ranks} ranks, {arguments.seeds} "
        f"seeds, {arguments.windows} windows of 100 steps of 16,384 tokens. Sum: the last {HISTORY} windows together, "
        f"all alike; fading sum: each counts {DECAY} of the next newer one; series: one by one, fading likewise. "
        "Served: balance of the window after the plan. Plan time: mean CPU time, on a machine that others were using."
    )
    print(save("balancer_series", "Plans for a series of windows", rows, facts, notes, per_cpu=True))


def follow(
    plan: str, budget: int, options: dict[str, Any], seed: int, arguments: argparse.Namespace
) -> tuple[float, float, float, float]:
    """Returns the balance served, that of the worst layer, moves and CPU ms of a plan, both per layer: means."""
    load = SyntheticLoad(num_windows=arguments.windows, num_layers=arguments.layers, seed=seed, **options)
    windows = [record.tokens for record in synthetic_trace(load)]
    current = make_policy("refined").plan(PlanRequest(windows[0], TOPOLOGY, NUM_SLOTS)).placement
    served, worst, moves, plan_s = [], [], [], []
    for now in range(HISTORY - 1, len(windows) - 1):
        past = np.array(windows[now - HISTORY + 1 : now + 1])
        weights = tuple(DECAY**age for age in range(HISTORY)[::-1])
        tokens = past[-1] if plan == "latest" else past.sum(axis=0)
        if plan == "fading sum":
            tokens = np.tensordot(weights, past, axes=1)
        series = {"series": past, "series_weights": weights} if plan == "series" else {}
        request = PlanRequest(tokens, TOPOLOGY, NUM_SLOTS, current=current, max_moves=budget, **series)
        begin = time.process_time()
        made = make_policy("series" if plan == "series" else "incremental").plan(request)
        plan_s.append(time.process_time() - begin)
        current = made.placement
        balance = balancedness(rank_load(windows[now + 1], current))
        served.append(balance.mean())
        worst.append(balance.min())
        moves.append(made.num_moves / arguments.layers)
    return (
        float(np.mean(served)),
        float(np.mean(worst)),
        float(np.mean(moves)),
        1e3 * float(np.mean(plan_s)) / arguments.layers,
    )


if __name__ == "__main__":
    main()
