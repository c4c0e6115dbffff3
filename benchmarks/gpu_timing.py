"""Times calls on a GPU, and measures what the machine can do at most; what all scripts of benchmarks.gpu share."""

import argparse
import json
import re
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import torch

REPEATS = 30
L2_BYTES = 64 << 20  # inputs rotate over at least four times this
BF16 = torch.bfloat16
HIDDEN, TOPK, RANKS, SLOTS, TOKENS = 7168, 8, 8, 36, 128  # DeepSeek-V3, 8 ranks, 288 slots
LAUNCH_CYCLES = 1_000_000  # the GPU idles so long before a timed call, while the host queues all of it
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Row:
    """One line of the report.

    met:      None where there is no goal
    of_sheet: share of a rate on the chip's sheet;  of_nccl: rate over that of NCCL for the same bytes
    """

    name: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None
    conditions: str = ""
    of_sheet: float | None = None
    of_nccl: float | None = None


@dataclass(frozen=True)
class Sheet:
    """Peak rates of a chip, as its maker gives them."""

    name: str
    memory_gb_s: float
    bf16_tflop_s: float
    fp8_tflop_s: float


def sheet_of(gpu_name: str) -> Sheet | None:
    """Returns the sheet of a GPU by the name that its driver gives it; None where there is none.

    The profiles of the cost model, read line by line: machines with a GPU may lack the library that reads YAML.
    """
    folder = resources.files("moe_serve.eplb.cost") / "profiles" / "hardware"
    names = sorted((entry.name.removesuffix(".yaml") for entry in folder.iterdir()), key=len, reverse=True)
    for name in names:
        if name in re.split(r"[\s_-]+", gpu_name):
            text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
            fields = ("hbm_bytes_per_s", "bf16_flops", "fp8_flops")
            values = [float(re.findall(rf"^{field}: {{value: ([^,]+),", text, re.MULTILINE)[0]) for field in fields]
            return Sheet(name, values[0] / 1e9, values[1] / 1e12, values[2] / 1e12)
    return None


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
    """copy_gb_s: bytes read + bytes written;  sheet: of the chip, where there is one"""

    copy_gb_s: float
    read_gb_s: float
    matrix_tflop_s: float
    sheet: Sheet | None = None

    def of_memory(self, gb_s: float) -> float | None:
        return gb_s / self.sheet.memory_gb_s if self.sheet else None

    def of_bf16(self, tflop_s: float) -> float | None:
        return tflop_s / self.sheet.bf16_tflop_s if self.sheet else None

    def of_fp8(self, tflop_s: float) -> float | None:
        return tflop_s / self.sheet.fp8_tflop_s if self.sheet else None


def measure_ceilings() -> Ceilings:
    source = torch.randn(1 << 29, device=DEVICE).view(torch.uint8)  # 2 GiB
    target = torch.empty_like(source)
    copy = 2 * source.numel() / time_us([lambda: target.copy_(source)], 10) / 1e3
    halves = source.view(torch.float32)
    read = source.numel() / time_us([lambda: halves.sum()], 10) / 1e3
    a, b = (torch.randn(8192, 8192, dtype=BF16, device=DEVICE) for _ in range(2))
    rate = 2 * 8192**3 / time_us([lambda: a @ b], 10) / 1e6
    return Ceilings(copy, read, rate, sheet_of(torch.cuda.get_device_properties(0).name))


def numbers(tensor: torch.Tensor) -> list[int | float]:
    """Returns the elements of a tensor on the GPU. Waits for it."""
    return tensor.flatten().tolist()


def check_close(got: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    """Raises AssertionError where a result is wrong, so that it is not timed."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    assert error < limit, f"{what} is wrong: relative error {error}, allowed {limit}; not timed"


Benchmark = Callable[[Ceilings], Iterable[Row]]


def run_benchmarks(benchmarks: Mapping[str, Benchmark], about: str) -> None:
    """Runs those that the command line names, or all, one after the other; exits with 1 where one has failed.

    Each row is printed, and written at once, so that a run that is ended has told what it found.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*benchmarks, []], help="these only")
    parser.add_argument("--rows", type=Path, help="append each row there, as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this machine has no CUDA device; run it on one, the tests of these kernels run anywhere")
    torch.manual_seed(0)
    limits, failed = measure_ceilings(), []
    for name in arguments.names or benchmarks:
        try:
            for row in benchmarks[name](limits):
                tell(row, arguments.rows)
            torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
            failed.append(name)
            if not _device_answers():
                print("the device is in error; the rest of this part is not run", file=sys.stderr)
                break
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def tell(row: Row, file: Path | None) -> None:
    """Prints a row, and appends it to a file as JSON. None: to none"""
    met = {True: "met", False: "NOT MET", None: ""}[row.met]
    print(f"{row.name:<58} {row.value:>9.1f} {row.unit:<9} {row.goal:<24} {met:<8} {row.conditions}", flush=True)
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(row)) + "\n")


def _device_answers() -> bool:
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
