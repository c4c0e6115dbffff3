"""Symmetric memory for GPU kernels: every rank has one region, and a table of addresses says where.

Made by NVSHMEM for ranks on several GPUs and nodes, or by CUDA's handles between the processes of one host. A process
may also drive several virtual ranks, whose regions are slices of one tensor; tests and benchmarks do, on one GPU or in
the interpreter. Neither was run on a GPU yet.
"""

import ctypes
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.gpu.facts import NVSHMEM_LACKS, device_library, exchange_device
from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.peer_calls import broadcast, gather_bytes
from moe_serve.errors import CapacityError, ConfigError

HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
OWN_HEAP_BYTES = 128 << 20  # what NVSHMEM takes of its heap for itself, rounded up


@dataclass(frozen=True)
class SymmetricRegions:
    """The regions of all ranks, as the ranks of this process see them.

    peers:      [R] int64 on the device, address of each rank's region (with NVSHMEM the own entry is the one in use)
    first_rank: rank of this process, or of its first virtual rank;  num_local: 1, or V
    memory:     keeps the regions alive: a tensor, or what else owns them
    own:        [V, region_bytes] uint8, the regions of this process, where torch sees them; None: it does not
    launchers:  by kernel name, what is launched instead of the kernel; NVSHMEM links its device library there
    """

    region: Region
    peers: Tensor
    first_rank: int
    num_local: int
    memory: object
    nvshmem: bool = False
    launchers: dict[str, Any] | None = None
    own: Tensor | None = None

    def launcher(self, kernel: Any) -> Any:
        """Returns what to launch for this kernel."""
        return kernel if self.launchers is None else self.launchers[kernel.__name__]

    def staged_results(self, queue: int, dtype: torch.dtype) -> Tensor | None:
        """Returns where a queue sends results from, [V, S, capacity, H]; None where they are not sent from memory, or
        rows do not lie side by side."""
        region = self.region
        row_bytes = region.hidden * region.result_value_bytes
        if self.own is None or not region.stages or row_bytes != region.result_row_bytes:
            return None
        start = queue * region.queue_bytes + region.result_staged_at
        shape = self.num_local, region.slots_per_rank, region.capacity, region.hidden
        size = region.slots_per_rank * region.capacity * row_bytes
        return self.own[:, start : start + size].view(dtype).view(shape)


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


# ---- CUDA's IPC handles
# One process per GPU, or several on one. Kernels reach every peer by its address and write rows straight into its
# region; flags are released at system scope, as between virtual ranks. A handle is 64 bytes, sent over the process
# group. Memory comes from the driver, since torch's allocator cuts blocks from larger ones and may take them back.
# Tests run the protocol on memory that processes share, in Triton's interpreter.


def ipc_regions(region: Region, group: EpGroup) -> SymmetricRegions:
    """Allocates this rank's region, and maps those of all others; a collective call. Regions live with the process.

    Raises CapacityError when the GPU's memory does not suffice, ConfigError when a handle cannot be opened and in a
    graph capture.
    """
    refuse_capture("regions of GPU memory")
    assert group.process_group is not None, "several ranks have a process group"
    driver = CudaDriver(group.device)
    own = driver.allocate(region.region_bytes)
    # Ranks send their handle once their region is cleared, so no peer writes into it before.
    handles = [each.ljust(HANDLE_BYTES, b"\0") for each in gather_bytes(driver.handle_of(own), group.process_group)]
    addresses = [own if rank == group.rank else driver.open(handle) for rank, handle in enumerate(handles)]
    peers = torch.tensor(addresses, dtype=torch.int64).to(group.device)
    return SymmetricRegions(region, peers, group.rank, 1, driver)


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """The calls of libcuda. Maps a peer's memory for the device of this rank, also where it lies on another one."""

    def __init__(self, device: torch.device, library: Any = None):
        """library: what has the driver's functions; None: libcuda.so.1"""
        self._device = device
        if library is None:
            # The driver's calls work in the context that is current in this thread: the one torch has for the device.
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)
        self._cuda = library or ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        """Returns the address of new memory, all zeros, once the device has cleared it."""
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
        """Returns the HANDLE_BYTES by which another process opens allocated memory."""
        handle = _Handle()
        self._check(self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)), "cuIpcGetMemHandle")
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Returns where another process's memory is mapped here."""
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


# ---- NVSHMEM's symmetric heap
# nvshmem4py starts the library, once per process (its unique id travels over the process group, which is there under
# torchrun and mpirun alike), and allocates; kernels reach peers through torch's Triton bindings of NVSHMEM's device
# functions. Both are imported on use.


