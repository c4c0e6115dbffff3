"""Planners behind vLLM's EPLB interface: ours, and vLLM's own where this Python has vLLM.

    PYTHONPATH=. python -m benchmarks.eplb_adapters

Both get the same drifting windows and the placement that their own last plan left, starting with vLLM's initial one. A
plan is made from one window and scored on it (now) and on the next one, which it has not seen. Times are CPU times.
Writes benchmarks/results/eplb_adapters_CPU.md and .json.
"""

import contextlib
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.balancer_instances import Q3_EP16, V3_EP32, V3_EP72, V3_EP144, Shape
from benchmarks.conditions import conditions, save
from moe_serve.adapters.plugin import AdapterSettings
from moe_serve.adapters.vllm import make_policy_class
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement, count_moves
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

ONE_A_RANK = Shape("V3 EP320", 58, 256, 320, Topology(40, 8)), Shape("V3 EP256", 58, 256, 256, Topology(32, 8))
CASES = (
    (V3_EP32, 8), (V3_EP32, 1), (V3_EP72, 1), (V3_EP144, 1), (Q3_EP16, 1), *((shape, 1) for shape in ONE_A_RANK),
)  # fmt: skip
WINDOWS = 8
SEEDS = (0, 1)


def main() -> None:
    facts, theirs = conditions("vllm"), {}
    with contextlib.suppress(ImportError):
        from vllm.distributed.eplb.policy import DefaultEplbPolicy

        theirs = {"vLLM's default": DefaultEplbPolicy}
    found = []
    for shape, num_groups in CASES:
        policies: dict[str, Any] = dict(theirs)
        for name in ("incremental", "refined"):
            policies[f"moe_serve {name}"] = make_policy_class(AdapterSettings(name))
        for name, policy in policies.items():
            runs = [run(policy, shape, num_groups, seed) for seed in SEEDS]
            row = {
                "instance": f"{shape.words}, {shape.topology.num_nodes} nodes, "
                + (f"{num_groups} groups" if num_groups > 1 else "no groups"),
                "policy": name,
                **{key: f"{np.mean([each[key] for each in runs]):{form}}" for key, form in FORMS.items()},
            }
            print(" | ".join(row.values()), flush=True)
            found.append(row)
    notes = (
        f"Log-normal popularity (sigma 0.6) that drifts (rho 0.98), {WINDOWS} windows, a plan after each, seeds "
        f"{SEEDS}. "
        "now, next: balancedness (mean / max of rank load, mean of layers) on the window planned from and on the next. "
        "moves: share of all slots whose rank receives an expert it lacks. The first plan, from vLLM's initial "
        "placement, stands in columns of its own. plan ms: CPU time, median."
    )
    save("eplb_adapters", "Planners behind vLLM's EPLB interface", found, facts, notes, per_cpu=True)


FORMS = {
    "plan ms": ".1f", "now": ".4f", "next": ".4f", "moves": ".1%", "first plan ms": ".1f", "first now": ".4f",
    "first moves": ".1%",
}  # fmt: skip


def run(policy: Any, shape: Shape, num_groups: int, seed: int) -> dict[str, float]:
    """Returns the means over the windows of one seed."""
    drift = SyntheticLoad("lognormal", WINDOWS + 1, shape.num_layers, shape.num_logical, rho=0.98,
                          tokens_per_step=100_000, seed=seed)  # fmt: skip
    windows = [record.tokens for record in synthetic_trace(drift)]
    ranks = shape.topology.num_ranks
    old = torch.from_numpy(np.tile(np.arange(shape.num_slots) % shape.num_logical, (shape.num_layers, 1)))
    lines = []
    for load, after in pairwise(windows):
        begin = time.process_time()
        new = policy.rebalance_experts(
            torch.from_numpy(load.copy()), shape.num_slots, num_groups, shape.topology.num_nodes, ranks, old
        )
        took = 1e3 * (time.process_time() - begin)
        tables = [rows.numpy().astype(np.int32).reshape(shape.num_layers, ranks, -1) for rows in (old, new)]
        lines.append(
            (took, score(new, load, ranks), score(new, after, ranks), count_moves(*tables).sum() / new.numel())
        )
        old = new
    first, rest = lines[0], np.array(lines[1:])
    return {
        "plan ms": float(np.median(rest[:, 0])), "now": rest[:, 1].mean(), "next": rest[:, 2].mean(),
        "moves": rest[:, 3].mean(), "first plan ms": first[0], "first now": first[1], "first moves": first[3],
    }  # fmt: skip


def score(rows: torch.Tensor, load: np.ndarray, num_ranks: int) -> float:
    """Returns the mean balancedness of the layers."""
    placement = Placement(rows.numpy().astype(np.int32), load.shape[1], num_ranks)
    return float(balancedness(rank_load(load, placement), np.arange(num_ranks)).mean())


if __name__ == "__main__":
    main()
