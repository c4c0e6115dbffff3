"""Handles of the shared-memory transport that live side by side: whose memory is whose, and for how long.

Both ends are in this process, so a test says which of them comes first.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import Dispatched, Pending
from moe_serve.dispatch.shm import transport as shm_transport
from moe_serve.dispatch.shm.memory import ShmMemory
from moe_serve.dispatch.shm.region import ROWS, region_shape
from moe_serve.dispatch.shm.transport import ShmAllToAll, ShmHandle
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import PeerError
from tests.dispatch.contract import Scenario, slots_of_rows
from tests.dispatch.shm.regions import map_anonymous


@pytest.fixture(autouse=True)
def small_results_get_a_buffer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_transport, "LEAST_BYTES", 0)


ONE = Scenario((20, 30), topk=4, slots_per_rank=4, hidden=64)


class Ends:
    """Both ends of a transport, and what passes between them."""

    def __init__(self, deadline_s: float = 20, **options: Any):
        request = ONE.request("shm", deadline_s=deadline_s, **options)
        shape = region_shape(2, request.limits, make_wire(ONE.wire, ONE.dtype))
        mappings = map_anonymous(2, shape.num_bytes)
        self.ends = [ShmAllToAll(ShmMemory(rank, mappings, False), request) for rank in range(2)]

    def send(self, scale: float = 1) -> list[Pending[Dispatched[ShmHandle]]]:
        return [end.dispatch(scale * ONE.inputs(rank)[0], ONE.inputs(rank)[1]) for rank, end in enumerate(self.ends)]

    def dispatch(self, scale: float = 1) -> list[Dispatched[ShmHandle]]:
        return [sent.wait() for sent in self.send(scale)]

    def combine(self, arrived: Sequence[Dispatched[ShmHandle]], results: Sequence[Tensor]) -> list[Pending[Tensor]]:
        return [
            end.combine(results[rank], ONE.inputs(rank)[2], arrived[rank].handle) for rank, end in enumerate(self.ends)
        ]


def results_of(arrived: Sequence[Dispatched[ShmHandle]], in_place: bool = True) -> list[Tensor]:
    """Returns what the experts make of rows, in place where a buffer is reserved."""
    results = []
    for rank, rows in enumerate(arrived):
        out = ONE.expert_out(rows.rows.x, slots_of_rows(rows.rows, rank))  # type: ignore[arg-type]
        results.append(rows.out.copy_(out) if in_place and rows.out is not None else out)
    return results


def check_results(combined: Sequence[Pending[Tensor]], scale: float = 1) -> None:
    for rank, pending in enumerate(combined):
        assert torch.equal(pending.wait(), scale * ONE.expected_combined(rank))


def test_rows_stay_while_an_older_handle_whose_memory_they_took_returns() -> None:
    ends = Ends()
    first, _ = ends.dispatch(1), ends.dispatch(2)
    results = results_of(first, in_place=False)
    third = ends.dispatch(4)
    check_results(ends.combine(first, results))
    ends.dispatch(8)
    for rank, arrived in enumerate(third):
        assert torch.equal(arrived.rows.x, 4 * ONE.expected_rows(rank))


def test_each_handle_gets_its_own_buffer_also_when_the_one_before_got_none() -> None:
    """It was not since the peer had not read yet what lay there, and by now it has."""
    ends = Ends()
    going = []
    for scale in (1, 2):
        arrived = ends.dispatch(scale)
        going.append(ends.combine(arrived, results_of(arrived, in_place=False)))
    third = ends.dispatch(4)
    results = results_of(third)
    assert all(arrived.out is None for arrived in third)
    check_results(going[0])
    fourth = ends.dispatch(8)
    more = results_of(fourth)
    check_results(going[1], 2)
    check_results(ends.combine(third, results), 4)
    check_results(ends.combine(fourth, more), 8)


def test_results_are_not_overwritten_before_this_rank_itself_has_added_them() -> None:
    ends = Ends()
    first = ends.dispatch()
    going = ends.combine(first, results_of(first))
    second, third = ends.dispatch(2), ends.send(4)
    third[1].wait()
    assert torch.equal(going[1].wait(), ONE.expected_combined(1))
    late = third[0].wait()  # the peer has read the first results, and this rank has not
    results_of([late])
    assert torch.equal(going[0].wait(), ONE.expected_combined(0))
    assert all(arrived.out is not None for arrived in second)


def test_results_of_the_handle_after_a_dropped_one_stay_until_they_are_received() -> None:
    ends = Ends()
    dropped, second = ends.dispatch(2), ends.dispatch()
    results = results_of(second)
    del dropped
    going = ends.combine(second, results)
    results_of(ends.dispatch(4))
    check_results(going)


@pytest.mark.parametrize("compiled", [True, False])
def test_ids_may_change_once_rows_are_here(compiled: bool) -> None:
    ends = Ends(compiled=compiled)
    ids = [ONE.inputs(rank)[1] for rank in range(2)]
    sent = [end.dispatch(ONE.inputs(rank)[0], ids[rank]) for rank, end in enumerate(ends.ends)]
    arrived = [rows.wait() for rows in sent]
    for changed in ids:
        changed.fill_(2**40)
    check_results(ends.combine(arrived, results_of(arrived)))


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_that_are_added_elsewhere_may_lie_in_any_order(compiled: bool) -> None:
    ends = Ends(compiled=compiled, combine="rank_sum")
    sent = []
    for rank, end in enumerate(ends.ends):
        hidden, ids, weights = ONE.inputs(rank)
        sent.append(end.dispatch(hidden, ids, None, weights.t().contiguous().t()))
    arrived = [rows.wait() for rows in sent]
    for rank, combined in enumerate(ends.combine(arrived, results_of(arrived))):
        assert torch.equal(combined.wait(), ONE.expected_rank_sums(rank))


def test_rows_that_never_came_are_not_given_by_a_second_wait_either() -> None:
    ends = Ends(deadline_s=0.02)
    sent = ends.send()
    ends.ends[0]._received[1].flags[ROWS + 1] -= 1
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 1 did not arrive in dispatch receive 1"):
            sent[0].wait()


def test_what_has_another_shape_or_dtype_is_refused_before_anything_is_read_past_its_end() -> None:
    ends = Ends()
    hidden, ids, weights = ONE.inputs(0)
    for wrong in ((hidden.half(), ids), (hidden, ids.int()), (hidden[:3], ids)):
        with pytest.raises(AssertionError, match=r"rows or ids|one row for each token"):
            ends.ends[0].dispatch(*wrong)
    arrived = ends.dispatch()
    for rows in (arrived[0].rows.x[1:], arrived[0].rows.x.half()):
        with pytest.raises(AssertionError, match="results are like the rows"):
            ends.ends[0].combine(rows, weights, arrived[0].handle)
    check_results(ends.combine(arrived, results_of(arrived)))
