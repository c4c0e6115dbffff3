"""Calls of torch.distributed that fail by type: LostConnectionError where a peer is gone or late, whatever the words.

gloo and NCCL raise RuntimeError for a broken connection, for a deadline, and for wrong arguments. The arguments here
are right, so a call that fails misses a peer.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.errors import LostConnectionError

_GATHERED_BYTES = 256  # of each rank in `gather_bytes`
_SOURCE_LINE = re.compile(r"^\[[^]]*\] *")  # where in gloo it happened
# What libraries say of a peer that is gone, and what we do: their words change with their versions.
_OURS = (
    (re.compile(r"timed? ?out", re.IGNORECASE), "nothing was heard of it in time"),
    (re.compile(r"connection (was )?(closed|reset)|broken pipe", re.IGNORECASE), "its connection was closed"),
)


def barrier(group: dist.ProcessGroup | None) -> None:
    """Waits for all ranks of a group."""
    with _peers("a barrier"):
        dist.barrier(group=group)


def all_gather(rows: Sequence[Tensor], own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fills rows with what each rank gives as its own, in rank order."""
    with _peers("an all-gather"):
        dist.all_gather(list(rows), own, group=group)


def all_gather_into(rows: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fills rows [num_ranks, ..] with what each rank gives as its own, in rank order; one launch on GPUs."""
    with _peers("an all-gather"):
        dist.all_gather_into_tensor(rows.view(-1), own.view(-1), group=group)  # gloo takes no other shapes


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> Sequence[bytes]:
    """Returns every rank's data, in rank order: at most 256 bytes each, without zeros at the end.

    No object collectives: those pickle.
    """
    assert len(data) <= _GATHERED_BYTES, f"{len(data)} bytes to gather"
    mine = torch.frombuffer(bytearray(data.ljust(_GATHERED_BYTES, b"\0")), dtype=torch.uint8)
    mine = mine.to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    all_gather(rows, mine, group)
    return [row.cpu().numpy().tobytes().rstrip(b"\0") for row in rows]


def broadcast(data: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gives the data of the group's rank 0 to all its ranks."""
    with _peers("a broadcast"):
        dist.broadcast(data, group_src=0, group=group)


def all_reduce(data: Tensor, group: dist.ProcessGroup | None) -> None:
    """Adds up the data of all ranks, in place."""
    with _peers("an all-reduce"):
        dist.all_reduce(data, group=group)


def lost_connection(error: RuntimeError, phase: str) -> LostConnectionError:
    """Returns what to raise for an error of torch.distributed in a phase of a step."""
    return LostConnectionError(reason_of(error), phase)


@contextmanager
def _peers(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_connection(error, call) from error


def reason_of(error: Exception) -> str:
    """Returns why a call of torch.distributed failed, in a few words: ours for a peer that is gone or late, else the
    library's without source line, addresses, advice and ornaments."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    for found, ours in _OURS:
        if found.search(first_line):
            return ours
    words = re.split(r" \[|\. ", _SOURCE_LINE.sub("", first_line))[0].rstrip(".")
    return " ".join(words.encode("ascii", "ignore").decode().split())
