"""The compiled projections and experts of CPUs against torch.

    python -m benchmarks.cpu_kernels [--rounds 9] [--threads 2] [--only linear|prefill|experts]

Every round times both contestants of a case one after the other; ratios are medians over rounds of ratios within a
round, so that a busy machine slows both. Projections of few rows go through several weights in turn, together larger
than the caches, as the layers of a model do. torch has the better of MKL (F.linear) and oneDNN with packed weights;
experts run as transformers' grouped_mm does on CPU: rows sorted by expert, two grouped products, SiLU in between.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.conditions import conditions, save
from benchmarks.cpu_attention import Case, best_of, measure
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.cpu.packed import gate_up_size, packed_size

Call = Callable[[], Any]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("linear", "prefill", "experts"))
    args = parser.parse_args()
    facts = conditions()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cpu_library().set_threads(args.threads)
    groups = {"linear": linear_cases, "prefill": prefill_cases, "experts": expert_cases}
    rows = []
    for name, cases in groups.items():
        if args.only in (None, name):
            rows += [measure(case, args.rounds) for case in cases()]
    notes = (
        f"{args.threads} threads each, float32 rows, {args.rounds} rounds, built for {cpu_library().form} by "
        f"{cpu_library().compiler}. bfloat16, int8 and e4m3 are how our weights are stored; torch has float32. Goals: "
        "prefill at least 0.85, experts at least 2. `speed-up` is the median of the ratios within a round, in brackets "
        "best call over best call."
    )
    print(save("cpu_kernels", "Projections and experts on CPU", rows, facts, notes, per_cpu=True))


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


def expert_cases() -> Iterator[Case]:
    for model, (hidden, width, num_experts, topk) in EXPERT_SHAPES.items():
        gate_up = torch.empty(num_experts, 2 * width, hidden).normal_(std=hidden**-0.5)
        down = torch.empty(num_experts, hidden, width).normal_(std=width**-0.5)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            experts = made_experts(dtype, num_experts, hidden, width)
            for num_tokens in (1, 8, 64):
                ids = torch.rand(num_tokens, num_experts).topk(topk, dim=1).indices
                counts = torch.bincount(ids.flatten(), minlength=num_experts)
                x = torch.randn(num_tokens * topk, hidden)
                what = f"{num_tokens} tokens, experts of {model}"
                theirs = grouped(x, gate_up, down, counts)
                yield what, f"packed_ffn, {name_of(dtype)}", ffn(x, counts, experts), "grouped_mm", theirs
            del experts


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


def made_experts(dtype: torch.dtype, slots: int, hidden: int, width: int) -> PackedExperts:
    """Returns experts of random numbers, straight in the packed order."""
    sizes = gate_up_size(width, hidden), packed_size(hidden, width)
    gate_up, down = (torch.empty(slots, size, dtype=dtype) for size in sizes)
    for tensor, fan_in in ((gate_up, hidden), (down, width)):
        for slot in tensor:
            slot.copy_(torch.randn(slot.shape).mul_(40 if dtype.itemsize == 1 else fan_in**-0.5))
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
