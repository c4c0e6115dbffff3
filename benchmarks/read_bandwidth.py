"""What the cores of this machine read a second: the roofline of whatever streams weights."""

import time
from pathlib import Path

import torch
from torch import Tensor

from moe_serve.c_library import load_c_library, processor_flags
from moe_serve.kernels.huge_pages import zeros_in_huge_pages

_ELEMENTS = 1 << 26  # 256 MiB, more than any cache


def buffer_to_read() -> Tensor:
    """Returns what `read_bandwidth` reads, in huge pages as weights are."""
    return zeros_in_huge_pages((_ELEMENTS,), torch.float32).fill_(1)


def read_bandwidth(buffer: Tensor, threads: int) -> float:
    """Returns the bytes per second that this many threads read, the best of three tries."""
    source = Path(__file__).with_suffix(".c")
    library, _ = load_c_library(source, {"read_all": 3}, (*processor_flags(), "-pthread"))
    best_s = float("inf")
    for _ in range(3):
        started_s = time.perf_counter()
        assert library.read_all(buffer.data_ptr(), buffer.numel(), threads) == 0
        best_s = min(best_s, time.perf_counter() - started_s)
    return buffer.nbytes / best_s
