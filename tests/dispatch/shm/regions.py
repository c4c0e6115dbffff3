"""Regions of shared memory for tests: without names, for processes forked from here or for threads."""

import mmap
import os

from moe_serve.dispatch.shm.memory import HEAD_BYTES, Mappings
from moe_serve.dispatch.shm.region import CANARY, ReceiveSlice, SendBuffer
from moe_serve.dispatch.votes import Log


def map_anonymous(num_ranks: int, num_bytes: int, num_hosts: int = 1) -> Mappings:
    """Returns zeroed regions of num_bytes, one for each rank."""
    return Mappings([mmap.mmap(-1, HEAD_BYTES + num_bytes) for _ in range(num_ranks)], empty_log(num_hosts))


def empty_log(num_hosts: int = 1) -> Log:
    """Returns the log of a host on which nothing was decided."""
    unnamed = os.memfd_create("moe_serve_decisions")
    try:
        return Log(os.open(f"/proc/self/fd/{unnamed}", os.O_RDWR | os.O_APPEND), num_hosts)
    finally:
        os.close(unnamed)


def is_overrun(part: ReceiveSlice | SendBuffer) -> bool:
    """Returns whether somebody wrote past the end of a buffer."""
    return any((canary != CANARY).any() for canary in part.canaries)
