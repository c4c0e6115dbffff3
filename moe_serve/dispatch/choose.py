"""What `dispatch.backend: auto` means here, and why: one rank, one host, GPUs that reach each other, or the network.

A collective decision: every rank learns the same facts of all ranks, so all choose alike. The rules are pure functions
of these facts; `moe-serve check` asks them about the machine it runs on.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_serve.dispatch.base import BufferLimits, Combine, EpGroup
from moe_serve.dispatch.by_batch import small_limits
from moe_serve.dispatch.gpu.facts import GpuFacts, gather_facts, nvshmem_problem, wire_problem
from moe_serve.dispatch.gpu.sizes import gpu_buffer_sizes, most_gpu_tokens
from moe_serve.dispatch.shm.memory import MAX_RANKS, STORE_ORDER, compare_hosts
from moe_serve.dispatch.shm.sizes import buffer_sizes, most_tokens
from moe_serve.dispatch.wire import make_wire

MOST_GPU_SHARE = 4  # buffers that nobody asked for take at most one in so many bytes of what is free
UNKNOWN_SHAPE = "the shape of rows is not known, so no buffers can be made"


@dataclass(frozen=True)
class Choice:
    """backend: a name of make_all_to_all, which also knows "by_batch": low_latency for decode-sized steps, collective
    for larger ones"""

    backend: str
    why: str


def choose_backend(
    group: EpGroup,
    limits: BufferLimits | None,
    dtype: torch.dtype,
    wire_dtype: str,
    masked: bool | None = None,
    combine: Combine = "ordered",
) -> Choice:
    """Returns the transport for these ranks; a collective call where there are several.

    limits: None where the caller does not know its shapes; then nothing with static buffers is chosen
    dtype, wire_dtype, masked, combine: as make_all_to_all takes them
    """
    if group.num_ranks == 1:
        return Choice("local", "one rank")
    if limits is None:
        return Choice("collective", UNKNOWN_SHAPE)
    assert group.process_group is not None, "several ranks have a process group"
    if group.device.type == "cuda":
        return choose_among_gpus(gather_facts(group), limits, dtype, wire_dtype, masked, combine)
    if group.device.type != "cpu":
        return Choice("collective", f"ranks compute on {group.device.type}")
    machine = platform.machine()
    if machine not in STORE_ORDER:  # before anything is gathered: the ranks of one job have one kind of machine
        return choose_among_cpus([0] * group.num_ranks, 0, machine, limits, dtype, wire_dtype)
    hosts, free_bytes, _ = compare_hosts(group.process_group)
    return choose_among_cpus(hosts, free_bytes, machine, limits, dtype, wire_dtype)


def choose_among_cpus(
    hosts: Sequence[int], free_bytes: int, machine: str, limits: BufferLimits, dtype: torch.dtype, wire_dtype: str
) -> Choice:
    """Returns the transport for CPU ranks. hosts: a number for each rank;  free_bytes: of shared memory"""
    if machine not in STORE_ORDER:
        return Choice("collective", f"shared memory relies on the store order of x86-64, this is {machine}")
    if len(set(hosts)) > 1:
        return Choice("collective", f"ranks are on {len(set(hosts))} hosts")
    if len(hosts) > MAX_RANKS:
        return Choice("collective", f"shared memory joins up to {MAX_RANKS} ranks, these are {len(hosts)}")
    wire = make_wire(wire_dtype, dtype)
    if buffer_sizes(len(hosts), limits, wire).total * len(hosts) > free_bytes // 2:
        fit = most_tokens(len(hosts), limits, wire, free_bytes // 2)
        return Choice(
            "collective",
            f"buffers for {limits.max_tokens_per_rank} tokens would take more than half of the free shared memory; "
            f"{fit} tokens would fit",
        )
    return Choice("low_latency", f"{len(hosts)} CPU ranks on one host")


def choose_among_gpus(
    ranks: Sequence[GpuFacts],
    limits: BufferLimits,
    dtype: torch.dtype,
    wire_dtype: str,
    masked: bool | None,
    combine: Combine = "ordered",
) -> Choice:
    """Returns the transport for GPU ranks: NVSHMEM for decode-sized steps where it joins them all, NCCL for the rest.

    Decode waits for latency, and its rows are few; a prefill is bound by bandwidth, and static slabs for it would take
    many times the memory that they fill. cuda_ipc and deepep are taken by name only.
    """
    if masked is False:
        return Choice("collective", "dispatch.rows is packed, which only NCCL gives on GPUs")
    if combine == "rank_sum":
        return Choice("collective", "dispatch.combine is rank_sum, which only NCCL's rows have on GPUs")
    problem = wire_problem(ranks, dtype, wire_dtype) or nvshmem_problem(ranks)
    if problem:
        return Choice("collective", problem)
    few = small_limits(limits)
    share = min(rank.free_bytes for rank in ranks) // MOST_GPU_SHARE
    sizes = gpu_buffer_sizes(len(ranks), few, dtype, wire_dtype, stages=True)
    if sizes.total > share:
        fit = most_gpu_tokens(len(ranks), few, dtype, wire_dtype, True, share)
        return Choice(
            "collective",
            f"buffers for {few.max_tokens_per_rank} tokens take {sizes.total / 2**30:.2f} GiB, more than a quarter of "
            f"what is free on a GPU; {fit} tokens would fit",
        )
    joined = f"NVSHMEM joins {len(ranks)} GPU ranks"
    if few == limits or masked:
        return Choice("low_latency", joined)
    return Choice(
        "by_batch", f"{joined}: steps of up to {few.max_tokens_per_rank} tokens per rank by it, larger by NCCL"
    )
