"""Times calls on a GPU, and measures what the machine can do at most."""

import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 30
L2_BYTES = 64 << 20  # inputs rotate over at least four times this
BF16 = torch.bfloat16
HIDDEN, TOPK, RANKS, SLOTS, TOKENS = 7168, 8, 8, 36, 128  # DeepSeek-V3, 8 ranks, 288 slots
LAUNCH_CYCLES = 1_000_000  # the GPU idles so long before a timed call, while the host queues all of it
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


def print_machine(when: str) -> None:
    import triton

    clocks = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    gpu = torch.cuda.get_device_properties(0)
    print(f"{when}: {gpu.name}, {gpu.multi_processor_count} multiprocessors; {QUERIED}: {clocks}")
    print(f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}")


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
