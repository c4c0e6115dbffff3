"""GPU kernels against their goals, on one GPU; a part of `python -m benchmarks.gpu`.

    python -m benchmarks.gpu_kernels [NAME ...]

Every row states its goal and its conditions. Inputs rotate over sets that together exceed the L2, outputs are checked
against float32 before they are timed, times are medians of CUDA events (or of graph replays, where a step is many small
launches). Eight "ranks" are virtual: eight regions on one device. Nothing here says anything about NVLink or RDMA.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_gemm import packed_gemm, slab_gemm
from benchmarks.gpu_timing import (
    BF16,
    DEVICE,
    HIDDEN,
    LAUNCH_CYCLES,
    RANKS,
    REPEATS,
    SLOTS,
    TOKENS,
    TOPK,
    Ceilings,
    Row,
    graph_us,
    numbers,
    run_benchmarks,
    sets_for,
    time_us,
)
from moe_serve.dispatch.gpu.launch_triton import SlabRanks
from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.layout import count_slots
from moe_serve.ep.device_split import DeviceSplit
from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology
from tests.dispatch.gpu.virtual import virtual_regions

LINK_GB_S = 50  # per rank and direction, what overlap is measured against: one 400 Gb/s network card


def ceilings(limits: Ceilings) -> Iterator[Row]:
    """What the machine can do at most, beside what its sheet says."""
    sheet = limits.sheet
    memory, matrix = (sheet.memory_gb_s, sheet.bf16_tflop_s) if sheet else (None, None)
    rates = (
        ("memory, read", limits.read_gb_s, "GB/s", memory),
        ("memory, copy (read + write)", limits.copy_gb_s, "GB/s", memory),
        ("bf16 8192^3 of torch", limits.matrix_tflop_s, "TFLOP/s", matrix),
    )
    for name, rate, unit, of in rates:
        yield Row(name, rate, unit, "", None, "", of_sheet=rate / of if of else None)


# -- low latency ----------------------------------------------------------------------------------------------------


def make_ranks(num_tokens: int, fp8: bool) -> SlabRanks:
    region = Region(RANKS, SLOTS, num_tokens, HIDDEN, TOPK, 1 if fp8 else 2, 2, num_queues=1)
    return SlabRanks(virtual_regions(region, DEVICE), BF16, keep_fp8=fp8)


def random_ids(num_tokens: int) -> torch.Tensor:
    return torch.rand(RANKS, num_tokens, RANKS * SLOTS, device=DEVICE).argsort(-1)[:, :, :TOPK].contiguous()


def low_latency(limits: Ceilings) -> list[Row]:
    ranks, rows = make_ranks(TOKENS, fp8=True), []
    inputs = [
        torch.randn(RANKS, TOKENS, HIDDEN, dtype=BF16, device=DEVICE)
        for _ in range(sets_for(RANKS * TOKENS * HIDDEN * 2))
    ]
    ids, weights = random_ids(TOKENS), torch.rand(RANKS, TOKENS, TOPK, device=DEVICE)
    results = torch.randn(RANKS, SLOTS, RANKS * TOKENS, HIDDEN, dtype=BF16, device=DEVICE)

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
    assert not any(numbers(ranks.late)), "a wait ended without its flag"
    conditions = f"{RANKS} virtual ranks x {TOKENS} tokens, H {HIDDEN}, top-{TOPK}, FP8 out, bf16 home"
    micros = {phase: statistics.median(found) for phase, found in times.items()}
    for phase, found in micros.items():
        goal = ("<= 60 (floor ~19)", found <= 60) if phase.startswith("pack") else ("", None)
        rows.append(Row(f"low latency: {phase}", found, "us", *goal, conditions))
    moved = RANKS * TOKENS * (TOPK + 1) * HIDDEN * 2
    share = moved / micros["weighted combine"] / 1e3 / limits.copy_gb_s * 100
    return [
        *rows,
        Row("  weighted combine, of copy bandwidth", share, "%", ">= 70 %", share >= 70, f"{moved / 1e6:.0f} MB moved"),
    ]


def small_batches(limits: Ceilings) -> list[Row]:
    rows = []
    for num_tokens in (1, 8):
        ranks = make_ranks(num_tokens, fp8=True)
        x = torch.randn(RANKS, num_tokens, HIDDEN, dtype=BF16, device=DEVICE)
        ids, weights = random_ids(num_tokens), torch.rand(RANKS, num_tokens, TOPK, device=DEVICE)
        results = torch.randn(RANKS, SLOTS, RANKS * num_tokens, HIDDEN, dtype=BF16, device=DEVICE)

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


def replica_split(limits: Ceilings) -> Iterator[Row]:
    """The slots of a layer's tokens, by each split."""
    from moe_serve.kernels.triton.replica_split import split_replicas_triton

    generator = torch.Generator().manual_seed(0)
    experts, nodes, per_node, batches = 256, 4, 8, 200
    topology = Topology(nodes, per_node)
    popularity = torch.rand(experts, generator=generator).pow(-0.5)
    hot = popularity.argsort(descending=True)[:32]
    row = torch.cat([torch.arange(experts), hot])[torch.randperm(288, generator=generator)]
    placement = Placement(row.numpy()[None], experts, topology.num_ranks)
    ids = [
        torch.multinomial(popularity.expand(topology.num_ranks * TOKENS, -1), TOPK, generator=generator)
        .view(topology.num_ranks, TOKENS, TOPK)
        for _ in range(batches)
    ]  # fmt: skip
    counts = [torch.stack([count_slots(each, experts) for each in batch]) for batch in ids]
    on_gpu = [(batch[0].to(DEVICE), count.to(DEVICE), 0) for batch, count in zip(ids, counts, strict=True)]
    for split in ("even", "nearest", "exact"):
        plain = DeviceSplit(placement, split, topology, "cpu")
        tables = {name: table[0].to(DEVICE) for name, table in plain._tables.items()}
        outcomes = torch.zeros(3, dtype=torch.int64, device=DEVICE) if split == "exact" else None
        for batch, each, count in zip(on_gpu[:10], ids, counts, strict=False):
            physical, slot_rows = split_replicas_triton(*batch, tables, per_node, outcomes)
            expected, expected_rows = plain.split(0, each[0], count, 0)
            assert numbers(physical) == expected.flatten().tolist(), "wrong slots"
            assert numbers(slot_rows) == expected_rows.flatten().tolist(), "wrong split"
        conditions = f"{experts} experts, 288 slots, {topology.num_ranks} ranks, {TOKENS} tokens of each"
        if outcomes is not None:
            outcomes.zero_()
            for batch in on_gpu:
                split_replicas_triton(*batch, tables, per_node, outcomes)
            at_once, repaired, unproven = numbers(outcomes)
            conditions += f"; of {batches} batches {at_once} at once, {repaired} repaired, {unproven} not"
        micros = graph_us(partial(split_replicas_triton, *on_gpu[0], tables, per_node, outcomes))
        yield Row(f"split and slots, {split}", micros, "us", "<= 50", micros <= 50, conditions)


