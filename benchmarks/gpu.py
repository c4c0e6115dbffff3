"""GPU kernels against their goals, on one GPU: one command, no arguments, under five minutes.

    python benchmarks/gpu.py [--json FILE] [--only NAME ...]

Every row states its goal and its conditions. Inputs rotate over sets that together exceed the L2, outputs are checked
against float32 before they are timed, times are medians of CUDA events (or of graph replays, where a step is many small
launches). Eight "ranks" are virtual: eight regions on one device. Nothing here says anything about NVLink or RDMA.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from moe_serve.dispatch.gpu.launch_triton import SlabRanks
from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.gpu.symmetric import virtual_regions
from moe_serve.ep.device_split import split_table
from moe_serve.eplb.split.layer_slots import LayerSlots
from moe_serve.kernels.exact_split import SplitTable, exact_split_reference
from moe_serve.topology import Topology

REPEATS = 30
L2_BYTES = 64 << 20  # inputs rotate over at least four times this
HIDDEN, TOPK, RANKS, SLOTS, TOKENS = 7168, 8, 8, 36, 128  # DeepSeek-V3, 8 ranks, 288 slots
BF16 = torch.bfloat16
LAUNCH_CYCLES = 1_000_000  # the GPU idles so long before a timed call, while the host queues all of it
LINK_GB_S = 50  # per rank and direction, what overlap is measured against: one 400 Gb/s network card
QUERIED = "clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version"


@dataclass(frozen=True)
class Row:
    """One line of the table; met is None where there is no goal."""

    name: str
    value: float
    unit: str
    goal: str
    met: bool | None
    conditions: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), help="run these only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this machine has no CUDA device; run it on one, the tests of these kernels run anywhere")
    torch.manual_seed(0)
    print_machine("before")
    ceilings = measure_ceilings()
    rows: list[Row] = []
    for name in arguments.only or BENCHMARKS:
        for row in BENCHMARKS[name](ceilings):
            met = {True: "met", False: "NOT MET", None: ""}[row.met]
            print(
                f"{row.name:<58} {row.value:>9.1f} {row.unit:<9} {row.goal:<24} {met:<8} {row.conditions}", flush=True
            )
            rows.append(row)
        torch.cuda.empty_cache()
    print_machine("after")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"ceilings": asdict(ceilings), "rows": [asdict(row) for row in rows]}, indent=1)
        )


def print_machine(when: str) -> None:
    import triton

    clocks = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    gpu = torch.cuda.get_device_properties(0)
    print(f"{when}: {gpu.name}, {gpu.multi_processor_count} multiprocessors; {QUERIED}: {clocks}")
    print(f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}")


# -- timing ---------------------------------------------------------------------------------------------------------


def time_us(calls: list[Callable[[], object]], repeats: int = REPEATS) -> float:
    """Returns the median time of one call; the calls are taken in turn, so that each finds the L2 full of others'."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    times = []
    for repeat in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(LAUNCH_CYCLES)
        start.record()
        calls[repeat % len(calls)]()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in times)


