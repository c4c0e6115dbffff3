"""Lets experts write results straight into the send buffer, so that `combine` need not copy them."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from moe_serve.dispatch.shm.channel import Channel
from moe_serve.dispatch.shm.region import SendBuffer

LEAST_BYTES = 1 << 16  # below it, a copy costs less than keeping track of who writes where
_LONGEST_QUEUE = 8  # handles that nobody combines are dropped once the queue is longer
HandleRef = Callable[[], object | None]  # the handle, as long as somebody holds it
_NOBODY: HandleRef = lambda: None  # noqa: E731


class ResultBuffers:
    """The two buffers of this rank's send buffer, and the handle for which each is reserved.

    A combine uses the buffer of its number, so a reservation is a guess that handles are combined in the order of their
    dispatches. Where the guess is wrong, results are copied; results that another combine has overwritten are refused.
    A handle that nobody holds any more has no claim.
    """

    def __init__(self, send_buffer: SendBuffer, combines: Channel, dtype: torch.dtype):
        """combines: the channel that counts them;  dtype: of results"""
        self._rows = [rows.view(dtype) for rows in send_buffer.rows]
        self._row_bytes = send_buffer.rows[0].shape[1]
        self._addresses = [rows.data_ptr() for rows in send_buffer.rows]
        self._combines = combines
        self._holders: list[HandleRef] = [_NOBODY, _NOBODY]
        self._queue: list[HandleRef] = []  # received and not combined yet, in order
        self._epoch = -1

    def reserve(self, handle: object, num_rows: int, epoch: int) -> Tensor | None:
        """Returns [num_rows, H] of the send buffer for the results of a handle; None: too few rows, or not free yet."""
        if epoch != self._epoch:
            self._holders, self._queue, self._epoch = [_NOBODY, _NOBODY], [], epoch
        elif len(self._queue) > _LONGEST_QUEUE:
            self._queue = [other for other in self._queue if other() is not None]
        self._queue.append(weakref.ref(handle))
        if num_rows * self._row_bytes < LEAST_BYTES:
            return None
        self._queue = [other for other in self._queue if other() is not None]
        call = self._combines.num_sent + len(self._queue)
        buffer = call % 2
        if self._holders[buffer]() is not None or not self._combines.was_read(call - 2):
            return None
        self._holders[buffer] = weakref.ref(handle)
        return self._rows[buffer][:num_rows]

    def release(self, handle: object, results: Tensor, buffer: int) -> Tensor:
        """Ends the reservation of a handle whose combine uses a buffer; returns the results, to be sent from there.

        Results that lie in the other buffer are copied, since it may be reserved again before peers have read them.
        Raises RuntimeError when another combine has overwritten the results.
        """
        address = results.data_ptr()
        if address in self._addresses and results.shape[0]:
            other = self._addresses.index(address)
            if self._holders[other]() is not handle:
                raise RuntimeError(
                    "results lie in a send buffer that was given to another dispatch; combine handles in the order "
                    "of their dispatches, or write results elsewhere"
                )
            if other != buffer:
                results = results.clone()
        if self._holders[1 - buffer]() is handle:
            self._holders[1 - buffer] = _NOBODY
        self._holders[buffer] = _NOBODY
        self._queue = [other for other in self._queue if other() is not handle]
        return results
