"""Regions that the processes of one host map from each other's GPU memory by CUDA's IPC handles; no NVSHMEM needed.

One process per GPU, or several on one. Kernels reach every peer by its address and write rows straight into its region;
flags are released at system scope, as between virtual ranks. A handle is 64 bytes, sent over the process group. Memory
comes from the driver, since torch's allocator cuts blocks from larger ones and may take them back. Not run on a GPU
yet: tests run the protocol on memory that processes share, in Triton's interpreter.
"""

import ctypes
from typing import Any, Protocol

import numpy as np
import torch

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.gpu.facts import exchange_device
from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.gpu.symmetric import SymmetricRegions, refuse_capture
from moe_serve.dispatch.peer_calls import all_gather
from moe_serve.errors import CapacityError, ConfigError

HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1


class IpcDriver(Protocol):
    """What is needed of CUDA's driver, for the device that is current."""

    def allocate(self, num_bytes: int) -> int:
        """Returns the address of new memory, all zeros, once the device has cleared it."""
        ...

    def handle_of(self, address: int) -> bytes:
        """Returns the HANDLE_BYTES by which another process opens allocated memory."""
        ...

    def open(self, handle: bytes) -> int:
        """Returns where another process's memory is mapped here."""
        ...


def ipc_regions(region: Region, group: EpGroup, driver: IpcDriver | None = None) -> SymmetricRegions:
    """Allocates this rank's region, and maps those of all others; a collective call. Regions live with the process.

    driver: None: CUDA's, for group.device
    Raises CapacityError when the GPU's memory does not suffice, ConfigError when a handle cannot be opened and in a
    graph capture.
    """
    refuse_capture("regions of GPU memory")
    assert group.process_group is not None, "several ranks have a process group"
    driver = driver or CudaDriver(group.device)
    own = driver.allocate(region.region_bytes)
    # Ranks send their handle once their region is cleared, so no peer writes into it before.
    handles = exchange_handles(driver.handle_of(own), group)
    addresses = [own if rank == group.rank else driver.open(handle) for rank, handle in enumerate(handles)]
    peers = torch.tensor(addresses, dtype=torch.int64).to(group.device)
    return SymmetricRegions(region, peers, group.rank, 1, driver)


def exchange_handles(handle: bytes, group: EpGroup) -> list[bytes]:
    """Returns the handles of all ranks, in rank order; a collective call."""
    assert len(handle) == HANDLE_BYTES, f"a handle of {len(handle)} bytes"
    own = torch.from_numpy(np.frombuffer(handle, dtype=np.uint8).copy()).to(exchange_device(group))
    rows = [torch.empty_like(own) for _ in range(group.num_ranks)]
    all_gather(rows, own, group.process_group)
    return [row.cpu().numpy().tobytes() for row in rows]


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """IpcDriver over libcuda. Maps a peer's memory for the device of this rank, also where it lies on another one."""

    def __init__(self, device: torch.device, library: Any = None):
        """library: what has the driver's functions; None: libcuda.so.1"""
        self._device = device
        if library is None:
            # The driver's calls work in the context that is current in this thread: the one torch has for the device.
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)
        self._cuda = library or ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        code = self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
        if code == _OUT_OF_MEMORY:
            raise CapacityError(
                f"low-latency buffers take {num_bytes / 2**30:.2f} GiB, which {self._device} has not free; lower "
                "dispatch.max_tokens_per_rank, or cache.memory_gib"
            )
        self._check(code, "cuMemAlloc")
        self._check(self._cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "cuMemsetD8")
        self._check(self._cuda.cuCtxSynchronize(), "cuCtxSynchronize")
        return address.value

    def handle_of(self, address: int) -> bytes:
        handle = _Handle()
        self._check(self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)), "cuIpcGetMemHandle")
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        theirs = _Handle.from_buffer_copy(handle)
        code = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), theirs, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._check(code, "cuIpcOpenMemHandle")
        return address.value

    def _check(self, code: int, call: str) -> None:
        if code:
            raise ConfigError(
                f"dispatch.backend cuda_ipc: {call} failed on {self._device} with CUDA error {code}; all ranks must be "
                "on one host, outside MIG, and in containers that share their IPC namespace, else set "
                "dispatch.backend: collective"
            )
