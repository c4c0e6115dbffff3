"""Describes the transport for `moe-serve check`: which one, why, how large its buffers are. Nothing is allocated.

It asks the functions that the ranks themselves ask (dispatch/choose.py, dispatch/*/sizes.py), about this machine: what
only all ranks together can find out is said as a condition.
"""

import os
import platform
from dataclasses import dataclass, replace

import torch

from moe_serve.config import ServeConfig
from moe_serve.dispatch.base import BufferLimits, TransportRequest
from moe_serve.dispatch.buffer_sizes import BufferSizes
from moe_serve.dispatch.by_batch import small_limits
from moe_serve.dispatch.capabilities import TRANSPORTS, Wanted, problems, survivors, transports_of
from moe_serve.dispatch.choose import Choice, choose_among_cpus, choose_among_gpus
from moe_serve.dispatch.gpu.facts import (
    GpuFacts,
    ipc_problem,
    nvshmem_lacks,
    nvshmem_problem,
    rdma_devices,
    unlinked_pairs,
    wire_problem,
)
from moe_serve.dispatch.gpu.region import gpu_buffer_sizes, most_gpu_tokens
from moe_serve.dispatch.shm.region import buffer_sizes, most_tokens
from moe_serve.dispatch.shm.row_copy_native import load_library
from moe_serve.dispatch.wire import make_wire
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.engine.model.shared_weights import Sharing
from moe_serve.engine.recovery.full_placement import has_slots_without, meaning_of_a_loss, meaning_of_a_lost_host

SHARED = "/dev/shm"
_WITH_BUFFERS = ("shm", "nvshmem", "cuda_ipc", "by_batch")
_UNKNOWN = "low_latency (NVSHMEM) or collective (NCCL)"  # without a GPU to ask, auto may be either


@dataclass(frozen=True)
class Machine:
    """The facts of the machine that `check` runs on, as far as the rules ask for them.

    free_bytes: of shared memory, or of a GPU once the weights are there;  processor: its kind
    gpu, num_gpus: facts of a GPU here, and how many there are; None: there is none to ask
    """

    free_bytes: int
    processor: str = "x86_64"
    gpu: GpuFacts | None = None
    num_gpus: int = 0


@dataclass(frozen=True)
class TransportReport:
    """name: for people;  why: the reason, or the condition;  facts: (name, value, why) of what else there is to say

    is_bitwise: whether its results have the bits of other transports
    shares_memory: rows go through the shared memory of one host
    taken:      buffers that are allocated at once, as on GPUs; shared memory is taken as it is written
    problems:   why it cannot serve here, each with what to do
    """

    name: str
    why: str
    is_bitwise: bool
    shares_memory: bool = False
    facts: tuple[tuple[str, str, str], ...] = ()
    taken: BufferSizes | None = None
    problems: tuple[str, ...] = ()


def look_here(device: str, weight_bytes: int) -> Machine:
    """Returns the facts of this machine. weight_bytes: what a rank has loaded before its transport is made"""
    if device == "cpu":
        return Machine(free_bytes(SHARED), platform.machine())
    if not torch.cuda.is_available():
        return Machine(0, platform.machine())
    free = max(0, torch.cuda.mem_get_info()[0] - weight_bytes)
    capability = torch.cuda.get_device_capability()
    facts = GpuFacts(0, capability, free, nvshmem_lacks(capability), not unlinked_pairs(), bool(rdma_devices()))
    return Machine(free, platform.machine(), facts, torch.cuda.device_count())


