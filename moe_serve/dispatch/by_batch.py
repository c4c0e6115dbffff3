"""Two transports in one: a low-latency one for decode-sized steps, another one for larger steps.

Static slabs for a whole prefill would take many times the memory that they fill, while decode waits for latency alone.
Which one a step uses follows from the step plan, so ranks agree without talking: all call `begin_step` with the same
number.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moe_serve.dispatch.base import AllToAll, AnyAllToAll, BufferLimits, Deferred, Dispatched, Pending
from moe_serve.dispatch.capabilities import TRANSPORTS

DECODE_TOKENS = 128  # per rank, of the small transport: its buffers grow with it


@dataclass(frozen=True)
class ByBatchHandle:
    """handle: of the transport that carried the rows"""

    transport: AnyAllToAll
    handle: Any


class ByBatchAllToAll(AllToAll[ByBatchHandle]):
    """AllToAll over two others. Before the first step everything goes to the one for large steps."""

    def __init__(self, small: AnyAllToAll, large: AnyAllToAll, small_tokens: int):
        """small_tokens: what the buffers of `small` hold"""
        self._small, self._large, self._small_tokens = small, large, small_tokens
        self._current = large
        bitwise = small.capabilities.bitwise and large.capabilities.bitwise
        self.capabilities = replace(TRANSPORTS["by_batch"], bitwise=bitwise)
        self.note = f"up to {small_tokens} tokens: {_describe(small)}; above: {_describe(large)}"
        self.step_sizes = (0, small_tokens + 1)

    @property
    def live_handles(self) -> int:
        return self._current.live_handles

    @property
    def captures(self) -> bool:
        return self._current.captures

    def begin_step(self, most_tokens: int) -> None:
        self._current = self._small if most_tokens <= self._small_tokens else self._large
        self._current.begin_step(most_tokens)

    def end_step(self) -> None:
        self._current.end_step()

    def check_step(self) -> None:
        self._current.check_step()

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return self._current.exchange_counts(counts)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[ByBatchHandle]]:
        transport = self._current
        pending = transport.dispatch(hidden, physical_ids, slot_counts, weights)

        def receive() -> Dispatched[ByBatchHandle]:
            arrived = pending.wait()
            # Results return through the transport that carried the rows, whatever step begins in between.
            return Dispatched(arrived.rows, ByBatchHandle(transport, arrived.handle), arrived.out)

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: ByBatchHandle) -> Pending[Tensor]:
        return handle.transport.combine(expert_out, weights, handle.handle)

    def close(self) -> None:
        self._small.close()
        self._large.close()


def small_limits(limits: BufferLimits) -> BufferLimits:
    """Returns what the buffers for decode-sized steps are made for."""
    return replace(limits, max_tokens_per_rank=min(limits.max_tokens_per_rank, DECODE_TOKENS))


def _describe(transport: AnyAllToAll) -> str:
    return transport.note or type(transport).__name__
