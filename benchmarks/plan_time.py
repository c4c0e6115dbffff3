"""Would plans by time serve sooner than plans by tokens? Both are made from the same windows and serve new batches.

    python -m benchmarks.plan_time

Counts and no clock, so the numbers are the same on every machine; takes six minutes. The split of a batch counts the
reading of an expert's weights as time (moe_serve/eplb/split/time.py). A plan by time counts it too: of each expert, the
mean time that all its tokens of a batch take on one rank, from the sums of a window, as a server knows them. Each new
batch is split by time over either plan; the slowest rank is the time of the layer. `incremental` is a server's policy;
`refined` plans for the exact split, as replays by such splits do.
"""

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.split.make import make_splits
from moe_serve.eplb.split.policy import find_library
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.topology import Topology

# Experts, experts of a token, ranks, more slots than experts
CASES = (
    (32, 4, 2, 0), (32, 4, 2, 4), (32, 4, 4, 0), (32, 4, 4, 8), (128, 8, 8, 0), (128, 8, 8, 16), (128, 8, 16, 0),
    (128, 8, 16, 16), (256, 8, 16, 32), (256, 8, 32, 0), (256, 8, 32, 32),
)  # fmt: skip
CASES_OF_GPUS = ((128, 8, 8, 16), (128, 8, 16, 16), (256, 8, 32, 0), (256, 8, 32, 32))
BATCHES = (4, 16, 64, 256)  # tokens of all ranks
SKEW = 0.8  # sigma of the lognormal popularity of experts
LAYERS, SEEN, NEW, SEEDS = 4, 128, 24, 8
TIMES = {"CPU core, float32": ExpertTime(10), "H800, FP8": ExpertTime(300, 64)}
POLICIES = {"incremental": "even", "refined": "exact"}  # and what they plan for


def main() -> None:
    facts = conditions()
    rows = []
    for device, time in TIMES.items():
        for experts, topk, ranks, more in CASES if time == TIMES["CPU core, float32"] else CASES_OF_GPUS:
            found = [[gains(time, experts, topk, ranks, more, b, seed) for seed in range(SEEDS)] for b in BATCHES]
            for number, policy in enumerate(POLICIES):
                row = {"device": device, "policy": policy, "experts": experts, "top": topk, "ranks": ranks}
                row["more slots"] = more
                for batch, by_seed in zip(BATCHES, np.array(found), strict=True):
                    each = by_seed[:, number]
                    row[f"batch {batch}"] = f"{each.mean():+.1%} ({each.min():+.1%} to {each.max():+.1%})"
                rows.append(row)
                print(*row.values(), sep=" | ", flush=True)
    notes = (
        f"Time of the slowest rank saved by plans by time, over {LAYERS} layers and {NEW} new batches; plans are made "
        f"from a window of {SEEN} batches. Mean of {SEEDS} seeds, in brackets the lowest and the highest. Experts have "
        f"lognormal popularity, sigma {SKEW}; an expert's weights are read in the time of "
        + ", ".join(f"{time.weight_rows} rows ({device})" for device, time in TIMES.items())
        + ". By counts: no machine was timed."
    )
    print(save("plan_time", "Plans by time against plans by tokens, batches split by time", rows, facts, notes))


def gains(time: ExpertTime, experts: int, topk: int, ranks: int, more: int, batch: int, seed: int) -> list[float]:
    """Returns the share of time that a plan by time saves, for each policy; negative = it takes longer."""
    rng = np.random.default_rng(seed)
    popularity = rng.lognormal(0, SKEW, (LAYERS, experts))
    tokens = drawn(popularity, batch, topk, SEEN, rng).mean(axis=0)
    new = drawn(popularity, batch, topk, NEW, rng)
    start = Placement.trivial(LAYERS, experts, ranks, more)
    found = []
    for policy, planned_split in POLICIES.items():
        took = []
        for load in (tokens, time.mean_rows(tokens)):
            request = PlanRequest(load, Topology(1, ranks), experts + more, start, planned_split=planned_split)
            took.append(served_time(make_policy(policy).plan(request).placement, new, time))
        found.append(1 - took[1] / took[0])
    return found


def drawn(popularity: np.ndarray, batch: int, topk: int, num: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the tokens of each expert in so many batches, [num, L, E]; a token chooses topk different experts."""
    num_layers, experts = popularity.shape
    counts = np.zeros((num, num_layers, experts), dtype=np.int64)
    for table in counts:
        keys = rng.gumbel(size=(num_layers, batch, experts)) + np.log(popularity)[:, None]
        chosen = np.argpartition(-keys, topk - 1, axis=2)[..., :topk].reshape(num_layers, -1)
        for layer, ids in enumerate(chosen):
            table[layer] = np.bincount(ids, minlength=experts)
    return counts


def served_time(placement: Placement, batches: np.ndarray, time: ExpertTime) -> float:
    """Returns the time of the slowest ranks, summed over batches and layers [B, L, E], in rows."""
    splits, total = make_splits("time", placement, None, find_library(), time), 0.0
    for counts in batches:
        rows = np.array([split.split(each) for split, each in zip(splits, counts, strict=True)])
        total += time.rows_of(rows).reshape(len(rows), placement.num_ranks, -1).sum(axis=2).max(axis=1).sum()
    return total


if __name__ == "__main__":
    main()
