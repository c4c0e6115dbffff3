"""A whole MoE layer at once and in two halves, on two ranks over shared memory, as it is and behind slower links.

    python -m benchmarks.overlap [--repeats 9]

One batch against two halves that take turns, at sizes on both sides of the break-even and at large ones. It is a single
layer, where nothing hides the first half's rows and the last one's results; in a step, attention does. Every repeat
runs all variants one after the other, on both ranks at once; the slower rank counts, and of all repeats the best.
"""

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.conditions import RESULTS, add_isa, conditions, save, table
from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel, MoeLayer, MoeWeights, take_turns
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import FAST
from tests.dispatch.delayed import DelayedAllToAll
from tests.ranks import run_ranks

NUM_RANKS, HIDDEN, WIDTH, NUM_EXPERTS, TOPK = 2, 1024, 512, 16, 4
SMALL = (1, 4, 16, 64, 128, 256, 512)  # tokens of each rank
LARGE = (1024, 2048)
HERE = "shared memory"
LINKS = {HERE: 0.0, "1 GB/s": 1e9, "400 MB/s": 4e8, "100 MB/s": 1e8}  # bytes per second; 0: no delay
TOKEN_BYTES = 2 * TOPK * HIDDEN * 4  # out and home, float32


@dataclass(frozen=True)
class Variant:
    link: str
    num_tokens: int
    num_halves: int  # 1: the whole batch


