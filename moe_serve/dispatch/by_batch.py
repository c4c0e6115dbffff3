"""Two transports in one: a low-latency one for decode-sized steps, another for larger ones, which takes every size.

Static slabs for a whole prefill would take many times the memory that they fill, and one-sided rows pay off where
latency is all: so small steps and large ones want different ways. Which one a step takes follows from the step plan
alone, so ranks agree without a word: whoever runs a step calls `begin_step` with the same number on every rank.
"""

from dataclasses import replace

from torch import Tensor

from moe_serve.dispatch.base import AllToAll, BufferLimits, Deferred, Dispatched, FollowsSteps, Pending

DECODE_TOKENS = 128  # of the small way, per rank: its buffers grow with it


class ByBatchAllToAll:
    """AllToAll over two others. Until a step is begun all goes the way of large ones."""

    def __init__(self, small: AllToAll, large: AllToAll, small_tokens: int):
        """small_tokens: what the buffers of `small` hold"""
        self._small, self._large, self._small_tokens = small, large, small_tokens
        self._now = large
        self.is_bitwise = small.is_bitwise and large.is_bitwise
        parts = (f"up to {small_tokens} tokens: {_say(small)}", f"above: {_say(large)}")
        self.note = "; ".join(parts)

    @property
    def most_handles(self) -> int:
        """How many handles may live at once on the way of this step; see overlap.py."""
        return int(getattr(self._now, "most_handles", 3))

    def begin_step(self, most_tokens: int) -> None:
        self._now = self._small if most_tokens <= self._small_tokens else self._large
        if isinstance(self._now, FollowsSteps):
            self._now.begin_step(most_tokens)

    def end_step(self) -> None:
        if isinstance(self._now, FollowsSteps):
            self._now.end_step()

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return self._now.exchange_counts(counts)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched]:
        way = self._now
        pending = way.dispatch(hidden, physical_ids, slot_counts, weights)

        def receive() -> Dispatched:
            arrived = pending.wait()
            # Results go home the way the rows came, whatever step begins between.
            return Dispatched(arrived.rows, (way, arrived.handle), arrived.out)

        return Deferred(receive)

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
        assert isinstance(handle, tuple), "the handle belongs to another transport"
        way, theirs = handle
        pending: Pending[Tensor] = way.combine(expert_out, weights, theirs)
        return pending

    def close(self) -> None:
        """Gives back the buffers of a way that can."""
        for way in (self._small, self._large):
            if hasattr(way, "close"):
                way.close()


def small_limits(limits: BufferLimits) -> BufferLimits:
    """Returns what the buffers of the small way are made for."""
    return replace(limits, max_tokens_per_rank=min(limits.max_tokens_per_rank, DECODE_TOKENS))


def _say(way: AllToAll) -> str:
    return way.note or type(way).__name__
