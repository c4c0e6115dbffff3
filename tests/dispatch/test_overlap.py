"""Overlap hides time, and changes no bit. Time is counted, not measured."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import AllToAll, Deferred, Dispatched, EpGroup, PackedRows, Pending, Ready
from moe_serve.dispatch.local import LocalAllToAll
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.overlap import Round, run_in_turn, run_overlapped
from moe_serve.dispatch.wire import make_wire
from moe_serve.ep.moe_layer import ExpertParallel, MoeLayer, make_moe_layer
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.numerics import FAST
from tests.dispatch.contract import Scenario
from tests.dispatch.delayed import CountedClock, DelayedAllToAll
from tests.ranks import run_ranks

V = TypeVar("V")
ONE = Scenario((8,), topk=2, slots_per_rank=4, hidden=16)
ROUND_BYTES = 8 * 2 * 16 * 4  # of one round on one way


def nothing() -> None:
    return None


def same_round_again(num_rounds: int) -> list[Callable[[], Pending[Round]]]:
    return [partial(Ready, Round(*ONE.inputs(0)))] * num_rounds


def total_s(
    overlapped: bool, num_rounds: int, transfer_s: float, compute_s: float, shared_s: float = 0.0
) -> tuple[float, list[Tensor]]:
    """Returns the counted time of equal rounds, and their results. transfer_s: one round on one way"""
    clock = CountedClock()
    inner = LocalAllToAll(ONE.slots_per_rank, make_wire("auto", ONE.dtype))
    delayed = DelayedAllToAll(inner, bytes_per_s=ROUND_BYTES / transfer_s, clock=clock)

    def experts(arrived: Dispatched) -> Tensor:
        clock.spend(compute_s)
        return arrived.rows.x * 2

    run = run_overlapped if overlapped else run_in_turn
    results, _ = run(delayed, same_round_again(num_rounds), experts, lambda: clock.spend(shared_s))
    return clock.now_s(), results


TIMES = [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (1.0, 0.0), (2.0, 3.0)]


@pytest.mark.parametrize("transfer_s, compute_s", TIMES)
def test_two_half_batches_hide_what_can_be_hidden(transfer_s: float, compute_s: float) -> None:
    in_turn_s, plain = total_s(False, 2, transfer_s, compute_s)
    overlapped_s, results = total_s(True, 2, transfer_s, compute_s)
    assert in_turn_s == pytest.approx(2 * (2 * transfer_s + compute_s))
    # Nothing can hide the first half's way out and the last one's way home, nor the longer of what is left.
    floor_s = 2 * transfer_s + max(2 * compute_s, transfer_s + compute_s, 2 * transfer_s)
    assert overlapped_s == pytest.approx(floor_s)
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("transfer_s, compute_s", TIMES)
def test_many_rounds_leave_only_the_ends_uncovered(num_rounds: int, transfer_s: float, compute_s: float) -> None:
    """Between the first way out and the last way home, either the link is busy all the time or the experts are."""
    overlapped_s, _ = total_s(True, num_rounds, transfer_s, compute_s)
    busy_s = max(2 * (num_rounds - 1) * transfer_s, num_rounds * compute_s)
    # One round's experts, or one way, at most may fall between the two.
    assert 2 * transfer_s + busy_s <= overlapped_s + 1e-9
    assert overlapped_s <= 2 * transfer_s + busy_s + min(transfer_s, compute_s) + 1e-9


@pytest.mark.parametrize("transfer_s, compute_s", [(1.0, 2.0), (1.0, 5.0), (1.0, 1.0), (4.0, 1.0)])
def test_eight_rounds_hide_four_fifths_of_the_shorter(transfer_s: float, compute_s: float) -> None:
    hidden_s = total_s(False, 8, transfer_s, compute_s)[0] - total_s(True, 8, transfer_s, compute_s)[0]
    assert hidden_s >= 0.8 * 8 * min(2 * transfer_s, compute_s)


@pytest.mark.parametrize("overlapped", [False, True])
def test_what_runs_meanwhile_costs_nothing_while_rows_travel(overlapped: bool) -> None:
    without = total_s(overlapped, 2, 2.0, 1.0)[0]
    assert total_s(overlapped, 2, 2.0, 1.0, shared_s=2.0)[0] == pytest.approx(without)
    assert total_s(overlapped, 2, 2.0, 1.0, shared_s=9.0)[0] > without, "the clock does count it"


class Watched:
    """Keeps what is sent and received, and minds what every transport may ask of its caller."""

    is_bitwise, note = True, "watched"

    def __init__(self, most_handles: int, rank_counts: int):
        self.most_handles = most_handles
        self.rank_counts = rank_counts
        self.events: list[str] = []
        self._rows_in_flight: list[str] = []
        self._handles = self._counts = self._sent = self._returned = 0

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        self._counts += 1
        assert self._counts <= 2, "two buffers for counts"
        name = f"counts {int(counts[0])}"
        self.events.append(f"{name} sent")

        def receive() -> Tensor:
            self._counts -= 1
            self.events.append(f"{name} received")
            return counts.expand(self.rank_counts, -1)

        return Deferred(receive)

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched]:
        number, self._sent = self._sent, self._sent + 1
        self._handles += 1
        assert self._handles <= self.most_handles
        rows = PackedRows(hidden, torch.tensor([len(hidden)]))
        return self._send(f"rows {number}", lambda: Dispatched(rows, number))

    def combine(self, expert_out: Tensor, weights: Tensor, handle: object) -> Pending[Tensor]:
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


def watch(sizes: list[int], most_handles: int = 3, with_counts: bool = False, overlapped: bool = True) -> list[str]:
    """Returns the calls of a layer whose rounds have these sizes."""
    transport = Watched(most_handles, 1)

    def begin(number: int) -> Pending[Round]:
        batch = Round(torch.full((sizes[number], 1), float(number)), torch.zeros(0), torch.zeros(0))
        if not with_counts:
            return Ready(batch)
        counts = transport.exchange_counts(torch.tensor([number]))
        return Deferred(lambda: (counts.wait(), batch)[1])

    def experts(arrived: Dispatched) -> Tensor:
        transport.events.append("experts")
        return arrived.rows.x + 100

    run = run_overlapped if overlapped else run_in_turn
    results, _ = run(transport, [partial(begin, n) for n in range(len(sizes))], experts, nothing)
    expected = [torch.full((size, 1), 100.0 + number) for number, size in enumerate(sizes)]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    return transport.events


@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("most_handles", [2, 3])
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4, 7])
def test_calls_are_the_same_whatever_the_sizes(num_rounds: int, most_handles: int, with_counts: bool) -> None:
    full = watch([5] * num_rounds, most_handles, with_counts)
    assert full == watch([0] * num_rounds, most_handles, with_counts)
    assert full == watch([*[3] * (num_rounds - 1), 0], most_handles, with_counts)
    assert full.count("experts") == num_rounds
    if with_counts:
        assert [e for e in full if "counts" not in e] == watch([1] * num_rounds, most_handles)


def test_while_experts_run_the_next_rows_and_the_last_results_travel() -> None:
    events = watch([1] * 4)
    for number in (1, 2):
        under_way: set[str] = set()
        for event in events[: [i for i, e in enumerate(events) if e == "experts"][number]]:
            name, _, what = event.rpartition(" ")
            (under_way.add if what == "sent" else under_way.discard)(name)
        assert under_way == {f"rows {number + 1}", f"results {number - 1}"}


def test_counts_of_a_round_are_sent_before_the_experts_of_the_round_before_the_last() -> None:
    events = watch([1] * 5, with_counts=True)
    experts = [i for i, e in enumerate(events) if e == "experts"]
    for number in range(2, 5):
        assert events.index(f"counts {number} sent") < experts[number - 2]
        assert events.index(f"counts {number} received") > experts[number - 2]


def test_in_turn_nothing_is_sent_before_the_last_thing_is_received() -> None:
    events = watch([1, 1], with_counts=True, overlapped=False)
    calls = [event for event in events if event != "experts"]
    assert all(a.replace("sent", "received") == b for a, b in zip(calls[::2], calls[1::2], strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_shared_expert_computes_while_rows_travel(overlap: bool) -> None:
    clock = CountedClock()
    inner = LocalAllToAll(ONE.slots_per_rank, make_wire("auto", ONE.dtype))
    layer_time = {}
    for compute_s in (0.0, 1.0):
        delayed = DelayedAllToAll(inner, bytes_per_s=ROUND_BYTES / 2.0, clock=clock)  # 2 s out, 2 s home

        def shared(x: Tensor, compute_s: float = compute_s) -> Tensor:
            clock.spend(compute_s)
            return x

        layer = a_layer(delayed, shared)
        started_s = clock.now_s()
        layer(ONE.inputs(0)[0], num_tokens=8, num_chunks=1 + overlap, overlap=overlap)
        layer_time[compute_s] = clock.now_s() - started_s
    assert layer_time[0.0] == pytest.approx(4.0)
    assert layer_time[1.0] == pytest.approx(4.0), "one second of the shared expert costs nothing"


def a_layer(transport: AllToAll, shared: Callable[[Tensor], Tensor]) -> MoeLayer:
    from moe_serve.ep.load_recorder import LoadRecorder
    from moe_serve.ep.routing import RouterSpec

    spec = RouterSpec(num_logical=4, topk=2, scoring="softmax", norm_topk=True)
    placement = Placement.trivial(1, 4, 1)
    group = EpGroup(0, 1, torch.device("cpu"))
    parallel = ExpertParallel(
        0, spec, transport, ReplicaMap(placement), LoadRecorder(1, 4, group), max_tokens_per_rank=8, numerics=FAST
    )
    experts = {"gate_up": torch.randn(4, 16, 16), "down": torch.randn(4, 16, 8)}
    return make_moe_layer(parallel, 0, torch.randn(4, 16), None, experts, shared)


def check_overlap(rank: int, group: EpGroup, backend: str, scenario: Scenario) -> None:
    options: dict[str, Any] = {"max_tokens_per_rank": 16, "hidden": scenario.hidden, "topk": scenario.topk}
    transport = make_all_to_all(backend, group, scenario.slots_per_rank, scenario.dtype, **options)
    hidden, ids, weights = scenario.inputs(rank)
    for num_rounds in (1, 2, 3, 5):
        parts = [part.tensor_split(num_rounds) for part in (hidden, ids, weights)]
        rounds = [partial(Ready, Round(*part)) for part in zip(*parts, strict=True)]
        results, _ = run_overlapped(transport, rounds, lambda arrived: arrived.rows.x * 3, nothing)
        plain, _ = run_in_turn(transport, rounds, lambda arrived: arrived.rows.x * 3, nothing)
        assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))


@pytest.mark.parametrize("backend", ["collective", "low_latency"])
def test_overlapped_rounds_have_the_bits_of_plain_ones(backend: str) -> None:
    run_ranks(3, check_overlap, backend, Scenario((9, 0, 12), topk=3, slots_per_rank=3, hidden=40, gate="masked"))
