"""What each split of a batch makes of a MoE layer's time: the bench model's experts, rank by rank, on one CPU core.

    python -m benchmarks.split_time [--rounds 5] [--ranks 2,4] [--batches 1,4,16,64,256]

Takes six minutes. Every rank's experts run alone, one after the other, in CPU time of one thread; the slowest rank is
the time of the layer, as in a step, in which the others wait for it. To that comes the split itself, which every rank
computes. Rounds take all splits in turn, three times each: the least time of a rank in a layer counts, so that what
else the machine does counts little. Before each time the caches are filled with something else, so that weights are
read anew.
"""

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.bench_model import CONFIG
from benchmarks.conditions import add_isa, conditions, save
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.layer import Int64s
from moe_serve.eplb.split.make import layers_of, make_split
from moe_serve.eplb.split.policy import SplitPolicy, find_library
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.packed import gate_up_size, packed_size
from moe_serve.kernels.huge_pages import zeros_in_huge_pages

Row = dict[str, Any]
SPLITS = ("even", "nearest", "exact", "time")
HIDDEN, WIDTH, EXPERTS, TOPK, LAYERS = (
    int(str(CONFIG[name]))
    for name in ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_hidden_layers")
)
REPEATS = 3
CACHE_BYTES = 128 << 20  # more than caches hold
SKEW = 0.6  # sigma of the lognormal popularity of experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=5, help="four times as many of batches up to 4")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--batches", default="1,4,16,64,256")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(1)
    cpu_library().set_threads(1)
    num_bytes = 4 * 3 * HIDDEN * WIDTH
    rows = []
    for num_ranks in map(int, args.ranks.split(",")):
        for redundant in (num_ranks, 2 * num_ranks, EXPERTS):
            compared = Compared(num_ranks, redundant, ExpertTime.of_cpu(num_bytes, 3 * HIDDEN * WIDTH))
            for batch in map(int, args.batches.split(",")):
                rows.append(compared.row(batch, args.rounds * (4 if batch <= 4 else 1)))
                print(rows[-1], flush=True)
    notes = (
        f"{LAYERS} layers of {EXPERTS} experts in float32, top {TOPK}, hidden {HIDDEN}, width {WIDTH}; experts drawn "
        f"with lognormal popularity, sigma {SKEW}; {args.rounds} rounds, of batches up to 4 four "
        "times as many. Times are CPU times of the slowest rank, the "
        f"least of {REPEATS}, summed over layers, the split of all layers included; gains are medians of the ratios "
        "within a round, in brackets the lowest and the highest. Gap: of the split by time above its bound, in its own "
        f"measure, mean over layers. {args.note}"
    )
    print(save("split_time", "Splits of a batch and the time of its experts", rows, facts, notes))


