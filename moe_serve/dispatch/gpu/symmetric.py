"""Symmetric memory for GPU kernels: every rank has one region, and a table of addresses says where.

Made by NVSHMEM in nvshmem.py, or by CUDA's handles between the processes of one host in ipc.py. A process may also
drive several virtual ranks, whose regions are slices of one tensor; tests and benchmarks do, on one GPU or in the
interpreter.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_serve.dispatch.gpu.region import Region
from moe_serve.errors import ConfigError


@dataclass(frozen=True)
class SymmetricRegions:
    """The regions of all ranks, as the ranks of this process see them.

    peers:      [R] int64 on the device, address of each rank's region (with NVSHMEM the own entry is the one in use)
    first_rank: rank of this process, or of its first virtual rank;  num_local: 1, or V
    memory:     keeps the regions alive: a tensor, or what else owns them
    launchers:  by kernel name, what is launched instead of the kernel; NVSHMEM links its device library there
    """

    region: Region
    peers: Tensor
    first_rank: int
    num_local: int
    memory: object
    nvshmem: bool = False
    launchers: dict[str, Any] | None = None

    def launcher(self, kernel: Any) -> Any:
        """Returns what to launch for this kernel."""
        return kernel if self.launchers is None else self.launchers[kernel.__name__]


@dataclass(frozen=True)
class Sent:
    """One handle in flight: its queue, and the ids it was sent with ([V, T, K] int64)."""

    queue: int
    ids: Tensor


def refuse_capture(what: str) -> None:
    """Raises ConfigError while a CUDA graph is captured: what is allocated then belongs to the graph."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"{what} cannot be made while a CUDA graph is captured; build the transport and run it once before"
        )
