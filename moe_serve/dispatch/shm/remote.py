"""The calls of the shared-memory transport towards ranks of other hosts: what is announced here is sent there.

Each host has a region for each rank of another host, divided like the real one. A rank writes its counts, its heads and
entries into its slice of that region as for a neighbour; from there they go to the same place of the real one. Rows go
there straight from where they are, once for each host. Results come into the copy of their sender's send buffer, where
they are read like those of a neighbour. So nothing but this file, and who makes the regions, knows of other hosts.
"""

import os
import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from moe_serve.dispatch.hosts.link import Space
from moe_serve.dispatch.shm.region import COUNTS, RESULTS, ROWS, Int64Array, ReceiveSlice
from moe_serve.errors import PeerError

Check = Callable[[list[int], str, int, float], None]


class RemotePeers:
    """The ranks of other hosts.

    borrowed: what the last two calls send. It must not change on the way, also where the step is void and its caller
              gone
    """

    borrowed: tuple[Tensor, ...] = ()

    def __init__(self, space: Space, slices: list[ReceiveSlice], others: list[int], deadline_s: float, check: Check):
        """slices: where this rank writes in the region of each rank;  others: the ranks that take part beside it

        check(missing ranks, phase, sequence, waited_s): raises PeerError where waiting is useless
        """
        self._space, self._link, self._deadline_s, self._check = space, space.link, deadline_s, check
        self._slices, self._counts = slices, [(0, 0)]
        some = space.link.hosts.elsewhere(space.link.rank)[0]  # a slice lies at the same place of every region
        self._flags_at = _address(slices[some].flags) - space.regions[some].data_ptr()
        words = [*space.calls_at, self._flags_at, *space.functions_at]
        self._head = len(words)
        self._words = np.array(words + [0] * (1 + 2 * len(space.link.others)), dtype=np.int64)
        self.table_at = _address(self._words)
        """Where these calls stand for the C helper: `Remote` of fused.h."""
        self._take_part(others)

    def begin_epoch(self, epoch: int, others: list[int]) -> None:
        """Goes on with these ranks; what was not sent before is dropped."""
        self._link.begin_epoch(epoch, [*others, self._link.rank])
        self._take_part(others)

    def _take_part(self, others: list[int]) -> None:
        hosts, link = self._link.hosts, self._link
        self._ranks = [rank for rank in others if rank not in link.local_ranks]
        on = {host: [rank for rank in hosts.ranks(host) if rank in others] for host in link.others}
        self._on = {host: sum(1 << rank for rank in ranks) for host, ranks in on.items() if ranks}
        for some in self._ranks[:1]:  # what is sent to all of them lies in the slice of each
            base = self._space.regions[some].data_ptr()
            self._counts = [(_address(counts), _address(counts) - base) for counts in self._slices[some].counts]
        words = [len(self._on)]
        for host, ranks in self._on.items():
            words += [self._space.entry(host), ranks]
        self._words[self._head : self._head + len(words)] = words

    def counts(self, buffer: int, num_counts: int, flag: int) -> None:
        """Sends the counts that lie in the slice of every rank."""
        source, offset = self._counts[buffer]
        for host, ranks in self._on.items():
            self._space.write(host, ranks, offset, source, 8 * num_counts, self._flag(COUNTS + buffer), flag)

    def rows(self, facts: int, buffer: int, num_tokens: int, topk: int, own: int, block: int, flag: int) -> int:
        """Sends what `send_rows` has planned; returns a number for `finish_sending`. own: where this rank's rows are"""
        for host, ranks in self._on.items():
            at = self._flag(ROWS + buffer)
            self._space.rows(host, facts, buffer, ranks, num_tokens, topk, own, block, at, flag)
        return self._link.posted

    def results(self, facts: int, buffer: int, num_tokens: int, topk: int, block: int, flag: int) -> None:
        """Sends the results that lie in the send buffer to the ranks that wait for them."""
        for rank in self._ranks:
            self._space.results(rank, facts, buffer, num_tokens, topk, block, self._flag(RESULTS + buffer), flag)

    def acknowledge(self, column: int, flag: int) -> None:
        """Tells all ranks that what they sent has been read, with whatever is sent next."""
        for host, ranks in self._on.items():
            self._space.later(host, ranks, self._flag(column), flag)

    def finish_sending(self, posted: int, phase: str, sequence: int) -> None:
        """Waits until the connections have taken the rows of a call, which the caller may change from then on.

        posted: as `rows` has returned it; rows of a later call may still be on the way

        Raises PeerError where the epoch is void, and where a host takes nothing for a whole deadline.
        """
        started_s = time.monotonic()
        while (rank := self._link.unsent(posted)) is not None:
            self._check([rank], phase, sequence, time.monotonic() - started_s)
            if time.monotonic() - started_s > self._deadline_s:
                who = self._link.hosts.named(rank)
                text = f"{who} has taken no rows for {self._deadline_s:g} s in {phase} {sequence}"
                raise PeerError(f"{text}; look at its last lines, and at the network between", rank, phase, sequence)
            self._link.poll()
            os.sched_yield()

    @property
    def poll(self) -> Callable[[], object]:
        """Takes in what other hosts have sent."""
        return self._link.poll

    def _flag(self, column: int) -> int:
        return self._flags_at + 8 * column


def _address(array: Int64Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
