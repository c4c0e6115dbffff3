"""Rows to their slots, through the compiled experts and back, in one call of the C helper.

For a layer that runs in one round; the same rows, flags and bits as dispatch, experts and combine one after the other,
so ranks may mix both. Where a peer is late, Python waits for it: deadlines, voids and waiting times are those of
flag_wait.py and membership.py.
"""

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.shm.channel import Channel, Peers
from moe_serve.dispatch.shm.counts import LOOKS_PER_SPIN, address
from moe_serve.dispatch.shm.region import RESULTS, RESULTS_READ, ROWS, ROWS_READ, ReceiveSlice
from moe_serve.dispatch.shm.row_copy import RowBuffers, refuse_id
from moe_serve.dispatch.shm.row_copy_native import NativeRowCopier
from moe_serve.kernels.cpu.experts import PackedExperts
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.packed import padded
from moe_serve.kernels.part_clock import COMBINE, EXPERTS, PartClock

_HOME = 4  # behind the stages, as in travel.h; each begins with a wait
_CHANGING = slice(5, 11)  # words of a layer, as in travel.h


class NativeTravel:
    """One call for a layer. Rows are float32 on the wire too, packed, and combined in order."""

    def __init__(
        self,
        buffers: RowBuffers,
        copier: NativeRowCopier,
        peers: Peers,
        channels: tuple[Channel, Channel],
        staging: Tensor,
        clock: PartClock,
    ):
        """channels: of rows and of results;  staging: [most_rows, H];  clock: is told which part runs"""
        self._buffers, self._peers, self._staging = buffers, peers, staging
        self._rows, self._results = channels
        self._call, self._facts = copier.library.travel, copier.facts
        shape = buffers.shape
        entries = shape.max_tokens * (shape.num_ranks + shape.topk)
        bookkeeping = shape.slots_per_rank * (1 + 3 * shape.num_ranks) + 2 * shape.num_ranks + entries
        self._block = torch.empty(bookkeeping + 1, dtype=torch.int64)
        expert_ffn = cpu_library().address("expert_ffn")
        addresses = [address(self._facts), self._block.data_ptr(), staging.data_ptr(), expert_ffn]
        cores = peers.cores
        self._waited_ns = np.zeros(shape.num_ranks, dtype=np.int64)
        looks = LOOKS_PER_SPIN * peers.wait.spins
        words = [*addresses, looks, 0, 0, 0, 0, 0, 0, cores.table_at if cores else 0, address(self._waited_ns)]
        words += [cpu_library().address("turn_part"), clock.address, EXPERTS, COMBINE]
        self._clock = clock  # whose words C turns
        for slices in (buffers.received, buffers.to_peers):
            for buffer in (0, 1):
                for each in slices:
                    words += _flags(each, buffer)
        self._words = np.array(words, dtype=np.int64)
        self._middle = torch.empty(0, 0)

    def __call__(self, x: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts, out: Tensor) -> None:
        """Writes the weighted sums of x's experts to out, [T, H]. slots, weights: [T, K], without gaps"""
        for each in (x, slots, weights, out):
            assert each.is_contiguous(), "rows without gaps"
        if self._middle.shape[1] != padded(experts.width):  # pages that are never written take no memory
            self._middle = torch.empty(self._buffers.most_rows, padded(experts.width))
        rows, results, words = self._rows, self._results, self._words
        row_call, result_call = rows.take_number(), results.take_number()
        words[_CHANGING] = (
            rows.flag(row_call), results.flag(result_call),
            rows.flag(row_call - 2) if row_call > 2 else 0,
            results.flag(result_call - 2) if result_call > 2 else 0,
            self._peers.mask, 0,
        )  # fmt: skip
        self._waited_ns.fill(0)
        at, topk = address(words), slots.shape[1]
        arguments = x.data_ptr(), slots.data_ptr(), weights.data_ptr(), x.shape[0], topk, experts.facts.data_ptr()
        while (stage := self._call(at, *arguments, self._middle.data_ptr(), out.data_ptr())) != _HOME:
            match stage:
                case 0:  # peers still read the rows before
                    rows.wait_until_read(row_call - 2)
                case 1:  # their rows are not here yet
                    rows.wait(row_call)
                case 2:  # they still read the results before
                    results.wait_until_read(result_call - 2)
                case 3:  # their results are not here yet
                    results.wait(result_call)
                case _:
                    raise refuse_id(slots, self._buffers.shape.num_ranks * self._buffers.shape.slots_per_rank)
        rows.was_acknowledged(row_call)
        if self._peers.cores is not None:
            self._peers.wait.add(self._waited_ns)


def _flags(each: ReceiveSlice, buffer: int) -> list[int]:
    """Returns the addresses of a slice's flags, in the order of travel.h."""
    columns = ROWS + buffer, RESULTS + buffer, ROWS_READ, RESULTS_READ
    return [address(each.flags[column:]) for column in columns]
