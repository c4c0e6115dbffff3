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

from moe_serve.dispatch.base import Pending
from moe_serve.errors import LostConnectionError

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


def broadcast(data: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gives the data of the group's rank 0 to all its ranks."""
    with _peers("a broadcast"):
        dist.broadcast(data, group_src=0, group=group)


def all_reduce(data: Tensor, group: dist.ProcessGroup | None) -> None:
    """Adds up the data of all ranks, in place."""
    with _peers("an all-reduce"):
        dist.all_reduce(data, group=group)


def all_to_all(
    phase: str,
    out: Tensor,
    data: Tensor,
    group: dist.ProcessGroup | None,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> Pending[Tensor]:
    """Sends the first sent[0] entries of data to rank 0 and so on; the result is `out`, with received[r] from rank r.

    sent, received: None: equal parts;  phase: for errors
    """
    try:
        work = dist.all_to_all_single(out, data, received, sent, group=group, async_op=True)
    except RuntimeError as error:
        raise lost_connection(error, phase) from error
    return _Receive(work, out, data, phase)


def gather_counts(counts: Tensor, group: dist.ProcessGroup) -> Pending[Tensor]:
    """Gathers the counts of all ranks: [n] -> [R, n]."""
    # As an all-to-all of equal rows, which takes gloo 0.4 to 0.7 of the time of an all-gather.
    rows = counts.expand(group.size(), -1).contiguous()
    return all_to_all("the round of counts", torch.empty_like(rows), rows, group)


class _Receive:
    """The receive half of one all-to-all. Holds the bytes that are sent until it is done."""

    def __init__(self, work: dist.Work, out: Tensor, sent: Tensor, phase: str):
        self._work: dist.Work | None = work
        self._out, self._phase = out, phase
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise lost_connection(error, self._phase) from error
            self._work = self._sent = None
        return self._out


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
