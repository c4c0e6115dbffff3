"""Memory of CPU ranks in huge pages.

A step reads all weights once, and looking up their pages of 4 KB took a twentieth of its time.
"""

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Returns zeros; on a CPU in huge pages, where the system gives them and one is filled at least.

    Raises RuntimeError, as torch does, where there is no memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    on_host = torch.device(device).type == "cpu"
    if sys.platform != "linux" or not on_host or num_bytes < _HUGE_PAGE_BYTES:
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"not enough memory for {num_bytes} bytes ({error})") from None
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
