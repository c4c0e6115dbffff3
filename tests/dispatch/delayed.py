"""A transport whose rows take time: any other one, behind a link of a stated rate. To test and measure overlap.

A call puts its bytes on this rank's outgoing link, one call behind the other; its result may be had no sooner than the
last byte has arrived. Time comes from a clock that may be a real or a counted one, so that a test can show how much
time an overlap hides without measuring any.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moe_serve.dispatch.base import AllToAll, AnyAllToAll, Deferred, Dispatched, Pending

T = TypeVar("T")


class Clock(Protocol):
    def now_s(self) -> float: ...

    def sleep_until(self, when_s: float) -> None: ...


class RealClock:
    def now_s(self) -> float:
        return time.perf_counter()

    def sleep_until(self, when_s: float) -> None:
        time.sleep(max(0.0, when_s - self.now_s()))


class CountedClock:
    """Time passes only where somebody says so: `spend` for computing, `sleep_until` for waiting."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.waited_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def spend(self, seconds: float) -> None:
        self._now_s += seconds

    def sleep_until(self, when_s: float) -> None:
        if when_s > self._now_s:
            self.waited_s += when_s - self._now_s
            self._now_s = when_s


class _Link:
    """What leaves this rank: bytes_per_s, and latency_s that every call pays once."""

    def __init__(self, bytes_per_s: float, latency_s: float, clock: Clock):
        self.bytes_per_s, self.latency_s, self.clock = bytes_per_s, latency_s, clock
        self._free_s = clock.now_s()

    def arrival_s(self, num_bytes: int) -> float:
        """Returns when bytes that are sent now have arrived."""
        self._free_s = max(self._free_s, self.clock.now_s()) + num_bytes / self.bytes_per_s
        return self._free_s + self.latency_s


@dataclass(frozen=True)
class DelayedHandle:
    num_rows: int  # that arrived here, and whose results are sent back
    inner: Any


class DelayedAllToAll(AllToAll[DelayedHandle]):
    """AllToAll over another one.

    The link carries one row for each (token, slot), also where the slot is this rank's own or the row went to its rank
    already: as between so many ranks that hardly two slots of a token share one. The own link stands for those of the
    peers, which carry as much where load is even.
    """

    def __init__(self, inner: AnyAllToAll, bytes_per_s: float, latency_s: float = 0.0, clock: Clock | None = None):
        self._inner = inner
        self._clock = clock or RealClock()
        self._link = _Link(bytes_per_s, latency_s, self._clock)
        self.note = inner.note
        self.capabilities = replace(inner.capabilities, keeps_rows=False, fuses=False)  # rows go over the link

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return self._delay(self._inner.exchange_counts(counts), counts.numel() * counts.element_size())

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[DelayedHandle]]:
        sent = self._inner.dispatch(hidden, physical_ids, slot_counts, weights)
        num_rows = int(torch.count_nonzero(physical_ids >= 0))

        def receive() -> Dispatched[DelayedHandle]:
            arrived = sent.wait()
            num_arrived = int(arrived.rows.rows_per_slot.sum())
            return Dispatched(arrived.rows, DelayedHandle(num_arrived, arrived.handle))

        return self._delay(Deferred(receive), num_rows * hidden.shape[1] * hidden.element_size())

    def combine(self, expert_out: Tensor, weights: Tensor, handle: DelayedHandle) -> Pending[Tensor]:
        sent = self._inner.combine(expert_out, weights, handle.inner)
        return self._delay(sent, handle.num_rows * expert_out.shape[-1] * expert_out.element_size())

    def _delay(self, pending: Pending[T], num_bytes: int) -> Pending[T]:
        arrival_s = self._link.arrival_s(num_bytes)

        def receive() -> T:
            self._clock.sleep_until(arrival_s)
            return pending.wait()

        return Deferred(receive)
