"""The compiled projections and experts of CPUs against torch.

    python -m benchmarks.cpu_kernels [--rounds 9] [--threads 2] [--only linear|prefill|amx|experts]

Takes three minutes and 13 GB.

Every round times both contestants of a case one after the other; ratios are medians over rounds of ratios within a
round, so that a busy machine slows both. Projections of few rows go through several weights in turn, together larger
than the caches, as the layers of a model do. torch has the better of MKL (F.linear) and oneDNN with packed weights;
experts run as transformers' grouped_mm does on CPU: rows sorted by expert, two grouped products, SiLU in between.
One call of experts reads the weights of each expert that has rows: its share of the roofline is what it reads a second
of these bytes over what as many threads can read.
`--only amx` is a table of its own: calls with bfloat16 weights by AMX against the same without it, in CPU time of one
thread, which other work on the machine hardly adds to.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.conditions import add_isa, conditions, save, table
from benchmarks.cpu_attention import Case, best_of, measure
from benchmarks.machine_peaks import buffer_to_read, read_bandwidth
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import AMX, cpu_library
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.cpu.packed import gate_up_size, packed_size
from moe_serve.kernels.huge_pages import zeros_in_huge_pages

Call = Callable[[], Any]
Row = dict[str, Any]
BEYOND_CACHES = 200 << 20  # bytes of weights that a step goes through
PREFILL_SHAPES = {
    "qkv of the bench model": (1024, 512),
    "o of Qwen3-30B": (2048, 4096),
    "qkv of Qwen3-30B": (5120, 2048),
}
EXPERT_SHAPES = {  # hidden, width, experts, top-k
    "Qwen3-30B": (2048, 768, 128, 8),
    "DeepSeek-V3, 32 experts": (7168, 2048, 32, 8),
}
EXPERT_NOTES = (
    "Qwen3-30B has 128 experts of 768, DeepSeek-V3 256 of 2048, of which 32 are in memory here (256 in float32 take "
    "45 GB): the 8 of each token are among these. `share of the roofline`: bytes of the experts with rows, as either "
    "side stores them, over its time and over what the threads read a second. `speed-up at the roofline` is what a "
    "kernel would have that reads at full speed: where it is below 2, no kernel is twice as fast."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("linear", "prefill", "amx", "experts"))
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cpu_library().set_threads(args.threads)
    if args.only == "amx":
        compare_amx(facts, args.rounds)
        return
    groups = {"linear": linear_cases, "prefill": prefill_cases}
    rows = []
    for name, cases in groups.items():
        if args.only in (None, name):
            rows += [measure(case, args.rounds) for case in cases()]
    experts = list(expert_rows(args.threads, max(3, args.rounds // 2))) if args.only in (None, "experts") else []
    notes = (
        f"{args.threads} threads each, float32 rows, {args.rounds} rounds, built for {cpu_library().form} by "
        f"{cpu_library().compiler}. bfloat16, int8 and e4m3 are how our weights are stored; torch has float32. Goals: "
        "prefill at least 0.85, experts at least 2. `speed-up` is the median of the ratios within a round, in brackets "
        "best call over best call."
    )
    if rows and experts:
        notes += f"\n\n## Experts\n\n{table(experts)}\n\n{EXPERT_NOTES}"
    elif experts:
        rows, notes = experts, f"{notes} {EXPERT_NOTES}"
    print(save("cpu_kernels", "Projections and experts on CPU", rows, facts, notes, per_cpu=True))


def compare_amx(facts: dict[str, Any], rounds: int) -> None:
    if cpu_library().form != AMX:
        raise SystemExit(f"the kernels go by {cpu_library().form}: this machine, its compiler or its system has no AMX")
    cpu_library().set_threads(1)
    rows = [measure(case, rounds, time.thread_time) for case in amx_cases()]
    notes = (
        f"CPU time of one thread, bfloat16 weights, float32 rows, {rounds} rounds, built by {cpu_library().compiler}. "
        "Projections go through several weights in turn, larger than the caches together; `speed-up` is the median of "
        "the ratios within a round, in brackets best call over best call. Load average at the end: "
        f"{os.getloadavg()[0]:.2f}."
    )
    print(save("cpu_amx", "Products with bfloat16 weights by AMX and without", rows, facts, notes, per_cpu=True))


def linear_cases() -> Iterator[Case]:
    n, k = 4096, 2048
    weights = [torch.randn(n, k) for _ in range(BEYOND_CACHES // (n * k * 4))]
    theirs = torch_projections(weights)
    for dtype in (torch.float32, torch.bfloat16):
        packed = [PackedLinear(weight.to(dtype)) for weight in weights]
        for rows in (1, 4, 16, 64):
            x = torch.randn(rows, k)
            name, call = fastest(theirs, x)
            yield f"{rows} rows, [{n}, {k}]", f"linear, {name_of(dtype)}", in_turn(packed, x), name, call


def prefill_cases() -> Iterator[Case]:
    for (model, (n, k)), rows in itertools.product(PREFILL_SHAPES.items(), (512, 2048)):
        weight, x = torch.randn(n, k), torch.randn(rows, k)
        theirs = torch_projections([weight])
        for dtype in (torch.float32, torch.bfloat16):
            name, call = fastest(theirs, x)
            packed = [PackedLinear(weight.to(dtype))]
            yield f"{rows} rows, {model} [{n}, {k}]", f"linear, {name_of(dtype)}", in_turn(packed, x), name, call


def amx_cases() -> Iterator[Case]:
    """Yields calls of bfloat16 weights by AMX against the same without it."""
    n, k = 4096, 2048
    packed = [PackedLinear(torch.randn(n, k).bfloat16()) for _ in range(BEYOND_CACHES // (n * k * 2))]
    for rows in (1, 4, 8, 16, 64, 512, 2048):
        yield against_no_amx(f"{rows} rows, [{n}, {k}]", "linear, bfloat16", in_turn(packed, torch.randn(rows, k)))
    model = "Qwen3-30B"
    hidden, _, num_experts, topk = EXPERT_SHAPES[model]
    experts = made_experts(torch.bfloat16, model)
    for tokens in (1, 8, 64, 512):
        ids = torch.rand(tokens, num_experts).topk(topk, dim=1).indices
        counts = torch.bincount(ids.flatten(), minlength=num_experts)
        call = ffn(torch.randn(tokens * topk, hidden), counts, experts)
        yield against_no_amx(f"{tokens} tokens, experts of {model}", "packed_ffn, bfloat16", call)


def against_no_amx(what: str, name: str, call: Call) -> Case:
    library = cpu_library()

    def run(by_amx: bool) -> None:
        library.use_amx(by_amx)
        call()
        library.use_amx(True)

    return what, name, lambda: run(True), f"without AMX ({library.vectors})", lambda: run(False)


def expert_rows(threads: int, rounds: int) -> Iterator[Row]:
    """Yields the rows of the table, for one model and storage after the other, so that two are never in memory."""
    for model in EXPERT_SHAPES:
        theirs = stored_experts(model)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            ours = made_experts(dtype, model)
            for num_tokens in (1, 8, 64):
                yield expert_row(model, num_tokens, ours, theirs, (threads, rounds))
            del ours
        del theirs


def expert_row(
    model: str, num_tokens: int, ours: PackedExperts, theirs: tuple[Tensor, Tensor], effort: tuple[int, int]
) -> Row:
    hidden, width, num_experts, topk = EXPERT_SHAPES[model]
    threads, rounds = effort
    ids = torch.rand(num_tokens, num_experts).topk(topk, dim=1).indices
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    x = torch.randn(num_tokens * topk, hidden)
    dtype, num_read = ours.down.dtype, int((counts > 0).sum())
    calls = ffn(x, counts, ours), grouped(x, *theirs, counts)
    buffer = buffer_to_read()
    bandwidth = read_bandwidth(buffer, threads)
    row = measure((f"{num_tokens} tokens, {model}", name_of(dtype), calls[0], "grouped_mm", calls[1]), rounds)
    bandwidth = max(bandwidth, read_bandwidth(buffer, threads))
    elements = num_read * 3 * hidden * width
    least_us = elements * dtype.itemsize / bandwidth * 1e6
    return row | {
        "experts read": num_read,
        "our share of the roofline": round(least_us / row["ours µs"], 2),
        "its share": round(elements * 4 / bandwidth * 1e6 / row["its µs"], 2),
        "speed-up at the roofline": round(row["its µs"] / least_us, 2),
    }


def torch_projections(weights: list[Tensor]) -> dict[str, Callable[[Tensor], Call]]:
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]

    def by_mkl(x: Tensor) -> Call:
        turn = itertools.cycle(weights)
        return lambda: functional.linear(x, next(turn))

    def by_onednn(x: Tensor) -> Call:
        turn = itertools.cycle(packed)
        return lambda: torch.ops.mkldnn._linear_pointwise(x, next(turn), None, "none", [], "")

    return {"MKL": by_mkl, "oneDNN": by_onednn}


def fastest(contestants: dict[str, Callable[[Tensor], Call]], x: Tensor) -> tuple[str, Call]:
    """Returns the contestant whose best of some calls is shortest, with its name."""
    calls = {name: make(x) for name, make in contestants.items()}
    best = {name: best_of(call, 12) for name, call in calls.items()}
    name = min(best, key=lambda name: best[name])
    return name, calls[name]


def in_turn(linears: list[PackedLinear], x: Tensor) -> Call:
    turn = itertools.cycle(linears)
    return lambda: next(turn)(x)


def stored_experts(model: str) -> tuple[Tensor, Tensor]:
    """Returns gate_up [experts, 2 x width, hidden] and down [experts, hidden, width], every expert the same."""
    hidden, width, num_experts, _ = EXPERT_SHAPES[model]
    gate_up = zeros_in_huge_pages((num_experts, 2 * width, hidden), torch.float32)
    down = zeros_in_huge_pages((num_experts, hidden, width), torch.float32)
    return gate_up.copy_(torch.randn(2 * width, hidden) * hidden**-0.5), down.copy_(
        torch.randn(hidden, width) * width**-0.5
    )


def made_experts(dtype: torch.dtype, model: str) -> PackedExperts:
    """Returns experts of random numbers, straight in the packed order, every expert the same."""
    hidden, width, slots, _ = EXPERT_SHAPES[model]
    sizes = gate_up_size(width, hidden), packed_size(hidden, width)
    gate_up, down = (zeros_in_huge_pages((slots, size), dtype) for size in sizes)
    for tensor, fan_in in ((gate_up, hidden), (down, width)):
        one = torch.randn(tensor.shape[1]).mul_(40 if dtype.itemsize == 1 else fan_in**-0.5)
        tensor.copy_(one.to(dtype))
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if dtype == torch.int8:
        scales = torch.full((slots, 2 * width), 1e-3), torch.full((slots, hidden), 1e-3)
    elif dtype == torch.float8_e4m3fn:
        across, along = -(-hidden // 128), -(-width // 128)
        scales = torch.full((slots, 2 * along, across), 1e-3), torch.full((slots, across, along), 1e-3)
    return PackedExperts(gate_up, down, hidden, width, *scales)


def ffn(x: Tensor, counts: Tensor, experts: PackedExperts) -> Call:
    out = torch.empty_like(x)
    return lambda: packed_ffn(x, counts, experts, out)


def grouped(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Call:
    ends = counts.cumsum(0).to(torch.int32)

    def run() -> Tensor:
        gate, up = functional.grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return functional.grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)

    return run


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
