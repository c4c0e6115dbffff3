"""What `dispatch.backend: auto` means here, and why: one rank, one host, or the network.

A collective decision: every rank learns the same facts of all ranks, so all choose alike.
"""

import platform
from dataclasses import dataclass

from moe_serve.dispatch.base import BufferLimits, EpGroup
from moe_serve.dispatch.buffers import buffer_sizes, most_tokens
from moe_serve.dispatch.symmetric_shm import STORE_ORDER, compare_hosts
from moe_serve.dispatch.wire import Wire


@dataclass(frozen=True)
class Choice:
    backend: str
    why: str


def choose_backend(group: EpGroup, limits: BufferLimits | None, wire: Wire) -> Choice:
    """Returns the transport for these ranks; a collective call where there are several.

    limits: None where the caller does not know its shapes; then nothing with static buffers is chosen
    """
    if group.num_ranks == 1:
        return Choice("local", "one rank")
    if group.device.type != "cpu":
        return Choice("collective", f"ranks compute on {group.device.type}: NCCL; other transports are chosen by name")
    if limits is None:
        return Choice("collective", "the shape of rows is not known, so no buffers can be made")
    if platform.machine() not in STORE_ORDER:
        return Choice("collective", f"shared memory relies on the store order of x86-64, this is {platform.machine()}")
    assert group.process_group is not None, "several ranks have a process group"
    hosts, free_bytes, _ = compare_hosts(group.process_group)
    if len(set(hosts)) > 1:
        return Choice("collective", f"ranks are on {len(set(hosts))} hosts")
    sizes = buffer_sizes(group.num_ranks, limits, wire)
    if sizes.total * group.num_ranks > free_bytes // 2:
        fit = most_tokens(group.num_ranks, limits, wire, free_bytes // 2)
        return Choice(
            "collective",
            f"buffers for {limits.max_tokens_per_rank} tokens would take more than half of the free shared memory; "
            f"{fit} tokens would fit",
        )
    return Choice("low_latency", f"{group.num_ranks} CPU ranks on one host; {sizes.lines()[0]}")
