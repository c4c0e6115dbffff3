"""Halves that take turns hide time, and change no bit. Time is counted, not measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import (
    AllToAll,
    AnyAllToAll,
    Deferred,
    Dispatched,
    EpGroup,
    PackedRows,
    Pending,
)
from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.local import LocalAllToAll
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.wire import make_wire
from moe_serve.ep import moe_layer
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import AddTo, ExpertParallel, MoeLayer, MoeWeights, Turns, take_turns
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import FAST
from tests.dispatch.contract import Scenario
from tests.dispatch.delayed import CountedClock, DelayedAllToAll
from tests.ranks import run_ranks

V = TypeVar("V")
ONE = Scenario((8,), topk=2, slots_per_rank=4, hidden=16)
HALF_BYTES = 8 * 2 * 16 * 4  # of the rows, or the results, of one half in one layer


def a_layer(
    transport: AnyAllToAll,
    shared: Callable[[Tensor], AddTo] | None = None,
    num_redundant: int = 0,
    num_ranks: int = 1,
    rank: int = 0,
) -> MoeLayer:
    spec = RouterSpec(num_logical=4, topk=2, scoring="softmax", norm_topk=True)
    placement = Placement.trivial(1, 4, num_ranks, num_redundant)
    recorder = LoadRecorder(1, 4, EpGroup(0, 1, torch.device("cpu")))
    parallel = ExpertParallel(
        rank, spec, transport, ReplicaMap(placement), recorder, max_tokens_per_rank=64, numerics=FAST
    )
    slots, draw = placement.slots_per_rank, torch.Generator().manual_seed(1)
    experts = {
        "gate_up": torch.randn(slots, 16, ONE.hidden, generator=draw),
        "down": torch.randn(slots, ONE.hidden, 8, generator=draw),
    }
    gate = torch.randn(4, ONE.hidden, generator=draw)
    return MoeLayer(parallel, 0, MoeWeights(gate, None, ExpertStore(experts), shared))


@contextmanager
def experts_that(run: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces the experts of all layers by a function of the rows."""
    expert_ffn = moe_layer.expert_ffn
    moe_layer.expert_ffn = lambda rows, experts, numerics, out: run(rows.x)
    try:
        yield
    finally:
        moe_layer.expert_ffn = expert_ffn


def stack(layer: MoeLayer, rows: Tensor, num_layers: int, attend: Callable[[], None] = lambda: None) -> Turns[Tensor]:
    """Runs rows through a layer, again and again, with attention before each."""
    for _ in range(num_layers):
        attend()
        rows = yield from layer(rows, len(rows), 1)
    return rows


def run(layer: MoeLayer, rows: Tensor, num_chunks: int) -> Tensor:
    [out] = take_turns([layer(rows, len(rows), num_chunks)])
    return out


@dataclass(frozen=True)
class Times:
    """Of each half in each layer: attention, rows or results on the link, their delay, experts, the shared expert."""

    attention_s: float = 0.0
    transfer_s: float = 1e-9
    way_s: float = 0.0
    experts_s: float = 0.0
    shared_s: float = 0.0


def total_s(num_halves: int, times: Times, num_layers: int = 4) -> tuple[float, Tensor]:
    """Returns the counted time of 16 rows at once, or of two halves that take turns, and the rows behind all layers."""
    clock, share = CountedClock(), 2 / num_halves
    inner = LocalAllToAll(ONE.slots_per_rank, make_wire("auto", ONE.dtype))
    delayed = DelayedAllToAll(inner, HALF_BYTES / times.transfer_s, times.way_s, clock)

    def experts(x: Tensor) -> Tensor:
        clock.spend(share * times.experts_s)
        return x * 2

    def shared(x: Tensor) -> AddTo:
        clock.spend(share * times.shared_s)
        return x.clone().add_

    rows = ONE.inputs(0)[0].repeat(2, 1)
    with experts_that(experts):
        layer = a_layer(delayed, shared)
        halves = [
            stack(layer, half, num_layers, lambda: clock.spend(share * times.attention_s))
            for half in rows.tensor_split(num_halves)
        ]
        results = torch.cat(take_turns(halves))
    return clock.now_s(), results


CASES = {
    "a delay, long attention": Times(attention_s=2, way_s=1, experts_s=1),
    "a delay, long experts": Times(attention_s=1, way_s=1, experts_s=3),
    "a delay, a shared expert": Times(attention_s=1.5, way_s=1, experts_s=0.5, shared_s=0.5),
    "a slow link": Times(attention_s=2, transfer_s=1, experts_s=1),
    "a slow link with a delay": Times(attention_s=2, transfer_s=0.5, way_s=0.5, experts_s=1),
}


@pytest.mark.parametrize("times", CASES.values(), ids=CASES)
def test_what_computes_as_long_as_rows_travel_hides_them(times: Times) -> None:
    """But before the first experts, where only the other half's attention computes, and behind the last ones."""
    computing_s = 8 * (times.attention_s + times.experts_s + times.shared_s)
    travelling_s = times.transfer_s + times.way_s
    whole_s, whole = total_s(1, times)
    halves_s, halves = total_s(2, times)
    assert torch.equal(halves, whole)
    assert halves_s <= computing_s + 2 * travelling_s + 1e-6
    assert halves_s < 0.9 * whole_s


