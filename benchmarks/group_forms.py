"""One product by weights in each form of groups against one by bfloat16, by the compiled kernels of CPUs.

    python -m benchmarks.group_forms [--isa avx512|avx2|plain] [--rounds 7] [--threads 1]

A weight of 16384 x 2048 with random codes and rows in int8. Memory is written between calls, so that none finds its
weights in the caches. Every round times all forms, one after the other; ratios are medians of those within a round.
With one thread the clock is the CPU time of the thread. Takes a minute and 0.5 GB.
"""

import os
import statistics
from collections.abc import Callable

import torch

from benchmarks.conditions import save
from benchmarks.cpu_step import Row, ratio
from benchmarks.int4_experts import KernelRun
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.forms import INT4, GroupForm
from tests.kernels.test_group_quantised import random_groups

N, K = 16384, 2048
FORMS = {
    "int4": INT4,
    "int4 with zero points": GroupForm(4, 32, "float16", None),
    "GPTQ, AWQ of 128": GroupForm(4, 128, "float16", None),
    "Q4_K": GroupForm(4, 32, "two_levels", 0, has_minimum=True),
    "Q5_K": GroupForm(6, 32, "two_levels", 0, has_minimum=True),
    "Q6_K": GroupForm(6, 16, "two_levels", 32),
    "Q6_K in 8 bits": GroupForm(8, 16, "two_levels", 32),
    "Q8_0": GroupForm(8, 32, "float16", 128),
}
PLAIN = "bfloat16"


def main() -> None:
    run = KernelRun.of_arguments(__doc__, rounds=7)
    weights = {PLAIN: PackedLinear(torch.randn(N, K).bfloat16())}
    weights |= {name: PackedLinear.of_groups(random_groups(form, N, K), None, "int8") for name, form in FORMS.items()}
    rows = [row for num_rows in (1, 16) for row in measured(weights, num_rows, run.rounds, run.clock)]
    notes = f"{run.described}. Load average at the end: {os.getloadavg()[0]:.2f}."
    print(save("group_forms", "Products by weights in groups on CPU", rows, run.facts, notes, per_cpu=True))


def measured(weights: dict[str, PackedLinear], num_rows: int, rounds: int, clock: Callable[[], float]) -> list[Row]:
    x, other = torch.randn(num_rows, K), torch.zeros(64 << 20)
    times: dict[str, list[float]] = {name: [] for name in weights}
    for _ in range(rounds):
        for name, weight in weights.items():
            other.add_(1)
            started_s = clock()
            weight(x)
            times[name].append(clock() - started_s)
    found = []
    for name, own in times.items():
        num_bytes, took_s = weights[name].rows.data.nbytes, statistics.median(own)
        found.append(
            {
                "rows": num_rows, "form": name, "bits": round(8 * num_bytes / (N * K), 2), "ms": round(1e3 * took_s, 2),
                "GB/s": round(num_bytes / took_s / 1e9, 1), "10^9 weights/s": round(N * K / took_s / 1e9, 1),
                "over bfloat16": ratio(times[PLAIN], own),
            }
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