def start_nvshmem(group: EpGroup, heap_bytes: int) -> None:
    """Starts NVSHMEM on all ranks, unless this process has done so before; a collective call.

    heap_bytes: what will be allocated of its heap; $NVSHMEM_SYMMETRIC_SIZE, where it is set, goes before
    Raises ConfigError when nvshmem4py is missing, inside a graph capture, and when NVSHMEM runs for other ranks.
    """
    refuse_capture("NVSHMEM's heap")
    core = _library()
    gpu = import_module("cuda.core").Device(group.device.index)
    gpu.set_current()
    if is_started(core):
        place = core.my_pe(), core.n_pes()
        if place != (group.rank, group.num_ranks):
            raise ConfigError(
                f"NVSHMEM runs here already, as rank {place[0]} of {place[1]}, and dispatch needs it as rank "
                f"{group.rank} of {group.num_ranks}; start it for the expert ranks, or leave it to moe_serve"
            )
        return
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes + OWN_HEAP_BYTES))
    uid = exchange_unique_id(core, group)
    core.init(device=gpu, uid=uid, rank=group.rank, nranks=group.num_ranks, initializer_method="uid")


def is_started(core: Any) -> bool:
    """Returns whether this process has started NVSHMEM: its status is neither the lowest, not, nor the highest, bad."""
    core.get_version()  # loads the library, which the status asks
    status, known = core.init_status(), sorted(core.InitStatus)
    return bool(known[0] < status < known[-1])


def exchange_unique_id(core: Any, group: EpGroup) -> Any:
    """Returns rank 0's unique id on every rank. The id is a fixed-size array of bytes; nothing is pickled."""
    assert group.process_group is not None, "several ranks have a process group"
    uid = core.get_unique_id(empty=group.rank != 0)
    flat = uid._data.view(np.uint8).reshape(-1)  # the id's own memory
    data = torch.from_numpy(flat.copy()).to(exchange_device(group))
    broadcast(data, group.process_group)
    flat[:] = data.cpu().numpy()
    return uid


def nvshmem_regions(region: Region, group: EpGroup) -> SymmetricRegions:
    """Starts NVSHMEM where it does not run, and allocates this rank's region; a collective call.

    Raises ConfigError for a region that does not stage: NVSHMEM sends from memory; and what start_nvshmem raises.
    """
    if not region.stages:
        raise ConfigError("NVSHMEM sends rows from memory; build the Region with stages=True")
    # Before anything is started, so that what is missing is reported first.
    launchers = nvshmem_launchers(torch.cuda.get_device_capability(group.device))
    start_nvshmem(group, region.region_bytes)
    core = _library()
    try:
        memory = core.tensor((1, region.region_bytes), dtype=torch.uint8)
    except core.NvshmemInvalid as error:
        raise ConfigError(
            f"NVSHMEM runs in this process, but nvshmem4py cannot allocate of its heap ({error}): another library has "
            "started it; start it by nvshmem.core.init, or leave that to moe_serve, or set dispatch.backend: collective"
        ) from error
    memory.zero_()
    torch.cuda.synchronize(group.device)
    # Nobody writes into a region that its owner is still clearing.
    stream = import_module("cuda.core").Device(group.device.index).create_stream()
    core.barrier(core.Teams.TEAM_WORLD, stream=stream)
    stream.sync()
    peers = torch.zeros(region.num_ranks, dtype=torch.int64, device=group.device)
    peers[group.rank] = memory.data_ptr()
    return SymmetricRegions(region, peers, group.rank, 1, memory, True, launchers, own=memory)


def nvshmem_launchers(capability: tuple[int, int]) -> dict[str, Any]:
    """Returns the low-latency kernels linked with NVSHMEM's device library, by kernel name.

    capability: of the GPU, (9, 0) for sm_90
    Raises ConfigError when that library or torch's bindings are missing.
    """
    from moe_serve.dispatch.gpu import receive_triton as receive
    from moe_serve.dispatch.gpu import send_triton as send
    from moe_serve.dispatch.gpu.shmem_triton import HAS_NVSHMEM

    if not HAS_NVSHMEM:
        raise ConfigError(NVSHMEM_LACKS[2])
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder, requires_nvshmem

    path = device_library(capability)
    if path is None:
        raise ConfigError(NVSHMEM_LACKS[3])
    NvshmemLibFinder.found_device_lib_path = path  # torch looks for one file for all GPUs, which no wheel has now
    calls_nvshmem = (send.dispatch_send_kernel, send.combine_send_kernel)
    plain = (receive.dispatch_receive_kernel, receive.combine_receive_kernel)  # they read their own memory only
    linked = {kernel.__name__: requires_nvshmem(kernel) for kernel in calls_nvshmem}  # type: ignore[no-untyped-call]
    return linked | {kernel.__name__: kernel for kernel in plain}


def _library() -> Any:
    try:
        return import_module("nvshmem.core")
    except ImportError as error:
        raise ConfigError(
            f"nvshmem4py cannot be imported ({error}); pip install nvshmem4py-cu13, or set dispatch.backend: collective"
        ) from error
