"""What DeepEP can carry, checked before its buffers are made, so that a setting is named and not an assertion of C++.

All problems are reported at once. The figures are those of DeepEP 2.1.0's source; tests compare them with it.
"""

import inspect
import os
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.gpu.facts import host_number, rdma_devices, unlinked_pairs
from moe_serve.dispatch.peer_calls import all_gather

LOW_LATENCY_TOPK = 11  # compiled into V1, as are the next two
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
NORMAL_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
DEFAULT_QP_DEPTH = 1024
INSTALL = "install DeepEP from its repository (it has no official wheels), or set dispatch.backend: auto"

# Class, method and the parameters that the adapter passes by name: releases of one generation differ in these.
_CALLS: dict[str, dict[str, tuple[str, ...]]] = {
    "low_latency": {
        "get_low_latency_rdma_size_hint": (),
        "low_latency_dispatch": ("use_fp8", "return_recv_hook"),
        "low_latency_combine": ("return_recv_hook",),
        "destroy": (),
    },
    "normal": {
        "get_dispatch_config": (),
        "get_combine_config": (),
        "get_dispatch_layout": (),
        "dispatch": (
            "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert",
            "topk_idx", "topk_weights", "async_finish",
        ),
        "combine": ("async_finish",),
        "destroy": (),
    },
    "elastic": {
        "dispatch": (
            "topk_idx", "num_experts", "expert_alignment", "do_cpu_sync", "do_expand", "async_with_compute_stream",
        ),
        "combine": ("async_with_compute_stream",),
        "destroy": (),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """num_hosts:   hosts of the group
    rdma:        names of this host's RDMA devices
    cut_off:     pairs of visible GPUs that cannot reach each other's memory
    qp_depth:    NVSHMEM_QP_DEPTH
    """

    num_hosts: int = 1
    rdma: tuple[str, ...] = ()
    cut_off: tuple[tuple[int, int], ...] = ()
    qp_depth: int = DEFAULT_QP_DEPTH


def look(group: EpGroup) -> Machine:
    """Returns the facts of this machine; a collective call where there is a process group."""
    cut_off = unlinked_pairs() if group.device.type == "cuda" else ()
    qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", DEFAULT_QP_DEPTH))
    return Machine(_num_hosts(group), rdma_devices(), cut_off, qp_depth)


def _num_hosts(group: EpGroup) -> int:
    if group.process_group is None:
        return 1
    own = torch.tensor([host_number()], device=group.device)
    hosts = [torch.empty_like(own) for _ in range(group.num_ranks)]
    all_gather(hosts, own, group.process_group)
    return int(np.unique(torch.cat(hosts).cpu().numpy()).size)


def problems(library: ModuleType, group: EpGroup, request: TransportRequest, mode: str, machine: Machine) -> list[str]:
    """Returns what keeps a mode from serving here, each with what to do; empty: nothing."""
    limits, dtype, wire_dtype = request.limits, request.dtype, request.wire_dtype
    found = _calls_missing(library, mode)
    if group.process_group is None:
        found.append("DeepEP joins the ranks of a process group and here is one rank; set dispatch.backend: local")
    if dtype != torch.bfloat16 or wire_dtype == "float32":
        found.append(
            f"DeepEP carries bf16 rows, here they are {str(dtype).removeprefix('torch.')} and dispatch.wire_dtype is "
            f"{wire_dtype}; set model.dtype: bfloat16 and dispatch.wire_dtype: auto"
        )
    if wire_dtype == "fp8" and (mode != "low_latency" or limits.hidden % 128):
        found.append(
            f"DeepEP takes fp8 rows here in low_latency and with hidden a multiple of 128, this is {mode} with "
            f"{limits.hidden}; set dispatch.wire_dtype: auto"
        )
    match mode:
        case "low_latency":
            found += _low_latency_problems(limits, machine)
        case "normal":
            found += _normal_problems(group.num_ranks, limits, machine)
        case _:
            if limits.hidden % 8:
                found.append(f"DeepEP carries rows of a multiple of 16 bytes, hidden is {limits.hidden}; {INSTALL}")
    if machine.num_hosts > 1 and not any(name.startswith("mlx5") for name in machine.rdma):
        have = ", ".join(machine.rdma) or "none"
        found.append(
            f"ranks are on {machine.num_hosts} hosts, between which DeepEP needs RDMA over an mlx5 device, here is "
            f"{have}; give the container its devices, or set dispatch.backend: collective"
        )
    if machine.cut_off:
        a, b = machine.cut_off[0]
        found.append(
            f"GPUs {a} and {b} cannot reach each other's memory and DeepEP needs NVLink within a host; "
            "choose GPUs that are linked by CUDA_VISIBLE_DEVICES, or set dispatch.backend: collective"
        )
    return found


def _low_latency_problems(limits: BufferLimits, machine: Machine) -> list[str]:
    found = []
    need = 2 * (limits.max_tokens_per_rank + 1)
    if machine.qp_depth < need:
        found.append(
            f"NVSHMEM_QP_DEPTH is {machine.qp_depth} and {limits.max_tokens_per_rank} tokens need {need}; raise it, or "
            "lower dispatch.max_tokens_per_rank"
        )
    if limits.topk > LOW_LATENCY_TOPK:
        found.append(
            f"DeepEP's low-latency kernels take up to {LOW_LATENCY_TOPK} experts per token, this model has "
            f"{limits.topk}; use its elastic mode, or set dispatch.backend: auto"
        )
    if limits.hidden not in LOW_LATENCY_HIDDEN:
        found.append(
            f"DeepEP's low-latency kernels are compiled for hidden {', '.join(map(str, LOW_LATENCY_HIDDEN))}, this "
            f"model has {limits.hidden}; use its elastic mode, or set dispatch.backend: auto"
        )
    return found


def _normal_problems(num_ranks: int, limits: BufferLimits, machine: Machine) -> list[str]:
    found = []
    if num_ranks not in NORMAL_RANKS:
        found.append(
            f"DeepEP's normal kernels are tuned for {', '.join(map(str, NORMAL_RANKS))} ranks, here are {num_ranks}; "
            "use one of these, or a DeepEP with ElasticBuffer"
        )
    multiple = 256 if machine.num_hosts > 1 else 16  # channels: whole warps of 16 bytes, or two halves of 16 bytes
    if limits.hidden % multiple:
        found.append(
            f"DeepEP's normal kernels need hidden to be a multiple of {multiple} here, it is {limits.hidden}; "
            "set dispatch.backend: collective"
        )
    return found


def _calls_missing(library: ModuleType, mode: str) -> list[str]:
    """Returns one line when the installed release lacks a class, a method or a parameter that the mode uses."""
    version = getattr(library, "__version__", "of unknown version")
    name = "ElasticBuffer" if mode == "elastic" else "Buffer"
    if not hasattr(library, name):
        return [f"the installed DeepEP {version} has no {name}, which {mode} needs; {INSTALL}"]
    kind = getattr(library, name)
    missing = []
    for method, parameters in _CALLS[mode].items():
        if not hasattr(kind, method):
            missing.append(f"{name}.{method}")
            continue
        known = inspect.signature(getattr(kind, method)).parameters
        missing += [f"{name}.{method}({parameter}=)" for parameter in parameters if parameter not in known]
    if not missing:
        return []
    return [f"the installed DeepEP {version} has no {', '.join(missing)}; this adapter is written for 2.1.0: {INSTALL}"]
