"""The exchange of counts over shared memory: what numpy does, and the same in two calls of the C helper.

Counts are a few numbers, so what an exchange takes is calls: the C form writes and reads data and flags at once.
"""

import ctypes
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.base import Deferred, Pending
from moe_serve.dispatch.shm.channel import LOOKS_PER_SPIN, Channel, Peers, check_epoch
from moe_serve.dispatch.shm.region import COUNTS, COUNTS_READ, Float32Array, Int32Array, Int64Array, ReceiveSlice


class CountsExchange(Protocol):
    """Gathers the counts of all ranks."""

    def __call__(self, counts: Tensor) -> Pending[Tensor]:
        """counts: [n] int64 -> [R, n], zeros for a masked rank"""
        ...


class PlainCounts:
    """CountsExchange by numpy."""

    def __init__(self, peers: Peers, channel: Channel, received: list[ReceiveSlice]):
        """received: the slices of this rank's receive buffer, by source rank"""
        self._peers, self._channel, self._received = peers, channel, received

    def __call__(self, counts: Tensor) -> Pending[Tensor]:
        peers, num_counts = self._peers, counts.shape[0]
        rows = np.zeros((len(self._received), num_counts), dtype=np.int64)
        rows[peers.rank] = counts.numpy()
        call, epoch = self._channel.begin(), peers.epoch
        for peer in peers.others:
            peers.slices[peer].counts[call % 2][:num_counts] = rows[peers.rank]
        self._channel.signal(call)
        if peers.remote is not None:
            peers.remote.counts(call % 2, num_counts, self._channel.flag(call))

        def receive() -> Tensor:
            check_epoch(peers, epoch, "counts receive")
            self._channel.wait(call)
            for peer in peers.others:
                rows[peer] = self._received[peer].counts[call % 2][:num_counts]
            self._channel.acknowledge(call)
            return torch.from_numpy(rows)

        return Deferred(receive)


class NativeCounts:
    """CountsExchange in C. Where a peer is late, Python waits for it."""

    def __init__(self, peers: Peers, channel: Channel, received: list[ReceiveSlice], library: ctypes.CDLL):
        self._peers, self._channel, self._num_ranks = peers, channel, len(received)
        facts = [peers.rank, self._num_ranks]
        for buffer in (0, 1):
            for out, here in zip(peers.slices, received, strict=True):
                facts += [address(out.counts[buffer]), address(out.flags[COUNTS + buffer :])]
                facts += [address(out.flags[COUNTS_READ:]), address(here.counts[buffer])]
                facts += [address(here.flags[COUNTS + buffer :]), address(here.flags[COUNTS_READ:])]
        self._facts = np.array(facts, dtype=np.int64)
        self._facts_at = address(self._facts)
        self._send, self._receive = library.send_counts, library.receive_counts
        self._looks = LOOKS_PER_SPIN * peers.wait.spins

    def __call__(self, counts: Tensor) -> Pending[Tensor]:
        peers, channel, num_counts = self._peers, self._channel, counts.shape[0]
        assert counts.dtype == torch.int64, f"counts of {counts.dtype}"
        assert counts.is_contiguous(), "counts without gaps"
        rows = np.empty((self._num_ranks, num_counts), dtype=np.int64)
        call, epoch, at = channel.take_number(), peers.epoch, address(rows)
        head, flag = (self._facts_at, call % 2, peers.mask), channel.flag(call)
        before = channel.flag(call - 2) if call > 2 else 0
        while self._send(*head, before, flag, counts.data_ptr(), num_counts, at) < 0:
            channel.wait_until_read(call - 2)
        if peers.remote is not None:
            peers.remote.counts(call % 2, num_counts, flag)

        def receive() -> Tensor:
            check_epoch(peers, epoch, "counts receive")
            while self._receive(*head, flag, num_counts, at, self._looks) < 0:
                channel.wait(call)
            channel.was_acknowledged(call)
            return torch.from_numpy(rows)

        return Deferred(receive)


def address(array: Int64Array | Int32Array | Float32Array) -> int:
    """Returns where an array's memory begins."""
    at: int = array.__array_interface__["data"][0]
    return at