def free_bytes(folder: str) -> int:
    """Returns the bytes that this process can still write to a folder's file system; 0 where there is no folder."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def describe_transport(
    config: ServeConfig, limits: BufferLimits, dtype: torch.dtype, device: str, machine: Machine
) -> TransportReport:
    """Returns what carries rows under this configuration, as far as one machine can tell."""
    request = _request(config, limits, dtype)
    choice = _choose(request, config.parallel.num_ranks, device, machine)
    why = choice.why and f"auto: {choice.why}{_condition(config, device, machine)}"
    if choice.transport == _UNKNOWN:
        sizes = _sizes(request, small_limits(limits), config.parallel.num_ranks, "nvshmem")
        text = f"if NVSHMEM is taken, for {sizes.max_tokens} tokens: {sizes.shares}"
        ordered = request.combine == "ordered"
        return TransportReport(_UNKNOWN, why, ordered, facts=(("dispatch buffers", sizes.per_rank, text),))
    transport, name = choice.transport, _name(choice.transport, device, limits)
    is_bitwise = TRANSPORTS[transport].bitwise and request.combine == "ordered"
    wanted = Wanted(config.parallel.num_ranks, device, request.rows, request.combine)
    found = problems(transport, wanted)
    if transport not in _WITH_BUFFERS:
        return TransportReport(name, why, is_bitwise, problems=tuple(found))
    held = small_limits(limits) if transport == "by_batch" else limits
    sizes = _sizes(request, held, wanted.num_ranks, transport)
    fit = _most_tokens(request, held, wanted.num_ranks, transport, machine.free_bytes)
    advice = f"; {fit} tokens would fit here" if machine.free_bytes else ""
    facts = [("dispatch buffers", sizes.per_rank, f"for {sizes.max_tokens} tokens: {sizes.shares}{advice}")]
    if transport == "shm":
        library, how = load_library() if request.compiled else (None, "dispatch.compiled is off")
        facts.insert(0, ("rows are moved by", "a C helper" if library else "numpy", how))
    found += _gpu_problems(request, wanted.num_ranks, transport, machine)
    if machine.free_bytes and held.max_tokens_per_rank > fit:
        found.append(_too_small(sizes, device, machine, fit))
    taken = None if transport == "shm" else sizes
    return TransportReport(name, why, is_bitwise, transport == "shm", tuple(facts), taken, tuple(found))


def describe_loss(
    config: ServeConfig, plan: ModelPlan, num_sharing: int, shares_memory: bool
) -> list[tuple[str, str, str]]:
    """Returns facts on what the loss of a rank, or a host, would mean.

    num_sharing:   ranks that share weights
    shares_memory: whether rows go through shared memory, and between hosts over their connections
    """
    placement, num_hosts = plan.placement, len(config.nodes)
    num_ranks = placement.num_ranks
    if num_ranks == 1:
        return []
    ends = ("a lost rank", "ends serving")
    if config.engine.on_lost_rank == "end":
        return [(*ends, "engine.on_lost_rank is end")]
    if not shares_memory or config.engine.exchange == "gloo":
        return [(*ends, f"{survivors()} with engine.exchange shm can go on")]
    maps_all = Sharing.of(config, plan, num_sharing).experts
    meaning, why = meaning_of_a_loss(placement, config.launcher.max_restarts > 0, maps_all)
    if not has_slots_without(placement, 1) and config.launcher.max_restarts:
        meaning += " (moe-serve serve, LLM), or all are (torchrun, mpirun)"
    facts = [("a lost rank", meaning, why)]
    if num_hosts > 1:
        host_of = [rank * num_hosts // num_ranks for rank in range(num_ranks)]
        names = [f"node rank {node}" for node in config.nodes]
        facts.append(("a lost host", *meaning_of_a_lost_host(placement, host_of, names)))
    return facts


def _request(config: ServeConfig, limits: BufferLimits, dtype: torch.dtype) -> TransportRequest:
    dispatch = config.dispatch
    return TransportRequest(
        dispatch.backend,
        limits,
        dtype,
        dispatch.wire_dtype,
        dispatch.rows,
        dispatch.combine,
        compiled=dispatch.compiled,
    )


def _choose(request: TransportRequest, num_ranks: int, device: str, machine: Machine) -> Choice:
    if request.backend != "auto":
        return Choice(transports_of(request.backend, device, num_ranks)[0], "")
    if num_ranks == 1:
        return Choice("local", "one rank")
    if device == "cpu":
        return choose_among_cpus([0] * num_ranks, machine.free_bytes, machine.processor, request)
    if machine.gpu is None:
        return Choice(_UNKNOWN, "there is no GPU here to ask; NVSHMEM for small steps where it joins all ranks")
    return choose_among_gpus(_alike(machine, num_ranks), request)


def _alike(machine: Machine, num_ranks: int) -> list[GpuFacts]:
    """Returns the facts of all ranks if every machine is like this one and takes as many ranks as it has GPUs."""
    assert machine.gpu is not None, "asked only where there is a GPU"
    return [replace(machine.gpu, host=rank // machine.num_gpus) for rank in range(num_ranks)]


def _condition(config: ServeConfig, device: str, machine: Machine) -> str:
    num_ranks = config.parallel.num_ranks
    if num_ranks == 1 or (device == "cuda" and num_ranks <= machine.num_gpus):
        return ""
    if device == "cpu":
        return ", if all are on this one; else the same with TCP between hosts"
    return " (if all machines are like this one)"


def _sizes(request: TransportRequest, limits: BufferLimits, num_ranks: int, transport: str) -> BufferSizes:
    if transport == "shm":
        return buffer_sizes(num_ranks, limits, make_wire(request.wire_dtype, request.dtype))
    return gpu_buffer_sizes(num_ranks, limits, request.dtype, request.wire_dtype, transport != "cuda_ipc")


def _most_tokens(
    request: TransportRequest, limits: BufferLimits, num_ranks: int, transport: str, free_bytes: int
) -> int:
    """Returns the largest max_tokens_per_rank whose buffers would fit."""
    if transport == "shm":
        return most_tokens(num_ranks, limits, make_wire(request.wire_dtype, request.dtype), free_bytes)
    stages = transport != "cuda_ipc"
    return most_gpu_tokens(num_ranks, limits, request.dtype, request.wire_dtype, stages, free_bytes)


def _gpu_problems(request: TransportRequest, num_ranks: int, transport: str, machine: Machine) -> list[str]:
    if transport == "shm" or machine.gpu is None:
        return []
    ranks = _alike(machine, num_ranks)
    reach = ipc_problem(ranks) if transport == "cuda_ipc" else nvshmem_problem(ranks)
    found = (wire_problem(ranks, request.dtype, request.wire_dtype), reach)
    return [f"dispatch.backend {TRANSPORTS[transport].backend} cannot serve here: {text}" for text in found if text]


def _too_small(sizes: BufferSizes, device: str, machine: Machine, fit: int) -> str:
    free = f"{machine.free_bytes / 2**30:.2f} GiB"
    fix = f"lower dispatch.max_tokens_per_rank to {fit}"
    if device == "cpu":
        return (
            f"low-latency buffers take up to {sizes.total * sizes.num_ranks / 2**30:.2f} GiB of {SHARED} for "
            f"{sizes.num_ranks} ranks and {free} are free; {fix}, or give the container more shared memory "
            "(docker run --shm-size)"
        )
    return (
        f"low-latency buffers take {sizes.total / 2**30:.2f} GiB of a GPU and {free} are left after the weights; {fix}"
    )


def _name(transport: str, device: str, limits: BufferLimits) -> str:
    """Returns the transport's name for people."""
    if transport == "collective":
        return f"collective (torch.distributed, {'NCCL' if device == 'cuda' else 'gloo'})"
    if transport == "by_batch":
        small = small_limits(limits).max_tokens_per_rank
        return f"low_latency (NVSHMEM) up to {small} tokens, collective (NCCL) above"
    return TRANSPORTS[transport].label
