"""Two transports in one: which one a step uses, what the whole declares, and that results return as the rows came."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import AllToAll, AnyAllToAll, Dispatched, MaskedRows, PackedRows, Pending, Ready
from moe_serve.dispatch.by_batch import DECODE_TOKENS, ByBatchAllToAll
from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.local import LocalAllToAll, LocalHandle
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import PeerError


class Slabs(AllToAll[LocalHandle]):
    """A low-latency transport of one rank, which gives every row in a slab and notes the steps."""

    note = "slabs"

    def __init__(self, bitwise: bool = True):
        self.capabilities = replace(TRANSPORTS["nvshmem"], bitwise=bitwise)
        self.steps: list[int] = []
        self.late = False
        self.inner = LocalAllToAll(4, make_wire("auto", torch.float32))

    def begin_step(self, most_tokens: int) -> None:
        self.steps.append(most_tokens)

    def check_step(self) -> None:
        if self.late:
            raise PeerError("rank 3 did not send its rows", 3, "dispatch", 1)

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        return Ready(-counts[None])  # shows that it was this one

    def dispatch(
        self, hidden: Tensor, physical_ids: Tensor, slot_counts: Tensor | None = None, weights: Tensor | None = None
    ) -> Pending[Dispatched[LocalHandle]]:
        arrived = self.inner.dispatch(hidden, physical_ids).wait()
        assert isinstance(arrived.rows, PackedRows)
        return Ready(Dispatched(MaskedRows(arrived.rows.x, arrived.rows.rows_per_slot), arrived.handle))

    def combine(self, expert_out: Tensor, weights: Tensor, handle: LocalHandle) -> Pending[Tensor]:
        return self.inner.combine(expert_out, weights, handle)


@pytest.fixture
def small() -> Slabs:
    return Slabs()


@pytest.fixture
def both(small: Slabs) -> ByBatchAllToAll:
    return ByBatchAllToAll(small, LocalAllToAll(4, make_wire("auto", torch.float32)), DECODE_TOKENS)


HIDDEN, IDS, WEIGHTS = torch.randn(2, 8), torch.tensor([[0, 3], [1, 0]]), torch.rand(2, 2)


def form_of_rows(transport: AnyAllToAll) -> type:
    return type(transport.dispatch(HIDDEN, IDS).wait().rows)


def test_the_size_of_a_step_decides_and_before_any_step_the_large_one_serves(
    both: ByBatchAllToAll,
) -> None:
    assert form_of_rows(both) is PackedRows
    for most_tokens, expected in ((0, MaskedRows), (DECODE_TOKENS, MaskedRows), (DECODE_TOKENS + 1, PackedRows)):
        both.begin_step(most_tokens)
        assert form_of_rows(both) is expected
        assert (both.exchange_counts(torch.tensor([5])).wait().item() == -5) == (expected is MaskedRows)


def test_results_return_as_rows_came_though_a_step_began_meanwhile(both: ByBatchAllToAll) -> None:
    both.begin_step(1)
    arrived = both.dispatch(HIDDEN, IDS).wait()
    both.begin_step(5000)
    combined = both.combine(arrived.rows.x, WEIGHTS, arrived.handle).wait()
    assert torch.equal(combined, sum_of(HIDDEN))


def sum_of(hidden: Tensor) -> Tensor:
    local = LocalAllToAll(4, make_wire("auto", torch.float32))
    arrived = local.dispatch(hidden, IDS).wait()
    return local.combine(arrived.rows.x, WEIGHTS, arrived.handle).wait()


def test_a_late_peer_voids_the_steps_of_its_own_transport_only(both: ByBatchAllToAll, small: Slabs) -> None:
    small.late = True
    both.begin_step(5000)
    both.end_step()
    both.check_step()
    both.begin_step(3)
    both.end_step()
    with pytest.raises(PeerError, match="rank 3"):
        both.check_step()
    assert small.steps == [3], "it hears of its own steps"


def test_the_whole_is_in_the_bitwise_class_only_if_both_are(both: ByBatchAllToAll) -> None:
    assert both.capabilities.bitwise
    assert both.note == f"up to {DECODE_TOKENS} tokens: slabs; above: LocalAllToAll"
    assert not ByBatchAllToAll(Slabs(bitwise=False), both, 1).capabilities.bitwise


def test_as_many_handles_may_live_as_the_transport_of_the_step_has(both: ByBatchAllToAll) -> None:
    both.begin_step(1)
    assert both.live_handles == 2
    both.begin_step(5000)
    assert both.live_handles == 3
