"""Regions in NVSHMEM's symmetric heap, for ranks on several GPUs and nodes. Not run on a GPU yet.

nvshmem4py starts the library, once per process (its unique id travels over the process group, which is there under
torchrun and mpirun alike), and allocates; kernels reach peers through torch's Triton bindings of NVSHMEM's device
functions. Both are imported on use.
"""

import os
from importlib import import_module
from typing import Any

import numpy as np
import torch

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.gpu.facts import NVSHMEM_LACKS, exchange_device
from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.gpu.symmetric import SymmetricRegions, refuse_capture
from moe_serve.dispatch.peer_calls import broadcast
from moe_serve.errors import ConfigError

OWN_HEAP_BYTES = 128 << 20  # what NVSHMEM takes of its heap for itself, rounded up


def start_nvshmem(group: EpGroup, heap_bytes: int) -> None:
    """Starts NVSHMEM on all ranks, unless this process has done so before; a collective call.

    heap_bytes: what will be allocated of its heap; $NVSHMEM_SYMMETRIC_SIZE, where it is set, goes before
    Raises ConfigError when nvshmem4py is missing, inside a graph capture, and when another library started NVSHMEM
    for other ranks.
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
    launchers = nvshmem_launchers()  # before anything is started, so that what is missing is reported first
    start_nvshmem(group, region.region_bytes)
    core = _library()
    memory = core.tensor((1, region.region_bytes), dtype=torch.uint8)
    memory.zero_()
    torch.cuda.synchronize(group.device)
    # Nobody writes into a region that its owner is still clearing.
    stream = import_module("cuda.core").Device(group.device.index).create_stream()
    core.barrier(core.Teams.TEAM_WORLD, stream=stream)
    stream.sync()
    peers = torch.zeros(region.num_ranks, dtype=torch.int64, device=group.device)
    peers[group.rank] = memory.data_ptr()
    return SymmetricRegions(region, peers, group.rank, 1, memory, nvshmem=True, launchers=launchers)


def nvshmem_launchers() -> dict[str, Any]:
    """Returns the low-latency kernels linked with NVSHMEM's device library, by kernel name.

    Raises ConfigError when that library or torch's bindings are missing.
    """
    from moe_serve.dispatch.gpu import receive_triton as receive
    from moe_serve.dispatch.gpu import send_triton as send
    from moe_serve.dispatch.gpu.shmem_triton import HAS_NVSHMEM

    if not HAS_NVSHMEM:
        raise ConfigError(NVSHMEM_LACKS[2])
    from torch.distributed._symmetric_memory._nvshmem_triton import requires_nvshmem

    calls_nvshmem = (send.dispatch_send_kernel, send.combine_send_kernel, send.finish_kernel)
    plain = (receive.dispatch_receive_kernel, receive.combine_receive_kernel)  # they read their own memory only
    try:
        linked = {kernel.__name__: requires_nvshmem(kernel) for kernel in calls_nvshmem}  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(f"{NVSHMEM_LACKS[3]} ({error})") from error
    return linked | {kernel.__name__: kernel for kernel in plain}


def _library() -> Any:
    try:
        return import_module("nvshmem.core")
    except ImportError as error:
        raise ConfigError(
            f"nvshmem4py cannot be imported ({error}); pip install nvshmem4py-cu13, or set dispatch.backend: collective"
        ) from error
