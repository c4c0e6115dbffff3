"""Binds a rank's threads and memory to one NUMA node of its host (parallel.cpu_bind), before torch is imported.

A step of a CPU reads all weights once, and the memory of another socket gives about half of what the own one does. The
kernel's own calls are used, so no libnuma is needed. Memory comes from the node as long as it has some.
"""

import ctypes
import os
import sys
from collections.abc import Sequence

from moe_serve.config import ParallelConfig
from moe_serve.errors import ConfigError
from moe_serve.process_facts import NumaNode, numa_nodes

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_PREFERRED = 1  # MPOL_PREFERRED of linux/mempolicy.h
_MOST_NODES = 1024


def node_of(bind: str | Sequence[int], nodes: Sequence[NumaNode], local_rank: int, num_local: int) -> NumaNode | None:
    """Returns the node of a rank of a host with `num_local` ranks; None: it is not bound.

    auto binds where there are several nodes and the ranks divide over them evenly, neighbours to one node.
    Raises ConfigError for a list that names another number of ranks, or a node that is not there.
    """
    if bind == "none":
        return None
    if isinstance(bind, str):
        if len(nodes) < 2 or num_local % len(nodes):
            return None
        return nodes[local_rank * len(nodes) // num_local]
    if len(bind) != num_local:
        raise ConfigError(
            f"parallel.cpu_bind names nodes for {len(bind)} ranks but a host has {num_local}; give one for each"
        )
    found = [node for node in nodes if node.number == bind[local_rank]]
    if not found:
        there = ", ".join(str(node.number) for node in nodes) or "none"
        raise ConfigError(
            f"parallel.cpu_bind puts local rank {local_rank} on NUMA node {bind[local_rank]}, and this process may use "
            f"CPUs of {there}; name another, or set parallel.cpu_bind: none"
        )
    return found[0]


def bind_rank(config: ParallelConfig, local_rank: int, num_local: int) -> tuple[NumaNode | None, int]:
    """Binds this process as configured. Returns the node, None where it is not bound, and how many ranks share it.

    Raises ConfigError as `node_of` does.
    """
    if sys.platform != "linux" or config.device == "cuda":
        return None, num_local
    nodes = numa_nodes()
    of_ranks = [node_of(config.cpu_bind, nodes, rank, num_local) for rank in range(num_local)]
    node = of_ranks[local_rank]
    if node is None:
        return None, num_local
    for thread in os.listdir("/proc/self/task"):  # libraries may have made some
        os.sched_setaffinity(int(thread), node.cpus)
    _prefer_memory_of(node.number)
    return node, sum(each == node for each in of_ranks)


def _prefer_memory_of(node: int) -> None:
    """Where this is forbidden, as in many containers, or not known, memory still comes from where threads run."""
    call = _SET_MEMPOLICY.get(os.uname().machine)
    if call is not None:
        mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
        mask[node // 64] = 1 << node % 64
        ctypes.CDLL(None).syscall(call, _PREFERRED, mask, _MOST_NODES)
