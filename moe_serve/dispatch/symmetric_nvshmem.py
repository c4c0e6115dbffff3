"""Regions in NVSHMEM's symmetric heap, for ranks on several GPUs and nodes.

nvshmem4py starts the library (its unique id travels through torch's store, or mpi4py hands over the ranks) and
allocates; kernels reach peers through torch's Triton bindings of NVSHMEM's device functions. Both are imported on use.
"""

from importlib import import_module
from typing import Any

import torch
from torch.distributed import Store

from moe_serve.dispatch.symmetric_gpu import SymmetricRegions
from moe_serve.errors import ConfigError
from moe_serve.kernels.low_latency_region import Region

UNIQUE_ID_KEY = "moe_serve/nvshmem_unique_id"


def start_nvshmem(rank: int, num_ranks: int, device: torch.device, store: Store | None, mpi_comm: Any = None) -> None:
    """Starts NVSHMEM on all ranks; give a store that all share, or an mpi4py communicator of these ranks.

    Raises ConfigError when nvshmem4py is missing, or inside a graph capture.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ConfigError("NVSHMEM cannot start while a CUDA graph is captured; build the dispatch before")
    core = _library()
    gpu = import_module("cuda.core").Device(device.index)
    gpu.set_current()
    if mpi_comm is not None:
        core.init(device=gpu, mpi_comm=mpi_comm, initializer_method="mpi")
        return
    if store is None:
        raise ConfigError("NVSHMEM needs a torch.distributed store or an mpi4py communicator to start; pass one")
    core.init(
        device=gpu, uid=exchange_unique_id(core, rank, store), rank=rank, nranks=num_ranks, initializer_method="uid"
    )


def exchange_unique_id(core: Any, rank: int, store: Store) -> Any:
    """Returns rank 0's unique id on every rank. The id is a fixed-size array of bytes; nothing is pickled."""
    if rank == 0:
        uid = core.get_unique_id()
        store.set(UNIQUE_ID_KEY, uid._data.tobytes())
        return uid
    uid = core.get_unique_id(empty=True)
    uid._data.view("uint8").reshape(-1)[:] = bytearray(store.get(UNIQUE_ID_KEY))
    return uid


def nvshmem_regions(region: Region, rank: int, device: torch.device) -> SymmetricRegions:
    """Allocates this rank's region; all ranks call it together, after start_nvshmem, with the same region.

    Raises ConfigError for a region that does not stage: NVSHMEM sends from memory.
    """
    if not region.stages:
        raise ConfigError("NVSHMEM sends rows from memory; build the Region with stages=True")
    core = _library()
    memory = core.tensor((1, region.region_bytes), dtype=torch.uint8)
    memory.zero_()
    torch.cuda.synchronize(device)
    # Nobody writes into a region that its owner is still clearing.
    stream = import_module("cuda.core").Device(device.index).create_stream()
    core.barrier(core.Teams.TEAM_WORLD, stream=stream)
    stream.sync()
    peers = torch.zeros(region.num_ranks, dtype=torch.int64, device=device)
    peers[rank] = memory.data_ptr()
    return SymmetricRegions(region, peers, rank, 1, memory, nvshmem=True, launchers=nvshmem_launchers())


def nvshmem_launchers() -> dict[str, Any]:
    """Returns the low-latency kernels linked with NVSHMEM's device library, by kernel name.

    Raises ConfigError when that library or torch's bindings are missing.
    """
    from moe_serve.kernels import low_latency_receive_triton as receive
    from moe_serve.kernels import low_latency_send_triton as send
    from moe_serve.kernels.shmem_triton import HAS_NVSHMEM

    if not HAS_NVSHMEM:
        raise ConfigError(
            "torch has no Triton bindings for NVSHMEM here; they need a CUDA build of torch 2.11 or later, "
            "triton and a GPU"
        )
    from torch.distributed._symmetric_memory._nvshmem_triton import requires_nvshmem

    calls_nvshmem = (send.dispatch_send_kernel, send.combine_send_kernel, send.finish_kernel)
    plain = (receive.dispatch_receive_kernel, receive.combine_receive_kernel)  # they read their own memory only
    try:
        linked = {kernel.__name__: requires_nvshmem(kernel) for kernel in calls_nvshmem}  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"{error}; pip install nvidia-nvshmem-cu13, or set NVSHMEM_LIB_DIR to its lib folder"
        ) from error
    return linked | {kernel.__name__: kernel for kernel in plain}


def _library() -> Any:
    try:
        return import_module("nvshmem.core")
    except ImportError as error:
        raise ConfigError(
            f"nvshmem4py cannot be imported ({error}); pip install nvshmem4py-cu13, or set dispatch.backend: collective"
        ) from error
