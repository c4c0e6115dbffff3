"""Overlap hides time, and changes no bit. Time is counted, not measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from moe_serve.ep.moe_layer import ADVANCES, SHARED, AddTo, ExpertParallel, MoeLayer, MoeWeights, in_turn, overlapped
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import FAST
from tests.dispatch.contract import Scenario
from tests.dispatch.delayed import CountedClock, DelayedAllToAll
from tests.ranks import run_ranks

V = TypeVar("V")
ONE = Scenario((8,), topk=2, slots_per_rank=4, hidden=16)
ROUND_BYTES = 8 * 2 * 16 * 4  # of the rows, or the results, of one round


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


def total_s(
    overlap: bool,
    num_rounds: int,
    transfer_s: float,
    compute_s: float,
    shared_s: float = 0.0,
    way_s: float = 0.0,
) -> tuple[float, Tensor]:
    """Returns the counted time of equal rounds, and their results. transfer_s: rows, or results, of one round

    way_s: by which all that is sent is delayed
    """
    clock = CountedClock()
    inner = LocalAllToAll(ONE.slots_per_rank, make_wire("auto", ONE.dtype))
    delayed = DelayedAllToAll(inner, ROUND_BYTES / transfer_s, way_s, clock)

    def experts(x: Tensor) -> Tensor:
        clock.spend(compute_s)
        return x * 2

    def shared(x: Tensor) -> AddTo:
        clock.spend(shared_s)
        return x.clone().add_

    rows = ONE.inputs(0)[0].repeat(num_rounds, 1)
    with experts_that(experts):
        results = a_layer(delayed, shared)(rows, len(rows), num_rounds, overlap)
    return clock.now_s(), results


@pytest.mark.parametrize("live_handles", [2, 3])
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4, 7])
def test_every_round_advances_to_its_end_and_the_shared_expert_runs_once(num_rounds: int, live_handles: int) -> None:
    for order in (in_turn(num_rounds), overlapped(num_rounds, live_handles)):
        assert sorted(order) == [SHARED] + [number for number in range(num_rounds) for _ in range(ADVANCES)]


TIMES = [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (1.0, 0.0), (2.0, 3.0)]


@pytest.mark.parametrize("transfer_s, compute_s", TIMES)
def test_two_half_batches_hide_what_can_be_hidden(transfer_s: float, compute_s: float) -> None:
    in_turn_s, plain = total_s(False, 2, transfer_s, compute_s)
    overlapped_s, results = total_s(True, 2, transfer_s, compute_s)
    assert in_turn_s == pytest.approx(2 * (2 * transfer_s + compute_s))
    # Nothing can hide the first half's dispatch and the last one's combine, nor the longer of what is left.
    floor_s = 2 * transfer_s + max(2 * compute_s, transfer_s + compute_s, 2 * transfer_s)
    assert overlapped_s == pytest.approx(floor_s)
    assert torch.equal(plain, results)


@pytest.mark.parametrize("compute_s", [0.0, 0.2])
def test_two_half_batches_wait_for_a_delay_no_more_often_than_one_batch(compute_s: float) -> None:
    one_s, two_s = (total_s(num > 1, num, 1e-6, compute_s, way_s=1.0)[0] for num in (1, 2))
    assert one_s == pytest.approx(2.0 + compute_s, abs=0.01)
    assert two_s == pytest.approx(2.0 + 2 * compute_s, abs=0.01)


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("transfer_s, compute_s", TIMES)
def test_many_rounds_leave_only_the_ends_uncovered(num_rounds: int, transfer_s: float, compute_s: float) -> None:
    """Between the first dispatch and the last combine, either the link is busy all the time or the experts are."""
    overlapped_s, _ = total_s(True, num_rounds, transfer_s, compute_s)
    busy_s = max(2 * (num_rounds - 1) * transfer_s, num_rounds * compute_s)
    # At most one round's experts, or one transfer, may fall between the two.
    assert 2 * transfer_s + busy_s <= overlapped_s + 1e-9
    assert overlapped_s <= 2 * transfer_s + busy_s + min(transfer_s, compute_s) + 1e-9


@pytest.mark.parametrize("transfer_s, compute_s", [(1.0, 2.0), (1.0, 5.0), (1.0, 1.0), (4.0, 1.0)])
def test_eight_rounds_hide_four_fifths_of_the_shorter(transfer_s: float, compute_s: float) -> None:
    hidden_s = total_s(False, 8, transfer_s, compute_s)[0] - total_s(True, 8, transfer_s, compute_s)[0]
    assert hidden_s >= 0.8 * 8 * min(2 * transfer_s, compute_s)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_shared_expert_costs_nothing_while_rows_travel(overlapped: bool) -> None:
    without = total_s(overlapped, 2, 2.0, 1.0)[0]
    assert total_s(overlapped, 2, 2.0, 1.0, shared_s=2.0)[0] == pytest.approx(without)
    assert total_s(overlapped, 2, 2.0, 1.0, shared_s=9.0)[0] > without, "the clock does count it"


class Watched(AllToAll[int]):
    """Keeps what is sent and received, and checks what every transport may ask of its caller."""

    def __init__(self, live_handles: int):
        self.capabilities = replace(TRANSPORTS["local"], live_handles=live_handles)
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
        kind = name.split()[0]
        assert sum(each.startswith(kind) for each in self._rows_in_flight) <= 2, self.events

        def received() -> V:
            assert self._rows_in_flight.pop(0) == name, "received in the order of the sends"
            self.events.append(f"{name} received")
            return receive()

        return Deferred(received)


def watch(
    num_rows: int, num_rounds: int, live_handles: int = 3, with_counts: bool = False, overlap: bool = True
) -> list[str]:
    """Returns the calls of a layer whose rounds share these rows."""
    transport = Watched(live_handles)

    def experts(x: Tensor) -> Tensor:
        transport.events.append("experts")
        return x + 100

    rows = torch.arange(float(num_rows))[:, None].repeat(1, ONE.hidden)
    with experts_that(experts):
        results = a_layer(transport, num_redundant=with_counts)(rows, num_rows, num_rounds, overlap)
    assert torch.equal(results, rows + 100)
    return transport.events


@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("live_handles", [2, 3])
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4, 7])
def test_calls_are_the_same_whatever_the_sizes(num_rounds: int, live_handles: int, with_counts: bool) -> None:
    full = watch(5 * num_rounds, num_rounds, live_handles, with_counts)
    assert full == watch(0, num_rounds, live_handles, with_counts)
    assert full == watch(num_rounds - 1, num_rounds, live_handles, with_counts), "the last round has no rows"
    assert full.count("experts") == num_rounds
    if with_counts:
        assert [e for e in full if "counts" not in e] == watch(num_rounds, num_rounds, live_handles)


def test_while_experts_run_the_next_rows_and_the_last_results_travel() -> None:
    events = watch(4, 4)
    for number in (1, 2):
        in_flight: set[str] = set()
        for event in events[: [i for i, e in enumerate(events) if e == "experts"][number]]:
            name, _, what = event.rpartition(" ")
            (in_flight.add if what == "sent" else in_flight.discard)(name)
        assert in_flight == {f"rows {number + 1}", f"results {number - 1}"}


def test_counts_of_a_round_are_sent_before_the_experts_of_the_round_before_the_last() -> None:
    events = watch(5, 5, with_counts=True)
    experts = [i for i, e in enumerate(events) if e == "experts"]
    for number in range(2, 5):
        assert events.index(f"counts {number} sent") < experts[number - 2]
        assert events.index(f"counts {number} received") > experts[number - 2]


def test_in_turn_nothing_is_sent_before_the_last_thing_is_received() -> None:
    events = watch(2, 2, with_counts=True, overlap=False)
    calls = [event for event in events if event != "experts"]
    assert all(a.replace("sent", "received") == b for a, b in zip(calls[::2], calls[1::2], strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_shared_expert_computes_while_rows_travel(overlap: bool) -> None:
    clock = CountedClock()
    inner = LocalAllToAll(ONE.slots_per_rank, make_wire("auto", ONE.dtype))
    layer_time = {}
    for compute_s in (0.0, 1.0):
        delayed = DelayedAllToAll(inner, bytes_per_s=ROUND_BYTES / 2.0, clock=clock)  # 2 s out, 2 s home

        def shared(x: Tensor, compute_s: float = compute_s) -> AddTo:
            clock.spend(compute_s)
            return x.clone().add_

        layer = a_layer(delayed, shared)
        started_s = clock.now_s()
        layer(ONE.inputs(0)[0], num_tokens=8, num_chunks=1 + overlap, overlap=overlap)
        layer_time[compute_s] = clock.now_s() - started_s
    assert layer_time[0.0] == pytest.approx(4.0)
    assert layer_time[1.0] == pytest.approx(4.0), "one second of the shared expert costs nothing"


def check_overlap(rank: int, group: EpGroup, backend: str) -> None:
    one = Scenario((9, 0, 12), topk=2, slots_per_rank=2, hidden=ONE.hidden)
    layer = a_layer(make_all_to_all(group, one.request(backend)), num_redundant=2, num_ranks=3, rank=rank)
    hidden = one.inputs(rank)[0]
    with experts_that(lambda x: x * 3):
        for num_rounds in (1, 2, 3, 5):
            overlapping, plain = (layer(hidden, len(hidden), num_rounds, overlap) for overlap in (True, False))
            assert torch.equal(plain, overlapping)


@pytest.mark.parametrize("backend", ["collective", "shm"])
def test_overlapped_rounds_have_the_bits_of_plain_ones(backend: str) -> None:
    run_ranks(3, check_overlap, backend)
