"""Which dispatch may have its results written straight into the outbox, so that nobody need copy them."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from moe_serve.dispatch.shm.channel import Channel
from moe_serve.dispatch.shm.region import Outbox

LEAST_BYTES = 1 << 16  # below it, copying costs less than keeping account of who writes where
_LONGEST_QUEUE = 8  # handles that nobody combines are looked for when it grows beyond
Handles = Callable[[], object | None]  # a handle, as long as somebody holds it
_NOBODY: Handles = lambda: None  # noqa: E731


class ResultBuffers:
    """The two buffers of a rank's outbox, and whose results each is kept for.

    A combine uses the buffer of its number, so an offer is a guess: handles are combined in the order of their
    dispatches. Where the guess fails results are copied, and results that lie where another combine has written are
    refused. A handle that nobody holds any more has no claim.
    """

    def __init__(self, outbox: Outbox, combines: Channel, dtype: torch.dtype):
        """combines: the channel that counts them;  dtype: of results"""
        self._rows = [rows.view(dtype) for rows in outbox.rows]
        self._row_bytes = outbox.rows[0].shape[1]
        self._at = [rows.data_ptr() for rows in outbox.rows]
        self._combines = combines
        self._holders: list[Handles] = [_NOBODY, _NOBODY]
        self._queue: list[Handles] = []  # received and not combined, in order
        self._epoch = -1

    def offer(self, handle: object, num_rows: int, epoch: int) -> Tensor | None:
        """Returns [num_rows, H] of the outbox for the results of a handle; None: too few, or it is not free yet."""
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

    def settle(self, handle: object, results: Tensor, buffer: int) -> Tensor:
        """Takes a buffer for the combine of a handle. Returns the results, moved where they lie in the other buffer,
        which is offered anew before they are home.

        Raises RuntimeError when they lie where another combine has written since.
        """
        at = results.data_ptr()
        if at in self._at and results.shape[0]:
            other = self._at.index(at)
            if self._holders[other]() is not handle:
                raise RuntimeError(
                    "results lie in an outbox buffer that was given to another dispatch; combine handles in the order "
                    "of their dispatches, or write results elsewhere"
                )
            if other != buffer:
                results = results.clone()
        if self._holders[1 - buffer]() is handle:
            self._holders[1 - buffer] = _NOBODY
        self._holders[buffer] = _NOBODY
        self._queue = [other for other in self._queue if other() is not handle]
        return results
