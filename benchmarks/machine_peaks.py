"""What the cores of this machine read a second, and how many products they add: no kernel is faster than either."""

import ctypes
import time
from collections.abc import Callable
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
    seconds = _best_of_three(lambda library: library.read_all(buffer.data_ptr(), buffer.numel(), threads))
    return buffer.nbytes / seconds


def product_rate(threads: int) -> float:
    """Returns the fused multiply-adds of float32 per second of this many threads, the best of three tries.

    In registers of the instruction set that C code is built for.
    """
    one, times = torch.ones(1), 20_000_000
    seconds = _best_of_three(lambda library: library.multiply_all(one.data_ptr(), times, threads))
    return threads * times * _library().products_at_once() / seconds


def _best_of_three(run: Callable[[ctypes.CDLL], int]) -> float:
    library, best_s = _library(), float("inf")
    for _ in range(3):
        started_s = time.perf_counter()
        assert run(library) == 0, "a thread could not be started"
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


def _library() -> ctypes.CDLL:
    arguments = {"read_all": 3, "multiply_all": 3, "products_at_once": 0}
    return load_c_library(Path(__file__).with_suffix(".c"), arguments, (*processor_flags(), "-pthread"))[0]
