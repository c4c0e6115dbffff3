"""Planning measured against DeepSeek's EPLB: balance, time, moves. Called by benchmarks/balancer.py; also runs alone.

    OMP_NUM_THREADS=1 python -m benchmarks.balancer_planning --eplb path/to/eplb.py --seeds 0-9

Instances are frozen here and drawn from moe_serve.eplb.synthetic. Times are process time of one thread. Without --eplb
the column "eplb" is our `deepseek` policy, whose output is the same; its time is not EPLB's and is not shown.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policy import Plan, PlanRequest, make_policy
from moe_serve.eplb.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

Tokens = NDArray[np.int64]
Eplb = Callable[[Tokens, int, int, int, int], Tokens]  # tokens, slots, groups, nodes, ranks -> physical_to_logical


@dataclass(frozen=True)
class Instance:
    """One load and one cluster. `policies` are ours, `goal` is what the issue asks of the last of them."""

    name: str
    family: str
    skew: float
    num_layers: int
    num_logical: int
    num_slots: int
    num_nodes: int
    ranks_per_node: int
    policies: tuple[str, ...] = ("greedy", "refined")
    num_groups: int | None = None
    off_home: float = 1.0
    goal: str = ""

    def load(self, seed: int, num_windows: int = 1) -> list[Tokens]:
        """Returns the tokens of each window, [L, E]."""
        trace = synthetic_trace(
            SyntheticLoad(
                family=self.family,
                skew=self.skew,
                num_layers=self.num_layers,
                num_logical=self.num_logical,
                num_groups=self.num_groups or 8,
                num_windows=num_windows,
                seed=seed,
            )
        )
        return [record.tokens for record in trace]

    @property
    def topology(self) -> Topology:
        return Topology(self.num_nodes, self.ranks_per_node)


def _v3(name: str, family: str, skew: float, nodes: int, **more: object) -> Instance:
    return Instance(f"V3 288/{8 * nodes} {name}", family, skew, 58, 256, 288, nodes, 8, **more)  # type: ignore[arg-type]


PLANNING = (
    _v3("lognormal .6", "lognormal", 0.6, 4, goal="greedy <= 5 ms, refined <= 100 ms; mean >= .998, min >= .995"),
    _v3("lognormal 1", "lognormal", 1.0, 4, goal="mean >= .998, min >= .995"),
    _v3("Zipf .8", "zipf", 0.8, 4, goal="mean >= .998, min >= .995"),
    _v3("lognormal .6", "lognormal", 0.6, 9, goal="mean >= .998, min >= .995"),
    _v3("Zipf .5", "zipf", 0.5, 9, goal="mean >= .998"),
    _v3("Zipf .5", "zipf", 0.5, 18, goal="greedy <= 100 ms at EPLB's balance; refined >= .82 in <= 2 s"),
    _v3("lognormal .6", "lognormal", 0.6, 18),
    Instance("Q3 192/64 Zipf 1", "zipf", 1.0, 94, 128, 192, 8, 8, goal=">= .99"),
    Instance("Q3 144/16 lognormal .6", "lognormal", 0.6, 94, 128, 144, 2, 8, goal="mean >= .998, min >= .995"),
    _v3("one expert 30 %, soft .20", "hot", 0.3, 4, num_groups=8, off_home=0.20, goal=">= .90, off home <= 20 %"),
    _v3("groups, soft .08", "group", 0.6, 4, num_groups=8, off_home=0.08, goal=">= .90, off home <= 8 %"),
)
CHURN = (
    (_v3("lognormal .6 rho .98", "lognormal", 0.6, 4, goal="<= 6 % moves, within .01 of EPLB"), None),
    (Instance("Q3 144/16 rho .98", "lognormal", 0.6, 94, 128, 144, 2, 8, goal="<= 6 %, within .01"), None),
    (_v3("lognormal .6 rho .98", "lognormal", 0.6, 9, goal="<= 15 %, within .01"), None),
    (_v3("lognormal .6 rho .98", "lognormal", 0.6, 18, goal="<= 15 %, within .01"), 43),
    (_v3("lognormal .6 rho .98", "lognormal", 0.6, 18, goal="<= 15 %, within .01"), None),
)


@dataclass(frozen=True)
class PlanRow:
    """One call: policy, time, mean and min belong together."""

    instance: str
    policy: str
    seed: int
    process_s: float
    mean: float
    worst: float
    bound: float
    duplicates: float
    off_home: float
    goal: str


@dataclass(frozen=True)
class ChurnRow:
    """Several windows, each planned on what was and scored on what came next."""

    instance: str
    policy: str
    seed: int
    fit: float
    served: float
    moves: float
    process_s: float
    goal: str


def load_eplb(path: str | Path) -> Eplb:
    """Returns DeepSeek's own rebalance_experts from the file at `path` (it needs torch)."""
    import torch

    spec = importlib.util.spec_from_file_location("deepseek_eplb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(tokens: Tokens, slots: int, groups: int, nodes: int, ranks: int) -> Tokens:
        out: Tokens = module.rebalance_experts(torch.tensor(tokens), slots, groups, nodes, ranks)[0].numpy()
        return out

    return call


def planning_rows(instance: Instance, seed: int, eplb: Eplb | None = None) -> Iterator[PlanRow]:
    """Yields EPLB's row and one per policy of ours, on the same load."""
    tokens = instance.load(seed)[0]
    groups = instance.num_groups or 1
    if eplb is not None:
        started = time.process_time()
        table = eplb(tokens, instance.num_slots, groups, instance.num_nodes, instance.topology.num_ranks)
        spent = time.process_time() - started
        placement = Placement(table, instance.num_logical, instance.topology.num_ranks)
        reached = balancedness(rank_load(tokens, placement))
        yield PlanRow(
            instance.name,
            "eplb",
            seed,
            spent,
            float(reached.mean()),
            float(reached.min()),
            1.0,
            float(placement.num_duplicates.mean()),
            0.0,
            "",
        )
    for name in instance.policies:
        policy = make_policy(name)
        request = PlanRequest(
            tokens, instance.topology, instance.num_slots, num_groups=instance.num_groups, off_home=instance.off_home
        )
        policy.plan(request)  # warm: imports and first-touch of memory
        started = time.process_time()
        plan = policy.plan(request)
        yield _plan_row(instance, name, seed, time.process_time() - started, plan)


def _plan_row(instance: Instance, name: str, seed: int, spent: float, plan: Plan) -> PlanRow:
    return PlanRow(
        instance.name,
        name,
        seed,
        spent,
        float(plan.balancedness.mean()),
        float(plan.balancedness.min()),
        float(plan.bound.mean()),
        float(plan.placement.num_duplicates.mean()),
        0.0 if plan.off_home is None or instance.off_home >= 1 else float(plan.off_home.max()),
        instance.goal,
    )


def churn_rows(
    instance: Instance, seed: int, max_moves: int | None = None, num_windows: int = 8, policy: str = "incremental"
) -> Iterator[ChurnRow]:
    """Yields EPLB's placements (by our `deepseek`, whose output is the same) and ours over drifting windows."""
    loads = instance.load(seed, num_windows)
    for name, budget in (("deepseek", None), ("static", None), (policy, max_moves)):
        planner = make_policy(name)
        current = make_policy("refined").plan(_request(instance, loads[0], None, None)).placement
        fits, served, moves, spent = [], [], [], 0.0
        for now, following in pairwise(loads[1:]):
            started = time.process_time()
            plan = planner.plan(_request(instance, now, current, budget))
            spent += time.process_time() - started
            current = plan.placement
            fits.append(plan.balancedness.mean())
            served.append(balancedness(rank_load(following, current)).mean())
            moves.append(plan.num_moves / current.physical_to_logical.size)
        label = name if budget is None else f"{name}, {budget} moves"
        yield ChurnRow(
            instance.name,
            label,
            seed,
            float(np.mean(fits)),
            float(np.mean(served)),
            float(np.mean(moves)),
            spent / len(fits),
            instance.goal if name == policy else "",
        )


def _request(instance: Instance, tokens: Tokens, current: Placement | None, max_moves: int | None) -> PlanRequest:
    return PlanRequest(tokens, instance.topology, instance.num_slots, current=current, max_moves=max_moves)


def summary(rows: Sequence[PlanRow] | Sequence[ChurnRow]) -> list[dict[str, float | str]]:
    """Returns one row per (instance, policy): means over seeds, the worst of `worst`, the largest time and off_home."""
    groups: dict[tuple[str, str, str], list[dict[str, float | str]]] = {}
    for row in rows:
        groups.setdefault((row.instance, row.policy, row.goal), []).append(asdict(row))
    out: list[dict[str, float | str]] = []
    for (instance, policy, goal), many in groups.items():
        line: dict[str, float | str] = {"instance": instance, "policy": policy, "seeds": len(many)}
        for key in many[0]:
            if key in ("instance", "policy", "seed", "goal"):
                continue
            values = np.array([m[key] for m in many], dtype=float)
            if key == "worst":
                line[key] = float(values.min())
            elif key in ("process_s", "off_home"):
                line[key] = float(values.max() if key == "off_home" else np.median(values))
            else:
                line[key] = float(values.mean())
        line["goal"] = goal
        out.append(line)
    return out


def print_rows(lines: Sequence[dict[str, float | str]]) -> None:
    """Prints one line per row."""
    for line in lines:
        numbers = "  ".join(f"{k} {v:.4f}" for k, v in line.items() if isinstance(v, float))
        print(f"{line['instance']:32s} {line['policy']:24s} {numbers}   {line['goal']}", flush=True)


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    """Measures all instances and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eplb", help="path of DeepSeek's eplb.py")
    parser.add_argument("--seeds", type=_seeds, default=[0], help="e.g. 0-9")
    parser.add_argument("--churn-seeds", type=_seeds, default=[0])
    parser.add_argument("--json", help="write all rows here")
    args = parser.parse_args()
    eplb = load_eplb(args.eplb) if args.eplb else None
    planned = [row for i in PLANNING for seed in args.seeds for row in planning_rows(i, seed, eplb)]
    print_rows(summary(planned))
    churned = [row for i, budget in CHURN for seed in args.churn_seeds for row in churn_rows(i, seed, budget)]
    print_rows(summary(churned))
    if args.json:
        rows = [asdict(row) for row in (*planned, *churned)]
        Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