def graph_us(step: Callable[[], object], inner: int = 20) -> float:
    """Returns the time of one step when `inner` steps are replayed from one graph: no launch gaps."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            step()
    return time_us([graph.replay]) / inner


def sets_for(bytes_of_one: int) -> int:
    return max(2, -(-4 * L2_BYTES // max(1, bytes_of_one)))


@dataclass(frozen=True)
class Ceilings:
    copy_gb_s: float  # bytes read + bytes written
    read_gb_s: float
    matrix_tflop_s: float


def measure_ceilings() -> Ceilings:
    source = torch.randn(1 << 29, device="cuda").view(torch.uint8)  # 2 GiB
    target = torch.empty_like(source)
    copy = 2 * source.numel() / time_us([lambda: target.copy_(source)], 10) / 1e3
    halves = source.view(torch.float32)
    read = source.numel() / time_us([lambda: halves.sum()], 10) / 1e3
    a, b = (torch.randn(8192, 8192, dtype=BF16, device="cuda") for _ in range(2))
    rate = 2 * 8192**3 / time_us([lambda: a @ b], 10) / 1e6
    print(f"ceilings: copy {copy:.0f} GB/s (read + write), read {read:.0f} GB/s, bf16 8192^3 {rate:.0f} TFLOP/s")
    return Ceilings(copy, read, rate)


def check_close(got: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    if not error < limit:
        sys.exit(f"{what} is wrong: relative error {error}; not timed")


# -- grouped GEMM ---------------------------------------------------------------------------------------------------


def packed_gemm(ceilings: Ceilings) -> list[Row]:
    from moe_serve.kernels.block_scales import BlockScaled
    from moe_serve.kernels.grouped_gemm_fp8 import quantize_weight
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton
    from moe_serve.kernels.triton.grouped_gemm_fp8 import grouped_gemm_fp8_triton
    from moe_serve.kernels.triton.quantize import quantize_triton

    groups, each, n, k = 8, 4096, 4096, HIDDEN
    x = torch.randn(groups * each, k, dtype=BF16, device="cuda")
    weight = torch.randn(groups, n, k, dtype=BF16, device="cuda")
    counts = torch.full((groups,), each, device="cuda")
    ends = counts.cumsum(0).int()
    flop = 2 * groups * each * n * k
    exact = x[each : each + 64].float() @ weight[1].float().T
    check_close(grouped_gemm_triton(x, weight, counts)[each : each + 64], exact, 4e-3, "bf16 grouped GEMM")
    ours = flop / time_us([lambda: grouped_gemm_triton(x, weight, counts)]) / 1e6
    library = torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm
    torchs = flop / time_us([lambda: library(x, weight.transpose(1, 2), offs=ends)]) / 1e6
    conditions = f"{groups} x {each} rows, N {n}, K {k}, random data"
    rows = [
        Row("bf16 grouped GEMM", ours, "TFLOP/s", ">= 600, > torch", ours >= 600 and ours > torchs, conditions),
        Row("  torch grouped_mm", torchs, "TFLOP/s", "", None, conditions),
    ]
    x8, scale = quantize_triton(x)
    weight8 = quantize_weight(weight.cpu())
    weight8 = BlockScaled(weight8.q.cuda(), weight8.scale.cuda())
    got = grouped_gemm_fp8_triton(x8, scale, weight8, counts)[each : each + 64]
    check_close(got, exact, 6e-2, "FP8 grouped GEMM")  # against unquantised operands
    rate = flop / time_us([lambda: grouped_gemm_fp8_triton(x8, scale, weight8, counts)]) / 1e6
    return [*rows, Row("FP8 block-scaled grouped GEMM", rate, "TFLOP/s", ">= 800", rate >= 800, conditions)]


def slab_gemm(ceilings: Ceilings) -> list[Row]:
    from moe_serve.kernels.triton.grouped_gemm import slab_gemm_triton

    slots, filled, capacity, n, k = 32, 20, 1024, 4096, HIDDEN
    weight = torch.randn(slots, n, k, dtype=BF16, device="cuda")  # 1.9 GB: far larger than any cache
    x = torch.randn(slots, capacity, k, dtype=BF16, device="cuda")
    counts = torch.full((slots,), filled, device="cuda")
    got = slab_gemm_triton(x, weight, counts, expected_rows=filled)
    check_close(got[3, :filled], x[3, :filled].float() @ weight[3].float().T, 4e-3, "masked GEMM")
    rows = []
    for guess in (16, 64):  # both tiles that could serve this, so that the table can be filled
        micros = time_us([lambda guess=guess: slab_gemm_triton(x, weight, counts, expected_rows=guess)])
        share = weight.numel() * 2 / micros / 1e3 / ceilings.read_gb_s * 100
        goal = (">= 75 % of read", share >= 75) if guess == 64 else ("", None)
        rows.append(
            Row(f"masked bf16 GEMM, tile for {guess} rows", share, "%", *goal, f"{slots} experts x {filled} rows")
        )
    return [*rows, *slab_gemm_fp8(ceilings, x, weight, counts)]


def slab_gemm_fp8(ceilings: Ceilings, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> Iterator[Row]:
    """x: [slots, capacity, k], weight: [slots, n, k] bfloat16, counts: [slots]"""
    from moe_serve.kernels.block_scales import BlockScaled
    from moe_serve.kernels.grouped_gemm_fp8 import quantize_weight
    from moe_serve.kernels.triton.grouped_gemm_fp8 import slab_gemm_fp8_triton
    from moe_serve.kernels.triton.quantize import quantize_triton

    pieces = [quantize_weight(one[None], parts=2) for one in weight]  # one by one: it widens to float32
    values = torch.cat([piece.q.view(torch.uint8) for piece in pieces]).view(torch.float8_e4m3fn)
    quantised = BlockScaled(values, torch.cat([piece.scale for piece in pieces]), parts=2)
    x8, scale = quantize_triton(x, counts)
    filled = int(counts[3])
    got = slab_gemm_fp8_triton(x8, scale, quantised, counts, expected_rows=filled)
    check_close(got[3, :filled], x[3, :filled].float() @ weight[3].float().T, 6e-2, "masked FP8 GEMM")
    for guess in (16, 64):
        micros = time_us([lambda guess=guess: slab_gemm_fp8_triton(x8, scale, quantised, counts, expected_rows=guess)])
        share = quantised.q.numel() / micros / 1e3 / ceilings.read_gb_s * 100
        yield Row(
            f"masked FP8 GEMM, tile for {guess} rows", share, "%", "", None, f"{len(counts)} experts x {filled} rows"
        )


# -- low latency ----------------------------------------------------------------------------------------------------


def make_ranks(num_tokens: int, fp8: bool) -> SlabRanks:
    region = Region(RANKS, SLOTS, num_tokens, HIDDEN, TOPK, 1 if fp8 else 2, 2, num_queues=1)
    return SlabRanks(virtual_regions(region, torch.device("cuda")), BF16, keep_fp8=fp8)


def random_ids(num_tokens: int) -> torch.Tensor:
    return torch.rand(RANKS, num_tokens, RANKS * SLOTS, device="cuda").argsort(-1)[:, :, :TOPK].contiguous()


def low_latency(ceilings: Ceilings) -> list[Row]:
    ranks, rows = make_ranks(TOKENS, fp8=True), []
    inputs = [
        torch.randn(RANKS, TOKENS, HIDDEN, dtype=BF16, device="cuda")
        for _ in range(sets_for(RANKS * TOKENS * HIDDEN * 2))
    ]
    ids, weights = random_ids(TOKENS), torch.rand(RANKS, TOKENS, TOPK, device="cuda")
    results = torch.randn(RANKS, SLOTS, RANKS * TOKENS, HIDDEN, dtype=BF16, device="cuda")

    times: dict[str, list[float]] = {
        "pack + FP8 + scatter": [],
        "wait + unpack": [],
        "send results": [],
        "weighted combine": [],
    }
    for repeat in range(REPEATS + 5):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        torch.cuda._sleep(LAUNCH_CYCLES)
        marks[0].record()
        sent = ranks.dispatch_send(inputs[repeat % len(inputs)], ids)
        marks[1].record()
        ranks.dispatch_receive(sent)
        marks[2].record()
        ranks.combine_send(sent, results)
        marks[3].record()
        ranks.combine_receive(sent, weights)
        marks[4].record()
        torch.cuda.synchronize()
        if repeat >= 5:
            for phase, start, end in zip(times, marks, marks[1:], strict=False):
                times[phase].append(start.elapsed_time(end) * 1e3)
    assert int(ranks.late.max()) == 0, "a wait ended without its flag"
    conditions = f"{RANKS} virtual ranks x {TOKENS} tokens, H {HIDDEN}, top-{TOPK}, FP8 out, bf16 home"
    micros = {phase: statistics.median(found) for phase, found in times.items()}
    for phase, found in micros.items():
        goal = ("<= 60 (floor ~19)", found <= 60) if phase.startswith("pack") else ("", None)
        rows.append(Row(f"low latency: {phase}", found, "us", *goal, conditions))
    moved = RANKS * TOKENS * (TOPK + 1) * HIDDEN * 2
    share = moved / micros["weighted combine"] / 1e3 / ceilings.copy_gb_s * 100
    return [
        *rows,
        Row("  weighted combine, of copy bandwidth", share, "%", ">= 70 %", share >= 70, f"{moved / 1e6:.0f} MB moved"),
    ]


def small_batches(ceilings: Ceilings) -> list[Row]:
    rows = []
    for num_tokens in (1, 8):
        ranks = make_ranks(num_tokens, fp8=True)
        x = torch.randn(RANKS, num_tokens, HIDDEN, dtype=BF16, device="cuda")
        ids, weights = random_ids(num_tokens), torch.rand(RANKS, num_tokens, TOPK, device="cuda")
        results = torch.randn(RANKS, SLOTS, RANKS * num_tokens, HIDDEN, dtype=BF16, device="cuda")

        def step() -> None:
            sent = ranks.dispatch_send(x, ids)  # noqa: B023, called before the next turn
            ranks.dispatch_receive(sent)  # noqa: B023
            ranks.combine_send(sent, results)  # noqa: B023
            ranks.combine_receive(sent, weights)  # noqa: B023

        micros = graph_us(step)
        name = f"low latency: dispatch + combine in a graph, T = {num_tokens}"
        rows.append(Row(name, micros, "us", "<= 30", micros <= 30, f"{RANKS} virtual ranks, all of them in the time"))
    return rows


# -- exact split, small kernels, overlap ----------------------------------------------------------------------------


def exact_split(ceilings: Ceilings) -> list[Row]:
    from moe_serve.kernels.triton.exact_split import exact_split_triton

    generator = torch.Generator().manual_seed(0)
    experts, ranks, batches = 256, 32, 200
    popularity = torch.rand(experts, generator=generator).pow(-0.5)
    hot = popularity.argsort(descending=True)[:32]
    row = torch.cat([torch.arange(experts), hot])[torch.randperm(288, generator=generator)]
    cpu = split_table(LayerSlots.of(row.numpy(), Topology(1, ranks), experts))
    table = SplitTable(cpu.fixed_slot.cuda(), cpu.experts.cuda(), cpu.replica_slot.cuda(), cpu.num_slots)
    counts = [torch.bincount(torch.multinomial(popularity, 32768, True, generator=generator), minlength=experts)
              for _ in range(batches)]  # fmt: skip
    on_gpu = [count.cuda() for count in counts]
    outcomes = torch.zeros(3, dtype=torch.int64, device="cuda")
    for index in range(10):
        expected, _ = exact_split_reference(counts[index], cpu)
        assert torch.equal(exact_split_triton(on_gpu[index], table, outcomes).cpu(), expected), "wrong split"
    outcomes.zero_()
    for count in on_gpu:
        exact_split_triton(count, table, outcomes)
    at_once, repaired, unproven = outcomes.tolist()
    micros = graph_us(lambda: exact_split_triton(on_gpu[0], table, outcomes))
    no_pushes = graph_us(lambda: exact_split_triton(on_gpu[0], table, outcomes, max_pushes=0))
    conditions = (
        f"256 experts, 288 slots, 32 ranks; of {batches} batches {at_once} at once, {repaired} repaired, {unproven} not"
    )
    return [
        Row("exact split, sweeps and certificate", no_pushes, "us", "<= 20, >= 99 % at once",
            no_pushes <= 20 and at_once >= 0.99 * batches, conditions),
        Row("exact split, with repair", micros, "us", "<= 50", micros <= 50, conditions),
    ]  # fmt: skip


def small_kernels(ceilings: Ceilings) -> list[Row]:
    from moe_serve.kernels.gate_shape import GateShape
    from moe_serve.kernels.triton.quantize import quantize_triton
    from moe_serve.kernels.triton.silu_mul import silu_mul_quantize_triton
    from moe_serve.kernels.triton.topk_gate import topk_gate_triton

    rows = []
    x = [torch.randn(16384, HIDDEN, dtype=BF16, device="cuda") for _ in range(3)]
    moved = x[0].numel() * 3 + x[0].numel() // 32
    share = moved / time_us([lambda v=v: quantize_triton(v) for v in x]) / 1e3 / ceilings.copy_gb_s * 100
    rows.append(Row("FP8 quantise, of copy bandwidth", share, "%", "", None, f"16384 x {HIDDEN}"))
    gate_up = [torch.randn(32768, 4096, dtype=BF16, device="cuda") for _ in range(3)]
    moved = gate_up[0].numel() * 5 // 2
    share = moved / time_us([lambda v=v: silu_mul_quantize_triton(v) for v in gate_up]) / 1e3 / ceilings.copy_gb_s * 100
    rows.append(Row("SwiGLU + quantise, of copy bandwidth", share, "%", "", None, "32768 x 2 x 2048"))
    shape = GateShape(TOPK, "sigmoid", True, 2.5, num_groups=8, topk_groups=4, norm_eps=1e-20)
    logits, bias = torch.randn(TOKENS, 256, device="cuda"), torch.randn(256, device="cuda")
    number, load = torch.tensor([TOKENS], device="cuda"), torch.zeros(256, dtype=torch.int64, device="cuda")
    micros = graph_us(lambda: topk_gate_triton(logits, bias, number, shape, load))
    return [*rows, Row("gate + load counting", micros, "us", "", None, f"{TOKENS} tokens, 256 experts, 8 groups")]


def overlap(ceilings: Ceilings) -> list[Row]:
    """Shared expert (a dense GEMM) while rows travel, on two streams, against one after the other.

    A link is played by a pause between send and receive, as long as a rank's bytes would take on it.
    """
    ranks = make_ranks(TOKENS, fp8=True)
    x = torch.randn(RANKS, TOKENS, HIDDEN, dtype=BF16, device="cuda")
    ids, weights = random_ids(TOKENS), torch.rand(RANKS, TOKENS, TOPK, device="cuda")
    results = torch.randn(RANKS, SLOTS, RANKS * TOKENS, HIDDEN, dtype=BF16, device="cuda")
    shared = torch.randn(HIDDEN, 4096, dtype=BF16, device="cuda")
    side = torch.cuda.Stream()
    cycles_of_1_us = 4_000_000 / time_us([lambda: torch.cuda._sleep(4_000_000)], 10)
    link_us = TOKENS * TOPK * ranks.region.row_bytes / LINK_GB_S / 1e3

    def travel(pause_us: float) -> None:
        sent = ranks.dispatch_send(x, ids)
        if pause_us:
            torch.cuda._sleep(int(pause_us * cycles_of_1_us))
        ranks.dispatch_receive(sent)
        ranks.combine_send(sent, results)
        ranks.combine_receive(sent, weights)

    def compute() -> torch.Tensor:
        return x.view(-1, HIDDEN) @ shared

    def one_after_the_other(pause_us: float) -> None:
        compute()
        travel(pause_us)

    def together(pause_us: float) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        travel(pause_us)
        torch.cuda.current_stream().wait_stream(side)

    rows = []
    compute_us = time_us([compute])
    for pause_us, link in ((link_us, f"link of {LINK_GB_S} GB/s"), (0.0, "no link")):
        both = time_us([lambda pause_us=pause_us: one_after_the_other(pause_us)])
        overlapped = time_us([lambda pause_us=pause_us: together(pause_us)])
        conditions = f"{link}: {pause_us:.0f} us under way, shared expert {compute_us:.0f} us, one device"
        if pause_us:
            hidden = (both - overlapped) / min(pause_us, compute_us) * 100
            rows.append(Row("overlap: share of the shorter hidden", hidden, "%", ">= 80 %", hidden >= 80, conditions))
        faster = both / overlapped
        goal = ("", None) if pause_us else (">= 0.98", faster >= 0.98)
        rows.append(Row("overlap: speed against one by one", faster, "x", *goal, conditions))
    return rows


BENCHMARKS: dict[str, Callable[[Ceilings], list[Row]]] = {
    "packed_gemm": packed_gemm,
    "slab_gemm": slab_gemm,
    "low_latency": low_latency,
    "small_batches": small_batches,
    "exact_split": exact_split,
    "small_kernels": small_kernels,
    "overlap": overlap,
}

if __name__ == "__main__":
    main()