Times = Mapping[Variant, float]  # seconds of the slower rank in the best repeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    facts = conditions()
    # Neighbours in this order have other experts, so that none finds its weights in the cache.
    halves = run([Variant(link, tokens, n) for tokens in SMALL for n in (1, 2) for link in LINKS], args.repeats)
    evens = [break_even(halves, link) for link in LINKS]
    whole = run([Variant(link, tokens, n) for tokens in LARGE for n in (1, 2) for link in LINKS], args.repeats // 2)
    rows = [row(halves, link, tokens) for link in LINKS for tokens in SMALL]
    large = [row(whole, link, tokens) for link in LINKS for tokens in LARGE]
    text = save(
        "overlap", "Halves of a batch that overlap in an MoE layer", rows, facts, notes(evens, large, args.repeats)
    )
    path = RESULTS / "overlap.json"
    record = json.loads(path.read_text()) | {"break_even": evens, "large": large}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(text)


def notes(evens: list[dict[str, Any]], large: list[dict[str, Any]], repeats: int) -> str:
    return (
        f"One layer: hidden {HIDDEN}, width {WIDTH}, {NUM_EXPERTS} experts, top-{TOPK}, float32, no shared expert; "
        f"{NUM_RANKS} ranks with one thread each, pinned, at raised priority where allowed, T tokens each; "
        "neighbouring variants have different experts, so that weights come out of memory as in a model. Times are the "
        f"best of {repeats} interleaved repeats (large batches: half as many) of the slower rank, since other work on "
        f"the machine can only lengthen them; load average at the end: {os.getloadavg()[0]:.2f}. In turn: one batch. A "
        f"link carries one row for each (token, expert) and way, {TOKEN_BYTES // 1024} KiB a token on both "
        "(`tests/dispatch/delayed.py`). Transfer: those bytes at the link's rate. Compute: the layer in turn over "
        "shared memory, copies and waits for the other rank included. Speed: time in turn over time overlapped. "
        "Hidden: time in turn less time overlapped, as a share of the shorter of transfer and compute; above 100 % "
        "where smaller batches are faster by themselves.\n\n"
        f"## Where two halves begin to pay\n\n{table(evens)}\n\n"
        "Measured: where the speed above passes 1, between two sizes on a line over log T. Predicted: from the "
        "rows of shared memory alone, by `break_even_tokens(two halves - one batch, bytes of a token, rate)`.\n\n"
        f"## Large batches\n\n{table(large)}"
    )


def run(variants: Sequence[Variant], repeats: int) -> Times:
    slowest = np.max(run_ranks(NUM_RANKS, measure, variants, repeats, timeout_s=1200), axis=0)  # [repeats, variants]
    return dict(zip(variants, slowest.min(axis=0).tolist(), strict=True))


def measure(rank: int, group: EpGroup, variants: Sequence[Variant], repeats: int) -> list[list[float]]:
    """Returns the seconds of every variant in every repeat on this rank."""
    torch.manual_seed(rank)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:  # the pool's processes end with this run
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with contextlib.suppress(OSError):  # allowed to few; a rank that is preempted stops the other
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    largest = max(variant.num_tokens for variant in variants)
    limits = BufferLimits(largest, HIDDEN, TOPK, NUM_EXPERTS // NUM_RANKS)
    transport = make_all_to_all(group, TransportRequest("low_latency", limits, torch.float32))
    layers = make_layers(rank, group, transport, largest)
    inputs = torch.randn(largest, HIDDEN)

    def once(variant: Variant) -> float:
        transport.exchange_counts(torch.zeros(1, dtype=torch.int64)).wait()  # both ranks begin together
        started_s = time.perf_counter()
        parts = inputs[: variant.num_tokens].tensor_split(variant.num_halves)
        take_turns([layers[variant.link](part, len(part), 1) for part in parts])
        return time.perf_counter() - started_s

    return [[once(variant) for variant in variants] for _ in range(repeats + 1)][1:]


def make_layers(rank: int, group: EpGroup, transport: AnyAllToAll, largest: int) -> dict[str, MoeLayer]:
    """Returns one layer for each link, over experts of its own."""
    spec = RouterSpec(NUM_EXPERTS, TOPK, "softmax", norm_topk=True)
    placement = Placement.trivial(1, NUM_EXPERTS, NUM_RANKS)
    slots = placement.slots_per_rank
    gate = torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(7))
    layers: dict[str, MoeLayer] = {}
    for name, bytes_per_s in LINKS.items():
        link = DelayedAllToAll(transport, bytes_per_s) if bytes_per_s else transport
        recorder = LoadRecorder(1, NUM_EXPERTS, group)
        parallel = ExpertParallel(rank, spec, link, ReplicaMap(placement), recorder, largest, FAST)
        experts = {
            "gate_up": torch.randn(slots, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
            "down": torch.randn(slots, HIDDEN, WIDTH) / WIDTH**0.5,
        }
        layers[name] = MoeLayer(parallel, 0, MoeWeights(gate, None, ExpertStore(experts)))
    return layers


def row(times: Times, link: str, tokens: int) -> dict[str, Any]:
    in_turn_s, overlapped_s = (times[Variant(link, tokens, num_halves)] for num_halves in (1, 2))
    compute_s = times[Variant(HERE, tokens, 1)]
    transfer_s = tokens * TOKEN_BYTES / LINKS[link] if LINKS[link] else 0.0
    hidden = (in_turn_s - overlapped_s) / min(transfer_s, compute_s) if transfer_s else 0.0
    return {
        "link": link,
        "T": tokens,
        "transfer ms": transfer_s * 1e3 if transfer_s else "",
        "compute ms": compute_s * 1e3,
        "in turn ms": in_turn_s * 1e3,
        "overlapped ms": overlapped_s * 1e3,
        "speed": f"{in_turn_s / overlapped_s:.2f}",
        "hidden": "" if not transfer_s else f"{hidden:.0%}" if hidden > 0 else "none",
    }


def break_even(times: Times, link: str) -> dict[str, Any]:
    """Returns where two rounds begin to pay on a link, as measured and as predicted from shared memory."""
    sizes = [tokens for tokens in SMALL if tokens >= 2]

    def won_s(name: str, tokens: int) -> float:
        return times[Variant(name, tokens, 1)] - times[Variant(name, tokens, 2)]

    gain = [won_s(link, t) / times[Variant(link, t, 2)] for t in sizes]
    cells: dict[str, Any] = {"link": link, "measured T": crossing(sizes, gain), "predicted T": ""}
    if LINKS[link]:
        needed = [break_even_tokens(-won_s(HERE, t), TOKEN_BYTES, LINKS[link]) for t in sizes]
        cells["predicted T"] = crossing(sizes, [t / n - 1 for t, n in zip(sizes, needed, strict=True)])
    return cells


def break_even_tokens(round_s: float, bytes_per_token: float, bytes_per_s: float) -> int:
    """Returns from how many tokens of a rank two half-batches are faster than one batch.

    round_s:         what a cut costs: time of a layer in two halves minus at once, both without a link to wait for
    bytes_per_token: what a token sends in dispatch and combine together
    bytes_per_s:     of the link that a rank sends on
    Half of both transfers is saved, so it is where (tokens x bytes_per_token / bytes_per_s) / 2 = round_s.
    """
    return max(2, math.ceil(2 * round_s * bytes_per_s / bytes_per_token))


def crossing(sizes: Sequence[int], gain: Sequence[float]) -> int | str:
    """Returns the size from which gain stays above zero, between two sizes on a straight line over log T."""
    below = [i for i, value in enumerate(gain) if value < 0]
    if not below:
        return sizes[0]
    last = below[-1]
    if last == len(sizes) - 1:
        return f"above {sizes[-1]}"
    low, high = np.log(sizes[last]), np.log(sizes[last + 1])
    return round(float(np.exp(low - gain[last] / (gain[last + 1] - gain[last]) * (high - low))))


if __name__ == "__main__":
    main()
