"""What is particular to the shared-memory transport: no hidden collective, its bounds, its buffers, its two forms."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_serve.dispatch.base import BufferLimits, EpGroup, MaskedRows, PackedRows
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm import transport as shm_transport
from moe_serve.dispatch.shm.memory import Mappings, ShmMemory, check_machine
from moe_serve.dispatch.shm.region import region_shape
from moe_serve.dispatch.shm.transport import ShmAllToAll, make_shm
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import CapacityError, ConfigError, PeerError
from moe_serve.kernels.rows import weighted_sum_reference
from tests.dispatch.contract import Scenario, check_scenario, slots_of_rows
from tests.dispatch.shm import faults
from tests.dispatch.shm.regions import is_overrun, map_anonymous
from tests.ranks import run_ranks, run_virtual_ranks

ONE = Scenario((9, 0, 12), topk=5, slots_per_rank=3, hidden=200, gate="skewed")


def make(group: EpGroup, one: Scenario = ONE, **changes: Any) -> ShmAllToAll:
    return make_shm(group, one.request("shm", 1, **changes))


COLLECTIVES = ("all", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "reduce", "scatter", "send")


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a step over shared memory called torch.distributed")


def check_no_collective(rank: int, group: EpGroup, compiled: bool) -> None:
    transport = make(group, compiled=compiled)
    calls = [name for name in dir(dist) if callable(getattr(dist, name)) and name[0].islower()]
    below = [name for name in dir(dist.ProcessGroup) if name.removeprefix("_").startswith(COLLECTIVES)]
    with (
        mock.patch.multiple(dist, **dict.fromkeys(calls, refuse)),
        mock.patch.multiple(dist.ProcessGroup, **dict.fromkeys(below, refuse)),
    ):
        for barrier in (dist.barrier, group.process_group.barrier):
            with pytest.raises(AssertionError, match="called torch"):
                barrier()
        assert torch.equal(transport.exchange_counts(torch.tensor([rank])).wait()[:, 0], torch.arange(3))
        check_scenario(rank, lambda _: transport, ONE)


@pytest.mark.parametrize("compiled", [True, False])
def test_nothing_hides_behind_torch_distributed(compiled: bool) -> None:
    run_ranks(3, check_no_collective, compiled)


def check_slabs(rank: int, group: EpGroup, one: Scenario, compiled: bool) -> None:
    transport = make(group, one, compiled=compiled, rows="masked")
    for _ in range(3):
        hidden, ids, weights = one.inputs(rank)
        ids = torch.where(ids < 0, -1, (ids[:, :1] + torch.arange(one.topk)) % one.num_slots)  # no slot twice
        arrived = transport.dispatch(hidden, ids).wait()
        rows = arrived.rows
        assert isinstance(rows, MaskedRows)
        assert rows.x.shape == (one.slots_per_rank, group.num_ranks * (max(one.tokens) + 1), one.hidden)
        packed = make_all_to_all(group, one.request("collective")).dispatch(hidden, ids).wait()
        filled = torch.cat([rows.x[slot, :count] for slot, count in enumerate(rows.rows_per_slot)])
        assert torch.equal(filled, packed.rows.x), "the first rows of each slab are those of the packed form"
        for slot, count in enumerate(rows.rows_per_slot):
            rows.x[slot, count:] = float("nan")  # what lies beyond is never read
        combined = transport.combine(rows.x * 2, weights, arrived.handle).wait()
        total = torch.zeros_like(hidden)
        for k in range(one.topk):
            valid = (ids[:, k] >= 0)[:, None]
            total = torch.where(valid, torch.addcmul(total, weights[:, k, None], 2 * hidden), total)
        assert torch.equal(combined, total)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_masked_slabs_hold_the_same_rows(num_ranks: int, compiled: bool) -> None:
    one = Scenario((7, 0, 5)[:num_ranks], topk=3, slots_per_rank=4, hidden=24, gate="masked")
    run_ranks(num_ranks, check_slabs, one, compiled)


def check_waits(rank: int, group: EpGroup) -> list[float]:
    transport = make(group)
    for _ in range(3):
        if rank == 1:
            time.sleep(0.02)
        transport.exchange_counts(torch.zeros(1, dtype=torch.int64)).wait()
    return transport.waited_s


def test_the_wait_matrix_shows_who_is_late() -> None:
    matrix = run_ranks(3, check_waits)
    late = [sum(row[rank] for row in matrix) for rank in range(3)]
    assert late[1] == max(late)
    assert all(matrix[rank][rank] == 0 for rank in range(3))


def check_nothing_left(rank: int, group: EpGroup) -> list[str]:
    transport = make(group)
    check_scenario(rank, lambda _: transport, ONE)
    dist.barrier()
    return [path.name for path in Path("/dev/shm").glob("moe_serve_*_[0-9]") if _mapped(path)]


def _mapped(path: Path) -> bool:
    return str(path) + "\n" in Path("/proc/self/maps").read_text()


def test_segments_have_no_name_once_they_are_mapped() -> None:
    assert run_ranks(3, check_nothing_left) == [[], [], []]


def check_canaries(rank: int, group: EpGroup) -> None:
    full = Scenario((12, 12, 12), topk=5, slots_per_rank=3, hidden=200, gate="one_slot")
    transport = make(group, full, limits=full.request("shm").limits)
    for _ in range(4):
        check_scenario(rank, lambda _: transport, full)
        transport.exchange_counts(torch.ones(transport._shape.max_counts, dtype=torch.int64)).wait()
    dist.barrier()
    assert not any(is_overrun(each) for each in transport._received)
    send_buffer = transport._copier._buffers.send_buffers[rank]
    assert not is_overrun(send_buffer)
    for part, rows in ((transport._received[rank], transport._received[rank].rows), (send_buffer, send_buffer.rows)):
        rows[0].view(-1)[-1:].as_strided((64,), (1,))[1:] = 1  # one byte too far, and more
        assert is_overrun(part), "the check can fail"


def test_full_buffers_are_not_overrun() -> None:
    run_ranks(3, check_canaries)


def check_limits(rank: int, group: EpGroup) -> None:
    transport = make(group)
    wide, ids = torch.zeros(14, 200), torch.zeros(14, 5, dtype=torch.int64)
    with pytest.raises(CapacityError, match=r"14 tokens in one dispatch, buffers hold 13; raise dispatch.max_tokens"):
        transport.dispatch(wide, ids)
    with pytest.raises(CapacityError, match="200 channels and 5 experts"):
        transport.dispatch(wide[:1], torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(IndexError, match="physical id 9 among 9 slots"):
        transport._copier.send_rows(torch.full((1, 5), 9), wide[:1], None, 0, [])
    with pytest.raises(CapacityError, match="buffers hold 4096"):
        transport.exchange_counts(torch.zeros(5000, dtype=torch.int64))
    sent = [transport.dispatch(wide[:2], ids[:2]) for _ in range(2)]
    with pytest.raises(AssertionError, match="a third dispatch while two are in flight"):
        transport.dispatch(wide[:2], ids[:2])
    for pending in sent:
        pending.wait()


def test_limits_are_said_before_anything_is_written() -> None:
    run_ranks(3, check_limits)


def check_too_large(rank: int, group: EpGroup) -> None:
    with pytest.raises(CapacityError, match=r"lower dispatch.max_tokens_per_rank to [1-9][0-9]+, or"):
        make(group, limits=replace(ONE.request("shm").limits, max_tokens_per_rank=1 << 40))


def test_buffers_larger_than_shared_memory_are_refused_on_all_ranks() -> None:
    run_ranks(2, check_too_large)


def test_another_processor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"store order of x86-64 and this is aarch64; set dispatch.backend"):
        check_machine("aarch64")


def check_virtual(rank: int, mappings: Mappings, one: Scenario, compiled: bool) -> None:
    memory = ShmMemory(rank, mappings, watch_processes=False)
    transport = ShmAllToAll(memory, one.request("shm", compiled=compiled))
    for _ in range(3):
        check_scenario(rank, lambda _: transport, one)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("wire", ["auto", "fp8"])
def test_eight_virtual_ranks_in_one_process(wire: str, compiled: bool) -> None:
    one = Scenario((3, 0, 5, 2, 8, 1, 4, 6), topk=4, slots_per_rank=2, hidden=64, wire=wire, gate="masked")
    size = region_shape(8, BufferLimits(8, 64, 4, 2), make_wire(wire, one.dtype)).num_bytes
    run_virtual_ranks(8, check_virtual, map_anonymous(8, size), one, compiled)


def check_rounds(rank: int, mappings: Mappings, num_rounds: int) -> bool:
    """Rows say in which round they were sent: a stale one would show."""
    transport = faults.make_transport(rank, mappings, deadline_s=60)
    num_ranks = len(mappings)
    weights = torch.ones(2, 1)
    for number in range(num_rounds):
        ids = torch.tensor([[(rank + number) % num_ranks * faults.SLOTS], [(rank + 1) % num_ranks * faults.SLOTS]])
        hidden = torch.full((2, faults.HIDDEN), float(number * num_ranks + rank))
        arrived = transport.dispatch(hidden, ids).wait()
        assert isinstance(arrived.rows, PackedRows)
        sources = [s for s in range(num_ranks) for t in (number, 1) if (s + t) % num_ranks == rank]
        assert arrived.rows.x[:, -1].tolist() == [float(number * num_ranks + s) for s in sources], f"round {number}"
        combined = transport.combine(arrived.rows.x + 1, weights, arrived.handle).wait()
        assert combined[0, 0] == hidden[0, 0] + 1, f"round {number}"
    return not any(is_overrun(each) for each in transport._received)


@pytest.mark.parametrize("num_rounds", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_rounds_without_a_stale_read(num_rounds: int) -> None:
    assert all(faults.run_forked(2, check_rounds, faults.regions(2), num_rounds, timeout_s=280).values())


def check_masked(rank: int, mappings: Mappings) -> None:
    transport = faults.make_transport(rank, mappings, deadline_s=1)
    if rank == 2:
        return
    assert transport.membership.regroup({2}) == [0, 1]
    with pytest.raises(PeerError, match="experts of rank 2, which is masked; use a placement without it"):
        transport.dispatch(torch.zeros(1, faults.HIDDEN), torch.tensor([[2 * faults.SLOTS] * faults.TOPK]))
    arrived = transport.dispatch(torch.ones(1, faults.HIDDEN), torch.tensor([[0] * faults.TOPK])).wait()
    assert isinstance(arrived.rows, PackedRows)
    assert slots_of_rows(arrived.rows, rank).shape[0] == (2 * faults.TOPK if rank == 0 else 0)


def test_tokens_for_a_masked_rank_are_refused_and_the_next_step_is_good() -> None:
    faults.run_forked(3, check_masked, faults.regions(3))


@mock.patch.object(shm_transport, "LEAST_BYTES", 0)
def check_in_place(rank: int, group: EpGroup) -> list[bool]:
    """Results may be written into the send_buffer; then they are not copied, and return with the same bits."""
    transport = make(group)
    in_place = []
    for number in range(6):
        hidden, ids, weights = ONE.inputs(rank)
        arrived = transport.dispatch(hidden + number, ids).wait()
        out = ONE.expert_out(arrived.rows.x, slots_of_rows(arrived.rows, rank))
        in_place.append(arrived.out is not None)
        if arrived.out is not None and number != 3:
            assert arrived.out.shape == out.shape
            out = arrived.out.copy_(out)
        combined = transport.combine(out, weights, arrived.handle).wait()
        home = ONE.expert_out((hidden + number).repeat_interleave(ONE.topk, 0), ids.flatten())
        index = torch.arange(ids.numel()).view(ids.shape)
        assert torch.equal(combined, weighted_sum_reference(home, index, weights))
    return in_place


def test_results_written_in_place_return_with_the_same_bits() -> None:
    assert run_ranks(3, check_in_place) == [[shutil.which("cc") is not None] * 6] * 3


@mock.patch.object(shm_transport, "LEAST_BYTES", 0)
def check_order_of_reservations(rank: int, group: EpGroup) -> None:
    one = Scenario((9, 4), topk=5, slots_per_rank=3, hidden=200)
    transport = make(group, one)
    hidden, ids, weights = one.inputs(rank)
    first, second = (transport.dispatch(scale * hidden, ids).wait() for scale in (1, 2))
    if first.out is None or second.out is None:
        return  # the plain form copies
    assert first.out.data_ptr() != second.out.data_ptr()
    results = [arrived.out.copy_(arrived.rows.x) for arrived in (first, second)]
    expected = 2 * transport.combine(results[0], weights, first.handle).wait()
    assert torch.equal(transport.combine(results[1], weights, second.handle).wait(), expected)
    # The other way round, the second takes the buffer in which the results of the first lie.
    first, second = (transport.dispatch(scale * hidden, ids).wait() for scale in (1, 2))
    lies_there = first.out.copy_(first.rows.x)
    transport.combine(second.rows.x.clone(), weights, second.handle).wait()
    with pytest.raises(RuntimeError, match="combine handles in the order of their dispatches"):
        transport.combine(lies_there, weights, first.handle)


def test_results_in_a_buffer_that_another_combine_took_are_refused() -> None:
    run_ranks(2, check_order_of_reservations)


def check_late_reader(rank: int, mappings: Mappings) -> None:
    """Rank 1 reads results while the others go on without it: what it read may be newer, so it must not use it."""
    transport = faults.make_transport(rank, mappings, deadline_s=5)
    copier = transport._copier
    hidden, ids, weights = faults.inputs(0, rank, [0, 1])
    arrived = transport.dispatch(hidden, ids).wait()
    going = transport.combine(arrived.rows.x, weights, arrived.handle)
    if rank == 0:
        going.wait()
        transport.membership.regroup({1})
        return

    def read_late(*args: Any) -> Any:
        while not transport.membership.is_void:
            time.sleep(0.001)
        return add(*args)

    add = copier.add_results
    with mock.patch.object(copier, "add_results", read_late), pytest.raises(PeerError, match="came too late"):
        going.wait()


def test_what_a_rank_reads_after_it_was_masked_is_not_used() -> None:
    faults.run_forked(2, check_late_reader, faults.regions(2))
