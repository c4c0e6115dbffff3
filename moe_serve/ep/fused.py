"""Dispatch, experts and combine of a layer as one call into C, over the buffers of the shared-memory transport.

For a layer that runs in one round; the same rows, flags and bits as dispatch, experts and combine one after the other,
so ranks may mix both. Where a peer is late, Python waits for it: deadlines, voids and waiting times are those of
dispatch/shm/channel.py and dispatch/membership.py. dispatch/shm/fused.h is the C side.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from moe_serve.dispatch.base import AnyAllToAll
from moe_serve.dispatch.shm.counts import address
from moe_serve.dispatch.shm.region import RESULTS, RESULTS_READ, ROWS, ROWS_READ, ReceiveSlice
from moe_serve.dispatch.shm.row_copy import refuse_id
from moe_serve.dispatch.shm.transport import CompiledRows, ShmAllToAll
from moe_serve.kernels.cpu.experts import PackedExperts
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.packed import padded
from moe_serve.kernels.part_clock import COMBINE, EXPERTS, PartClock

_HOME = 4  # behind the stages, as in fused.h; each begins with a wait
_CHANGING = 7  # words of a call, the first ones, as in fused.h


class FusedMoe:
    """One call for a layer, and what all layers of a rank share for it."""

    def __init__(self, carried: CompiledRows, clock: PartClock):
        """clock: is told which part runs"""
        self._carried = carried
        self._clock = clock  # whose words C turns
        self._call = carried.copier.library.fused
        peers, buffers = carried.peers, carried.buffers
        shape = buffers.shape
        entries = shape.max_tokens * (shape.num_ranks + shape.topk)
        bookkeeping = shape.slots_per_rank * (1 + 3 * shape.num_ranks) + 2 * shape.num_ranks + entries
        self._block = torch.empty(bookkeeping + 1, dtype=torch.int64)
        self._middle = torch.empty(0, 0)
        library = cpu_library()
        assert peers.wait.first is not None, "waits are in C where rows are"
        words = [0] * _CHANGING
        words += [address(carried.copier.facts), self._block.data_ptr(), carried.staging.data_ptr()]
        words += [library.address("expert_ffn"), peers.wait.first.at]
        words += [library.address("turn_part"), clock.address, EXPERTS, COMBINE]
        for slices in (buffers.received, buffers.to_peers):
            for buffer in (0, 1):
                for each in slices:
                    words += _flags(each, buffer)
        self._words = (ctypes.c_int64 * len(words))(*words)
        self._at = ctypes.addressof(self._words)

    def bind(
        self, x: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts, out: Tensor
    ) -> Callable[[int], None]:
        """Returns a call for the first rows of these tensors, given their number: it writes weighted sums to out.

        x, out: [T, H] float32;  slots: [T, K] int64;  weights: [T, K] float32; all without gaps
        experts: of this rank's slots
        The call raises what `dispatch` and `combine` raise.
        """
        carried, peers, most_tokens = self._carried, self._carried.peers, self._carried.buffers.shape.max_tokens
        carried.check(x[:0], slots[:0])
        for each in (x, slots, weights, out):
            assert each.is_contiguous(), "rows without gaps"
        if self._middle.shape[1] != padded(experts.width):  # pages that are never written take no memory
            self._middle = torch.empty(carried.buffers.most_rows, padded(experts.width))
        tensors = x, slots, weights, experts.facts, self._middle, out
        x_at, slots_at, weights_at, experts_at, middle_at, out_at = (each.data_ptr() for each in tensors)
        topk = slots.shape[1]

        def call(num_rows: int) -> None:
            x, slots, *_ = tensors
            if num_rows > most_tokens or len(peers.others) + 1 < len(peers.slices):
                carried.check(x[:num_rows], slots[:num_rows])
            if not self._run(x_at, slots_at, weights_at, num_rows, topk, experts_at, middle_at, out_at):
                raise refuse_id(slots[:num_rows], len(peers.slices) * carried.buffers.shape.slots_per_rank)

        return call

    def _run(self, *arguments: int) -> bool:
        """Makes the call of fused.h, and the long waits, which are Python's. Returns False where an id is no slot."""
        carried, words = self._carried, self._words
        rows, results, remote = carried.rows, carried.results, carried.peers.remote
        row_call, result_call = rows.take_number(), results.take_number()
        words[:_CHANGING] = [
            rows.flag(row_call), results.flag(result_call),
            rows.flag(row_call - 2) if row_call > 2 else 0,
            results.flag(result_call - 2) if result_call > 2 else 0,
            carried.peers.mask, 0, 0 if remote is None else remote.table_at,
        ]  # fmt: skip
        while (stage := self._call(self._at, *arguments)) != _HOME:
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
                    return False
        rows.was_acknowledged(row_call)
        carried.membership.check_epoch_stands("combine receive", result_call)
        results.acknowledge(result_call)
        return True


def make_fused(all_to_all: AnyAllToAll, clock: PartClock) -> FusedMoe:
    """Returns the call over a transport whose `capabilities.fuses`. clock: is told which part runs"""
    assert isinstance(all_to_all, ShmAllToAll), f"{type(all_to_all).__name__} has no rows in shared memory"
    return FusedMoe(all_to_all.compiled_rows(), clock)


def _flags(each: ReceiveSlice, buffer: int) -> list[int]:
    """Returns the addresses of a slice's flags, in the order of fused.h."""
    columns = ROWS + buffer, RESULTS + buffer, ROWS_READ, RESULTS_READ
    return [address(each.flags[column:]) for column in columns]
