"""One placement for prefill and decode, which like different experts: planned for their sum, or by phase.

    python -m benchmarks.balancer_phases [--seeds 2] [--layers 8]

Both phases run on the same ranks. "sum" is policy refined on all windows together, "by phase" what `moe-serve plan -p
series --by-phase` does, "one each" a placement for each phase alone, as engines have that serve them apart.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.eplb.files.windows import of_phase
from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.plan_trace import TracePlanSettings, plan_from_trace
from moe_serve.topology import Topology

TOPOLOGIES = (Topology(4, 8), Topology(9, 8))
NUM_LOGICAL, NUM_SLOTS, TOPK = 256, 288, 8
PREFILL_TOKENS, DECODE_TOKENS = 16_384, 4_096  # of a step
WINDOWS, STEPS = 10, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    facts, rows = conditions(), []
    for topology, alike, share in product(TOPOLOGIES, (0.0, 0.5, 0.9), (0.5, 0.1)):
        found = [_measured(topology, alike, share, arguments.layers, seed) for seed in range(arguments.seeds)]
        for planned in found[0]:
            prefill, decode, milliseconds = np.mean([each[planned] for each in found], axis=0)
            rows.append(
                {
                    "ranks": topology.num_ranks,
                    "correlation of phases": alike,
                    "steps of prefill": f"{share:.0%}",
                    "planned for": planned,
                    "prefill": f"{prefill:.4f}",
                    "decode": f"{decode:.4f}",
                    "worse phase": f"{min(prefill, decode):.4f}",
                    "plan ms a layer": f"{milliseconds:.1f}",
                }
            )
            print(rows[-1], flush=True)
    notes = (
        f"{arguments.layers}x{NUM_LOGICAL} on {NUM_SLOTS} slots, {arguments.seeds} seeds. Popularity of experts: "
        "exp(0.6 x normal), one profile for each phase, their logarithms correlated as said. Plans are made from "
        f"{WINDOWS} windows of {STEPS} steps with {PREFILL_TOKENS:,} tokens in prefill and {DECODE_TOKENS:,} in decode"
        "; times of steps are not recorded, so phases weigh by their steps. Balance: of later windows with the same "
        "popularity, mean over layers. Plan time: CPU time, on a machine that others were using."
    )
    print(save("balancer_phases", "One placement for two phases", rows, facts, notes, per_cpu=True))


def _measured(
    topology: Topology, alike: float, share: float, num_layers: int, seed: int
) -> dict[str, tuple[float, float, float]]:
    """Returns balance in prefill and in decode, and CPU ms of the plan a layer, by what was planned for."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((2, num_layers, NUM_LOGICAL))
    normal[1] = alike * normal[0] + np.sqrt(1 - alike**2) * normal[1]
    popularity = np.exp(0.6 * normal)
    popularity /= popularity.sum(axis=2, keepdims=True)
    past, later = (LoadTrace.of(_windows(popularity, share, rng)) for _ in range(2))
    found = {}
    for planned in ("sum", "by phase", "one each"):
        begin = time.process_time()
        placements = list(_placements(planned, past, topology))
        plan_s = time.process_time() - begin
        balance = [
            np.mean([balancedness(rank_load(record.tokens, placement)) for record in of_phase(later, phase)])
            for phase, placement in zip(("prefill", "decode"), placements * (3 - len(placements)), strict=True)
        ]
        found[planned] = (float(balance[0]), float(balance[1]), 1e3 * plan_s / num_layers)
    return found


def _windows(popularity: np.ndarray, share: float, rng: np.random.Generator) -> Iterator[LoadRecord]:
    for window in range(WINDOWS):
        for index, (phase, tokens) in enumerate((("prefill", PREFILL_TOKENS), ("decode", DECODE_TOKENS))):
            steps = round(STEPS * (share if phase == "prefill" else 1 - share))
            counts = rng.multinomial(tokens * TOPK * steps, popularity[index])
            yield LoadRecord(window * STEPS, steps, phase, counts)


def _placements(planned: str, trace: LoadTrace, topology: Topology) -> Iterator[Placement]:
    """Yields one placement for both phases, or one for each."""
    parts: dict[str, list[tuple[LoadTrace, dict[str, Any]]]] = {
        "sum": [(trace, {})],
        "by phase": [(trace, {"policy": "series", "by_phase": True})],
        "one each": [(of_phase(trace, phase), {}) for phase in ("prefill", "decode")],
    }
    for windows, options in parts[planned]:
        yield plan_from_trace(windows, TracePlanSettings(topology, NUM_SLOTS, **options)).plan.placement


if __name__ == "__main__":
    main()
