"""The facts that decide whether GPU kernels can write into the memory of all ranks: looked up on each, gathered.

The rules over these facts are pure functions, here and in choose.py, so that every rank comes to the same answer and a
test can ask about machines that are not here.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import all_gather

E4M3_SINCE = (8, 9)  # compute capability
NVSHMEM_LACKS = (
    "",
    "nvshmem4py is not installed; pip install nvshmem4py-cu13",
    "torch has no Triton bindings for NVSHMEM; they need a CUDA build of torch 2.11 or later, triton and a GPU",
    "NVSHMEM has no device library for this GPU here; pip install 'nvshmem4py-cu13>=0.4' nvidia-nvshmem-cu13, or set "
    "NVSHMEM_LIB_DIR to a folder with libnvshmem_device.bc",
)


@dataclass(frozen=True)
class GpuFacts:
    """One rank.

    host:       a number that is equal on ranks of one machine
    capability: of its GPU, (9, 0) for sm_90;  free_bytes: of the GPU's memory
    lacks:      what NVSHMEM needs and is not here, an index of NVSHMEM_LACKS; 0: nothing
    is_linked:  whether the GPUs that it sees reach each other's memory
    has_rdma:   whether the machine has an RDMA device
    """

    host: int
    capability: tuple[int, int]
    free_bytes: int
    lacks: int = 0
    is_linked: bool = True
    has_rdma: bool = False


def gather_facts(group: EpGroup) -> list[GpuFacts]:
    """Returns the facts of all ranks, in rank order, the same list on each; a collective call."""
    device = group.device
    own = torch.tensor(
        [
            host_number(),
            *torch.cuda.get_device_capability(device),
            torch.cuda.mem_get_info(device)[0],
            nvshmem_lacks(torch.cuda.get_device_capability(device)),
            not unlinked_pairs(),
            bool(rdma_devices()),
        ],
        dtype=torch.int64,
    ).to(exchange_device(group))
    rows = [torch.empty_like(own) for _ in range(group.num_ranks)]
    all_gather(rows, own, group.process_group)
    numbers = torch.stack(rows).cpu().numpy()
    return [
        GpuFacts(int(host), (int(major), int(minor)), int(free), int(lacks), bool(linked), bool(rdma))
        for host, major, minor, free, lacks, linked, rdma in numbers
    ]


def exchange_device(group: EpGroup) -> torch.device:
    """Returns where small messages of a group must lie: NCCL takes them on the GPU, gloo on the host."""
    return group.device if dist.get_backend(group.process_group) == "nccl" else torch.device("cpu")


def wire_problem(ranks: Sequence[GpuFacts], dtype: torch.dtype, wire_dtype: str) -> str | None:
    """Returns why the low-latency kernels do not carry this wire between these GPUs, with what to do; None: they do."""
    if wire_dtype == "fp8":
        for rank, facts in enumerate(ranks):
            if facts.capability < E4M3_SINCE:
                major, minor = facts.capability
                return (
                    f"dispatch.wire_dtype is fp8 but the GPU of rank {rank} is sm_{major}{minor} and e4m3 begins with "
                    "sm_89; set dispatch.wire_dtype: auto"
                )
    names = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "float16"}
    if dtype not in names:
        return f"rows are {dtype} and the low-latency kernels carry {', '.join(names.values())}; set model.dtype"
    if wire_dtype not in ("auto", "fp8", names[dtype]):
        return (
            f"dispatch.wire_dtype is {wire_dtype} and rows are {names[dtype]}; low latency on GPUs carries fp8 or the "
            "compute dtype: set it to fp8 or auto"
        )
    return None


def nvshmem_problem(ranks: Sequence[GpuFacts]) -> str | None:
    """Returns why NVSHMEM does not join these ranks, with what to do; None: it does."""
    for rank, facts in enumerate(ranks):
        if facts.lacks:
            return f"rank {rank}: {NVSHMEM_LACKS[facts.lacks]}, or set dispatch.backend: collective"
    num_hosts = len({facts.host for facts in ranks})
    if num_hosts == 1:
        return _link_problem(ranks)
    without = [rank for rank, facts in enumerate(ranks) if not facts.has_rdma]
    if without:
        return (
            f"ranks are on {num_hosts} hosts and rank {without[0]} sees no RDMA device, which NVSHMEM needs between "
            "them; give the container its devices, or set dispatch.backend: collective"
        )
    return None


def ipc_problem(ranks: Sequence[GpuFacts]) -> str | None:
    """Returns why these ranks cannot map each other's GPU memory, with what to do; None: they can."""
    elsewhere = [rank for rank, facts in enumerate(ranks) if facts.host != ranks[0].host]
    if elsewhere:
        return (
            f"dispatch.backend is cuda_ipc but rank {elsewhere[0]} is on another host than rank 0; set "
            "dispatch.backend: low_latency, which takes NVSHMEM, or collective"
        )
    return _link_problem(ranks)


def _link_problem(ranks: Sequence[GpuFacts]) -> str | None:
    cut_off = [rank for rank, facts in enumerate(ranks) if not facts.is_linked]
    if not cut_off:
        return None
    return (
        f"rank {cut_off[0]} sees GPUs that cannot reach each other's memory; choose GPUs that are linked by "
        "CUDA_VISIBLE_DEVICES, or set dispatch.backend: collective"
    )


def host_number() -> int:
    """Returns 62 bits that are equal for all processes of one booted machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    return int(boot, 16) & (2**62 - 1)


def rdma_devices() -> tuple[str, ...]:
    """Returns the names of this machine's RDMA devices."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def unlinked_pairs() -> tuple[tuple[int, int], ...]:
    """Returns the pairs of visible GPUs that cannot reach each other's memory."""
    gpus = range(torch.cuda.device_count())
    return tuple((a, b) for a in gpus for b in gpus if a < b and not torch.cuda.can_device_access_peer(a, b))


def nvshmem_lacks(capability: tuple[int, int]) -> int:
    """Returns what NVSHMEM needs and is not installed here: an index of NVSHMEM_LACKS. capability: of the GPU"""
    try:
        found = find_spec("nvshmem.core") is not None
    except ImportError:
        found = False
    if not found:
        return 1
    from moe_serve.dispatch.gpu.shmem_triton import HAS_NVSHMEM

    if not HAS_NVSHMEM:
        return 2
    return 3 if device_library(capability) is None else 0


def device_library(capability: tuple[int, int]) -> str | None:
    """Returns the path of NVSHMEM's device library for a GPU; None where there is none.

    $NVSHMEM_LIB_DIR goes first. The wheels have a file for some architectures: a GPU takes that of its own one, else
    that of the first of its generation.
    """
    if folder := os.environ.get("NVSHMEM_LIB_DIR"):
        path = Path(folder) / "libnvshmem_device.bc"
        return str(path) if path.exists() else None
    core = import_module("nvshmem.core")
    major, minor = capability
    for arch in dict.fromkeys((f"{major}{minor}", f"{major}0")):
        with contextlib.suppress(core.NvshmemInvalid):
            return str(core.find_device_bitcode_library(arch=arch))
    return None
