"""Would plans by time serve sooner than plans by tokens? Both are made from the same batches and serve the next ones.

    python -m benchmarks.plan_time

Counts and no clock, so the numbers are the same on every machine; takes a minute. The split of a batch counts the
reading of an expert's weights as time (moe_serve/eplb/split/time.py); plans count tokens. A plan by time takes, for
each expert, the mean over the batches of the time that all its tokens would take on one rank. Both are made by the
policy `refined`, and each new batch is split by time over either; the slowest rank is the time of the layer.
"""

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.split.make import layers_of, make_split
from moe_serve.eplb.split.policy import find_library
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.topology import Topology

# Experts, experts of a token, ranks, more slots than experts
CASES = (
    (32, 4, 2, 0),
    (32, 4, 4, 0),
    (32, 4, 4, 8),
    (128, 8, 8, 0),
    (128, 8, 8, 16),
    (256, 8, 32, 0),
    (256, 8, 32, 32),
)
BATCHES = (4, 16, 64, 256)  # tokens of all ranks
SKEW = 0.8  # sigma of the lognormal popularity of experts
LAYERS, WINDOW, SEEDS = 4, 16, 4
TIME = ExpertTime(10)  # of a CPU core in float32


def main() -> None:
    facts = conditions()
    rows = []
    for experts, topk, ranks, more in CASES:
        row: dict[str, object] = {"experts": experts, "top": topk, "ranks": ranks, "more slots": more}
        for batch in BATCHES:
            gains = sorted(gain(experts, topk, ranks, more, batch, seed) for seed in range(SEEDS))
            row[f"batch {batch}"] = f"{np.mean(gains):+.1%} ({gains[0]:+.1%} to {gains[-1]:+.1%})"
        rows.append(row)
        print(*row.values(), sep=" | ", flush=True)
    notes = (
        f"Time of the slowest rank saved by plans by time, over {LAYERS} layers and {WINDOW} new batches: mean of "
        f"{SEEDS} seeds, in brackets the lowest and the highest. Experts have lognormal popularity, sigma {SKEW}; an "
        f"expert's weights are read in the time of {TIME.weight_rows} rows. By counts: no machine was timed."
    )
    print(save("plan_time", "Plans by time against plans by tokens, batches split by time", rows, facts, notes))


def gain(experts: int, topk: int, ranks: int, more: int, batch: int, seed: int) -> float:
    """Returns the share of time that a plan by time saves; negative = it takes longer."""
    rng = np.random.default_rng(seed)
    popularity = rng.lognormal(0, SKEW, (LAYERS, experts))
    seen, new = (drawn(popularity, batch, topk, rng) for _ in range(2))
    ticks = np.vectorize(TIME.ticks, otypes=[np.int64])
    by_tokens, by_time = (
        served_time(planned(load, ranks, experts + more), new) for load in (seen.sum(axis=0), ticks(seen).sum(axis=0))
    )
    return 1 - by_time / by_tokens


def drawn(popularity: np.ndarray, batch: int, topk: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the tokens of each expert in WINDOW batches, [WINDOW, L, E]; a token chooses topk different experts."""
    num_layers, experts = popularity.shape
    keys = np.log(popularity)[None, :, None] + rng.gumbel(size=(WINDOW, num_layers, batch, experts))
    chosen = np.argpartition(-keys, topk - 1, axis=3)[..., :topk].reshape(WINDOW, num_layers, -1)
    return np.stack([[np.bincount(ids, minlength=experts) for ids in layers] for layers in chosen])


def planned(load: np.ndarray, ranks: int, slots: int) -> Placement:
    return make_policy("refined").plan(PlanRequest(load.astype(np.float64), Topology(1, ranks), slots)).placement


def served_time(placement: Placement, batches: np.ndarray) -> int:
    """Returns the ticks of the slowest ranks, over layers and batches [B, L, E]."""
    ranks, total, library = placement.num_ranks, 0, find_library()
    ticks = np.vectorize(TIME.ticks, otypes=[np.int64])
    for layer, slots in enumerate(layers_of(placement)):
        split = make_split("time", slots, library, TIME)
        for counts in batches[:, layer]:
            by_source = np.zeros((ranks, len(counts)), dtype=np.int64)
            by_source[0] = counts
            rows = split.split(by_source).sum(axis=0)
            total += int(ticks(rows).reshape(ranks, -1).sum(axis=1).max())
    return total


if __name__ == "__main__":
    main()
