"""The transport that `dispatch.backend: auto` takes, and why: for one rank, one host, linked GPUs, or the network.

A collective decision: every rank learns the same facts of all ranks, so all choose alike. The rules are pure functions
of these facts; `moe-serve check` asks them about the machine it runs on.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.dispatch.base import EpGroup, TransportRequest
from moe_serve.dispatch.by_batch import small_limits
from moe_serve.dispatch.capabilities import TRANSPORTS, Wanted, problems
from moe_serve.dispatch.gpu.facts import GpuFacts, gather_facts, nvshmem_problem, wire_problem
from moe_serve.dispatch.gpu.region import gpu_buffer_sizes, most_gpu_tokens
from moe_serve.dispatch.shm.memory import STORE_ORDER, compare_hosts
from moe_serve.dispatch.shm.region import buffer_sizes, most_tokens
from moe_serve.dispatch.wire import make_wire

MOST_GPU_SHARE = 4  # buffers that nobody asked for take at most one in so many bytes of what is free


@dataclass(frozen=True)
class Choice:
    """transport: a name in capabilities.py"""

    transport: str
    why: str


def choose_transport(group: EpGroup, request: TransportRequest) -> Choice:
    """Returns the transport for these ranks; a collective call where there are several."""
    if group.num_ranks == 1:
        return Choice("local", "one rank")
    assert group.process_group is not None, "several ranks have a process group"
    if group.device.type == "cuda":
        return choose_among_gpus(gather_facts(group), request)
    if group.device.type != "cpu":
        return Choice("collective", f"ranks compute on {group.device.type}")
    machine = platform.machine()
    if machine not in STORE_ORDER:  # before anything is gathered: the ranks of one job have one kind of machine
        return choose_among_cpus([0] * group.num_ranks, 0, machine, request)
    hosts, free_bytes, _ = compare_hosts(group.process_group)
    return choose_among_cpus(hosts, free_bytes, machine, request, has_link=group.link is not None)


def choose_among_cpus(
    hosts: Sequence[int], free_bytes: int, machine: str, request: TransportRequest, has_link: bool = False
) -> Choice:
    """Returns the transport for CPU ranks.

    hosts:      a number for each rank;  free_bytes: of shared memory
    has_link:   whether ranks of several hosts are connected by `HostLink`
    """
    if machine not in STORE_ORDER:
        return Choice("collective", f"shared memory relies on the store order of x86-64, this is {machine}")
    if len(set(hosts)) > 1 and not has_link:
        return Choice("collective", f"ranks are on {len(set(hosts))} hosts")
    max_ranks = TRANSPORTS["shm"].max_ranks
    if max_ranks is not None and len(hosts) > max_ranks:
        return Choice("collective", f"shared memory joins up to {max_ranks} ranks, these are {len(hosts)}")
    limits, wire = request.limits, make_wire(request.wire_dtype, request.dtype)
    if buffer_sizes(len(hosts), limits, wire).total * len(hosts) > free_bytes // 2:
        fit = most_tokens(len(hosts), limits, wire, free_bytes // 2)
        return Choice(
            "collective",
            f"buffers for {limits.max_tokens_per_rank} tokens would take more than half of the free shared memory; "
            f"{fit} tokens would fit",
        )
    if has_link:
        return Choice("hosts", f"{len(hosts)} CPU ranks on {len(set(hosts))} hosts")
    return Choice("shm", f"{len(hosts)} CPU ranks on one host")


def choose_among_gpus(ranks: Sequence[GpuFacts], request: TransportRequest) -> Choice:
    """Returns the transport for GPU ranks: NVSHMEM for decode-sized steps where it joins them all, NCCL for the rest.

    Decode waits for latency, and its rows are few. A prefill is bound by bandwidth, and static slabs for it would take
    many times the memory that they fill. cuda_ipc and deepep are taken by name only.
    """
    wanted = Wanted(len(ranks), "cuda", request.rows, request.combine)
    refused = problems("nvshmem", wanted)
    if refused:
        what = "rows is packed" if request.rows == "packed" else f"combine is {request.combine}"
        return Choice("collective", f"dispatch.{what}, which only NCCL does on GPUs")
    problem = wire_problem(ranks, request.dtype, request.wire_dtype) or nvshmem_problem(ranks)
    if problem:
        return Choice("collective", problem)
    small = small_limits(request.limits)
    share = min(rank.free_bytes for rank in ranks) // MOST_GPU_SHARE
    sizes = gpu_buffer_sizes(len(ranks), small, request.dtype, request.wire_dtype, stages=True)
    if sizes.total > share:
        fit = most_gpu_tokens(len(ranks), small, request.dtype, request.wire_dtype, True, share)
        return Choice(
            "collective",
            f"buffers for {small.max_tokens_per_rank} tokens take {sizes.total / 2**30:.2f} GiB, more than a quarter "
            f"of what is free on a GPU; {fit} tokens would fit",
        )
    joined = f"NVSHMEM joins {len(ranks)} GPU ranks"
    if small == request.limits or problems("by_batch", wanted):
        return Choice("nvshmem", joined)
    return Choice(
        "by_batch", f"{joined}: steps of up to {small.max_tokens_per_rank} tokens per rank use it, larger ones NCCL"
    )
