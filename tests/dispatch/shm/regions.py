"""Regions of shared memory for tests: without names, for processes forked from here or for threads."""

import mmap
import os

from moe_serve.dispatch.membership import Decisions
from moe_serve.dispatch.shm.memory import HEAD_BYTES, Mappings
from moe_serve.dispatch.shm.region import CANARY, ReceiveSlice, SendBuffer


def map_anonymous(num_ranks: int, num_bytes: int) -> Mappings:
    """Returns zeroed regions of num_bytes, one for each rank."""
    return Mappings([mmap.mmap(-1, HEAD_BYTES + num_bytes) for _ in range(num_ranks)], no_decisions())


def no_decisions() -> Decisions:
    """Returns an empty file of decisions."""
    unnamed = os.memfd_create("moe_serve_decisions")
    try:
        return Decisions(os.open(f"/proc/self/fd/{unnamed}", os.O_RDWR | os.O_APPEND))
    finally:
        os.close(unnamed)


def is_overrun(part: ReceiveSlice | SendBuffer) -> bool:
    """Returns whether somebody wrote past the end of a buffer."""
    return any((canary != CANARY).any() for canary in part.canaries)
