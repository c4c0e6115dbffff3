"""One call of experts in four bits against the same experts in bfloat16, by the compiled kernels of CPUs.

    python -m benchmarks.int4_experts [--isa avx512|avx2|plain] [--rounds 9] [--threads 1]

Experts of Qwen3-30B-A3B's shapes: hidden 2048, width 768, 8 of 128 for each token. Every call takes other experts, so
that neither side finds its weights in the caches. `tokens` choose experts at random, so that most experts have one row;
`rows of each expert` is a call of 8 experts that have so many. Every round times both sides, one after the other, and
ratios are medians of those within a round. `byte rate` is what four bits read a second over what bfloat16 does: 1 would
mean that decoding costs nothing. With one thread the clock is the CPU time of the thread. Takes a minute and 2 GB.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.cpu_attention import measure
from moe_serve.kernels.cpu.experts import GroupedExperts, PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.packed import (
    gate_up_size,
    group_packed_size,
    pack,
    pack_gate_up,
    pack_groups,
    pack_groups_gate_up,
    packed_size,
    padded,
)
from moe_serve.kernels.forms import INT4
from moe_serve.kernels.group_quantised import Activations, quantise_groups
from moe_serve.kernels.huge_pages import zeros_in_huge_pages

HIDDEN, WIDTH, EXPERTS, TOPK = 2048, 768, 128, 8
BATCHES = 16  # choices of experts, of which each call takes the next


@dataclass(frozen=True)
class KernelRun:
    """How a benchmark of the compiled kernels runs. facts: its conditions;  described: how the kernels were built"""

    rounds: int
    threads: int
    facts: dict[str, Any]
    described: str

    @classmethod
    def of_arguments(cls, description: str | None, rounds: int) -> "KernelRun":
        """Reads the command line, seeds torch, and lets the kernels take so many threads."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_isa(parser)
        parser.add_argument("--rounds", type=int, default=rounds)
        parser.add_argument("--threads", type=int, default=1)
        args = parser.parse_args()
        facts = conditions()
        torch.manual_seed(0)
        library = cpu_library()
        library.set_threads(args.threads)
        described = f"{args.threads} threads, {args.rounds} rounds, built by {library.compiler} for {library.form}"
        return cls(args.rounds, args.threads, facts, described)

    @property
    def clock(self) -> Callable[[], float]:
        """CPU time of the thread, where there is one."""
        return time.thread_time if self.threads == 1 else time.perf_counter


def main() -> None:
    run = KernelRun.of_arguments(__doc__, rounds=9)
    kinds = {"int8": in_int4("int8"), "float": in_int4("float"), "bfloat16": in_bfloat16()}
    share = kinds["int8"].gate_up.nbytes / kinds["bfloat16"].gate_up.nbytes
    rows: list[dict[str, Any]] = []
    for case, counts in cases().items():
        for activations in ("int8", "float"):
            calls = [running(kinds[kind], counts) for kind in (activations, "bfloat16")]
            found = measure((case, f"int4 by {activations}", calls[0], "bfloat16", calls[1]), run.rounds, run.clock)
            speed_up = float(found["speed-up"].split()[0])
            rows.append(found | {"byte rate": f"{speed_up * share:.2f}"})
    sizes = [kinds[kind].gate_up.nbytes / 2**20 for kind in ("int8", "bfloat16")]
    notes = (
        f"{run.described}. {EXPERTS} experts of hidden {HIDDEN} and width {WIDTH}, {TOPK} for each token; gate and up "
        f"take {sizes[0]:.0f} MiB in int4 and {sizes[1]:.0f} in bfloat16. `speed-up` is the median of ratios within "
        "a round, in brackets best call over best call; `byte rate` is that times the bytes of int4 over bfloat16's. "
        f"{'CPU time of the thread' if run.threads == 1 else 'Wall time'}. Load average at the end: "
        f"{os.getloadavg()[0]:.2f}."
    )
    print(save("int4_experts", "Experts in int4 and in bfloat16 on CPU", rows, run.facts, notes, per_cpu=True))


def cases() -> dict[str, list[Tensor]]:
    """Returns rows of each expert for every batch, by case."""
    made = {}
    for tokens in (1, 16, 128, 512):
        made[f"{tokens} tokens"] = [
            torch.bincount(torch.rand(tokens, EXPERTS).topk(TOPK, dim=1).indices.flatten(), minlength=EXPERTS)
            for _ in range(BATCHES)
        ]
    for num_rows in (1, 4, 16):
        made[f"{num_rows} rows of each expert"] = [
            torch.zeros(EXPERTS, dtype=torch.int64).index_fill_(0, torch.randperm(EXPERTS)[:TOPK], num_rows)
            for _ in range(BATCHES)
        ]
    return made


def running(experts: PackedExperts, counts: list[Tensor]) -> Callable[[], Tensor]:
    x = torch.randn(int(counts[0].sum()), HIDDEN)
    out, batches = torch.empty_like(x), itertools.cycle(counts)
    return lambda: packed_ffn(x, next(batches), experts, out)


def in_int4(activations: Activations) -> PackedExperts:
    """Returns experts in int4, every expert the same."""
    gate_up, down = matrices()
    packed_gate_up = zeros_in_huge_pages((EXPERTS, group_packed_size(2 * padded(WIDTH), HIDDEN, INT4)), torch.uint8)
    packed_down = zeros_in_huge_pages((EXPERTS, group_packed_size(HIDDEN, WIDTH, INT4)), torch.uint8)
    pack_groups_gate_up(quantise_groups(gate_up, INT4), packed_gate_up[0])
    pack_groups(quantise_groups(down, INT4), packed_down[0])
    packed_gate_up[1:], packed_down[1:] = packed_gate_up[0], packed_down[0]
    return PackedExperts(packed_gate_up, packed_down, HIDDEN, WIDTH, groups=GroupedExperts(INT4, INT4, activations))


def in_bfloat16() -> PackedExperts:
    gate_up, down = (matrix.bfloat16() for matrix in matrices())
    packed_gate_up = zeros_in_huge_pages((EXPERTS, gate_up_size(WIDTH, HIDDEN)), torch.bfloat16)
    packed_down = zeros_in_huge_pages((EXPERTS, packed_size(HIDDEN, WIDTH)), torch.bfloat16)
    pack_gate_up(gate_up, packed_gate_up[0])
    pack(down, packed_down[0])
    packed_gate_up[1:], packed_down[1:] = packed_gate_up[0], packed_down[0]
    return PackedExperts(packed_gate_up, packed_down, HIDDEN, WIDTH)


def matrices() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    gate_up, down = (torch.randn(n, k, generator=generator) * k**-0.5 for n, k in shapes)
    return gate_up, down


if __name__ == "__main__":
    main()