class Compared:
    """The experts of one number of ranks and of slots, and every split of them."""

    def __init__(self, num_ranks: int, redundant: int, expert_time: ExpertTime):
        draw = np.random.default_rng(0)
        self._popularity = draw.lognormal(0, SKEW, (LAYERS, EXPERTS))
        self._popularity /= self._popularity.sum(axis=1, keepdims=True)
        slots = EXPERTS + redundant
        self._placement = Placement(
            np.stack([_placed(draw, each, num_ranks, slots) for each in self._popularity]), EXPERTS, num_ranks
        )
        self._num_ranks, self._redundant, self._draw, self._time = num_ranks, redundant, draw, expert_time
        library = find_library()
        self._layers = layers_of(self._placement)
        self._splits: dict[str, list[SplitPolicy]] = {
            name: [make_split(name, layer, library, expert_time) for layer in self._layers] for name in SPLITS
        }
        self._other = torch.ones(CACHE_BYTES // 4)
        self._experts = [[_experts(slots // num_ranks) for _ in range(num_ranks)] for _ in range(LAYERS)]

    def row(self, batch: int, rounds: int) -> Row:
        """Returns the row of a batch of this many tokens over all ranks."""
        times: dict[str, list[float]] = {name: [] for name in SPLITS}
        split_us: dict[str, list[float]] = {name: [] for name in SPLITS}
        gaps = []
        for number in range(rounds + 1):
            counts = [self._counts(layer, batch) for layer in range(LAYERS)]
            split_s = dict.fromkeys(SPLITS, np.inf)
            slot_rows: dict[str, list[Int64s]] = {}  # of the first time: the even split has another one each time
            rank_s = {name: np.full((LAYERS, self._num_ranks), np.inf) for name in SPLITS}
            for _ in range(REPEATS):
                for name in SPLITS[number % len(SPLITS) :] + SPLITS[: number % len(SPLITS)]:
                    started_s = time.process_time()
                    again = [split.split(each) for split, each in zip(self._splits[name], counts, strict=True)]
                    split_s[name] = min(split_s[name], time.process_time() - started_s)
                    rows = slot_rows.setdefault(name, again)
                    self._other.sum()
                    used_s = [self._used(layer, each.sum(axis=0)) for layer, each in enumerate(rows)]
                    rank_s[name] = np.minimum(rank_s[name], used_s)
            if number:  # the first warms up
                for name in SPLITS:
                    times[name].append(split_s[name] + float(rank_s[name].max(axis=1).sum()))
                    split_us[name].append(1e6 * split_s[name] / LAYERS)
            gaps += [self._gap(layer, *each) for layer, each in enumerate(zip(counts, slot_rows["time"], strict=True))]
        return {
            "ranks": self._num_ranks,
            "more slots": self._redundant,
            "batch": batch,
            "even ms": round(1e3 * median(times["even"]), 2),
            **{f"time against {name}": _gain(times[name], times["time"]) for name in SPLITS[:-1]},
            "gap": f"{np.mean(gaps):.1%}",
            "split us even, exact, time": ", ".join(f"{median(split_us[n]):.0f}" for n in ("even", "exact", "time")),
        }

    def _counts(self, layer: int, batch: int) -> Int64s:
        counts = np.zeros((self._num_ranks, EXPERTS), dtype=np.int64)
        for token in range(batch):
            chosen = self._draw.choice(EXPERTS, TOPK, replace=False, p=self._popularity[layer])
            counts[token % self._num_ranks, chosen] += 1
        return counts

    def _used(self, layer: int, slot_rows: Int64s) -> list[float]:
        """Returns the CPU seconds of each rank's experts."""
        used = []
        for rank, rows in enumerate(slot_rows.reshape(self._num_ranks, -1)):
            x, counts = torch.ones(int(rows.sum()), HIDDEN), torch.from_numpy(rows)
            out = torch.empty_like(x)
            started_s = time.process_time()
            packed_ffn(x, counts, self._experts[layer][rank], out)
            used.append(time.process_time() - started_s)
        return used

    def _gap(self, layer: int, counts: Int64s, slot_rows: Int64s) -> float:
        """Returns how far the slowest rank is above the bound of exact splits of times, as a share of it."""
        ticks = np.vectorize(self._time.ticks, otypes=[np.int64])
        most = ticks(slot_rows.sum(axis=0)).reshape(self._num_ranks, -1).sum(axis=1).max()
        times: Int64s = ticks(counts.sum(axis=0))
        bound = self._splits["exact"][layer].split_plainly(times[None]).reshape(self._num_ranks, -1).sum(axis=1).max()
        return float(most / max(bound, 1)) - 1


def _gain(others: list[float], own: list[float]) -> str:
    """Returns the share of the other split's time that is saved; negative = it is longer."""
    gains = sorted(1 - mine / other for mine, other in zip(own, others, strict=True))
    return f"{median(gains):+.1%} ({gains[0]:+.1%} to {gains[-1]:+.1%})"


def _placed(draw: np.random.Generator, popularity: np.ndarray, num_ranks: int, slots: int) -> np.ndarray:
    """Returns a layer of the placement: the heaviest experts have a second slot, and no rank has one twice."""
    heavy = np.argsort(-popularity)[: slots - EXPERTS]
    table = np.concatenate([np.arange(EXPERTS), heavy])
    for _ in range(100_000):
        layer = draw.permutation(table)
        if all(len(set(rank)) == len(rank) for rank in layer.reshape(num_ranks, -1).tolist()):
            return layer
    first = np.arange(EXPERTS).reshape(num_ranks, -1)  # every expert twice, where chance finds no such layer
    return np.concatenate([first, np.roll(first, 1, axis=0)], axis=1).reshape(-1)


def _experts(slots: int) -> PackedExperts:
    sizes = gate_up_size(WIDTH, HIDDEN), packed_size(HIDDEN, WIDTH)
    gate_up, down = (zeros_in_huge_pages((slots, size), torch.float32) for size in sizes)
    for tensor, fan_in in ((gate_up, HIDDEN), (down, WIDTH)):
        tensor.copy_(torch.randn(tensor.shape[1]).mul_(fan_in**-0.5))
    return PackedExperts(gate_up, down, HIDDEN, WIDTH, None, None)


if __name__ == "__main__":
    main()