@pytest.mark.parametrize("compute_s", [0.0, 0.1])
def test_halves_wait_for_a_delay_no_more_often_than_a_whole_batch(compute_s: float) -> None:
    times = Times(attention_s=compute_s, way_s=1, experts_s=compute_s)
    whole_s, halves_s = (total_s(num_halves, times)[0] for num_halves in (1, 2))
    assert whole_s == pytest.approx(4 * (2 + 4 * compute_s), abs=0.01)
    assert 8 <= halves_s <= whole_s


def test_the_shared_expert_costs_nothing_while_rows_travel() -> None:
    times = Times(way_s=4)
    without = total_s(1, times)[0]
    assert total_s(1, replace(times, shared_s=1))[0] == pytest.approx(without)
    assert total_s(1, replace(times, shared_s=9))[0] > without, "the clock does count it"


class Watched(AllToAll[int]):
    """Keeps what is sent and received, and checks what every transport may ask of its caller."""

    def __init__(self) -> None:
        self.capabilities = replace(TRANSPORTS["local"], live_handles=2)
        self.events: list[str] = []
        self._rows_in_flight: list[str] = []
        self._handles = self._counts = self._counted = self._sent = 0

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        self._counts += 1
        assert self._counts <= 2, "two buffers for counts"
        name, self._counted = f"counts {self._counted}", self._counted + 1
        self.events.append(f"{name} sent")

        def receive() -> Tensor:
            self._counts -= 1
            self.events.append(f"{name} received")
            return counts[None]

        return Deferred(receive)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[int]]:
        number, self._sent = self._sent, self._sent + 1
        self._handles += 1
        assert self._handles <= self.live_handles
        rows = PackedRows(hidden, torch.tensor([len(hidden)]))
        return self._send(f"rows {number}", lambda: Dispatched(rows, number))

    def combine(self, expert_out: Tensor, weights: Tensor, handle: int) -> Pending[Tensor]:
        def receive() -> Tensor:
            self._handles -= 1
            return expert_out

        return self._send(f"results {handle}", receive)

    def _send(self, name: str, receive: Callable[[], V]) -> Pending[V]:
        self.events.append(f"{name} sent")
        self._rows_in_flight.append(name)
        assert len(self._rows_in_flight) <= 2, self.events

        def received() -> V:
            assert self._rows_in_flight.pop(0) == name, "received in the order of the sends"
            self.events.append(f"{name} received")
            return receive()

        return Deferred(received)


def watch(num_rows: int, num_halves: int, with_counts: bool = False, num_chunks: int = 1) -> list[str]:
    """Returns the calls of a layer whose halves share these rows."""
    transport = Watched()

    def experts(x: Tensor) -> Tensor:
        transport.events.append("experts")
        return x + 100

    rows = torch.arange(float(num_rows))[:, None].repeat(1, ONE.hidden)
    with experts_that(experts):
        layer = a_layer(transport, num_redundant=with_counts)
        halves = [layer(half, len(half), num_chunks) for half in rows.tensor_split(num_halves)]
        results = torch.cat(take_turns(halves))
    assert torch.equal(results, rows + 100)
    return transport.events


@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize(("num_halves", "num_chunks"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3)])
def test_calls_are_the_same_whatever_the_sizes(num_halves: int, num_chunks: int, with_counts: bool) -> None:
    full = watch(10 * num_chunks, num_halves, with_counts, num_chunks)
    assert full == watch(0, num_halves, with_counts, num_chunks)
    assert full == watch(1, num_halves, with_counts, num_chunks), "the last half has no rows"
    assert full.count("experts") == num_halves * num_chunks
    if with_counts and 1 in (num_halves, num_chunks):
        assert [e for e in full if "counts" not in e] == watch(num_chunks, num_halves, num_chunks=num_chunks)


def test_each_half_sends_before_the_other_one_waits() -> None:
    calls = [event for event in watch(4, 2, with_counts=True) if event != "experts"]
    assert calls == [
        "counts 0 sent", "counts 1 sent", "counts 0 received", "rows 0 sent", "counts 1 received", "rows 1 sent",
        "rows 0 received", "results 0 sent", "rows 1 received", "results 1 sent", "results 0 received",
        "results 1 received",
    ]  # fmt: skip


def test_one_batch_sends_nothing_before_the_last_thing_is_received() -> None:
    calls = [event for event in watch(2, 1, with_counts=True, num_chunks=2) if event != "experts"]
    assert all(a.replace("sent", "received") == b for a, b in zip(calls[::2], calls[1::2], strict=True))


def check_halves(rank: int, group: EpGroup, backend: str) -> None:
    one = Scenario((9, 0, 12), topk=2, slots_per_rank=2, hidden=ONE.hidden)
    layer = a_layer(make_all_to_all(group, one.request(backend)), num_redundant=2, num_ranks=3, rank=rank)
    hidden = one.inputs(rank)[0]
    with experts_that(lambda x: x * 3):
        for num_chunks in (1, 2, 5):
            halves = take_turns([layer(half, len(half), num_chunks) for half in hidden.tensor_split(2)])
            assert torch.equal(torch.cat(halves), run(layer, hidden, num_chunks))


@pytest.mark.parametrize("backend", ["collective", "shm"])
def test_halves_have_the_bits_of_a_whole_batch(backend: str) -> None:
    run_ranks(3, check_halves, backend)