def small_kernels(limits: Ceilings) -> list[Row]:
    from moe_serve.kernels.forms import RouterSpec
    from moe_serve.kernels.triton.quantize import quantize_triton
    from moe_serve.kernels.triton.silu_mul import silu_mul_triton
    from moe_serve.kernels.triton.topk_gate import topk_gate_triton

    rows = []
    x = [torch.randn(16384, HIDDEN, dtype=BF16, device=DEVICE) for _ in range(3)]
    moved = x[0].numel() * 3 + x[0].numel() // 32
    share = moved / time_us([lambda v=v: quantize_triton(v) for v in x]) / 1e3 / limits.copy_gb_s * 100
    rows.append(Row("FP8 quantise, of copy bandwidth", share, "%", "", None, f"16384 x {HIDDEN}"))
    gate_up = [torch.randn(32768, 4096, dtype=BF16, device=DEVICE) for _ in range(3)]
    moved = gate_up[0].numel() * 3
    share = moved / time_us([lambda v=v: silu_mul_triton(v) for v in gate_up]) / 1e3 / limits.copy_gb_s * 100
    rows.append(Row("SwiGLU, of copy bandwidth", share, "%", "", None, "32768 x 2 x 2048"))
    spec = RouterSpec(256, TOPK, "sigmoid", True, 2.5, num_groups=8, topk_groups=4, norm_eps=1e-20)
    logits, bias = torch.randn(TOKENS, 256, device=DEVICE), torch.randn(256, device=DEVICE)
    load = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    micros = graph_us(lambda: topk_gate_triton(logits, bias, spec, load))
    return [*rows, Row("gate + load counting", micros, "us", "", None, f"{TOKENS} tokens, 256 experts, 8 groups")]


def overlap(limits: Ceilings) -> list[Row]:
    """Shared expert (a dense GEMM) while rows travel, on two streams, against one after the other.

    A link is played by a pause between send and receive, as long as a rank's bytes would take on it.
    """
    ranks = make_ranks(TOKENS, fp8=True)
    x = torch.randn(RANKS, TOKENS, HIDDEN, dtype=BF16, device=DEVICE)
    ids, weights = random_ids(TOKENS), torch.rand(RANKS, TOKENS, TOPK, device=DEVICE)
    results = torch.randn(RANKS, SLOTS, RANKS * TOKENS, HIDDEN, dtype=BF16, device=DEVICE)
    shared = torch.randn(HIDDEN, 4096, dtype=BF16, device=DEVICE)
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


BENCHMARKS = {
    "ceilings": ceilings,
    "packed_gemm": packed_gemm,
    "slab_gemm": slab_gemm,
    "low_latency": low_latency,
    "small_batches": small_batches,
    "replica_split": replica_split,
    "small_kernels": small_kernels,
    "overlap": overlap,
}

if __name__ == "__main__":
    run_benchmarks(BENCHMARKS, __doc__ or "")
