"""Low-latency dispatch and combine over virtual ranks: every row arrives once, in its place, and returns."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.gpu.region import Region
from moe_serve.kernels.quantised import dequantize_reference, quantize_reference
from moe_serve.kernels.rows import weighted_sum_reference
from tests.dispatch.gpu.segmented import segment_rows, slab_reference
from tests.kernels.conftest import RunCheck
from tests.kernels.data import assert_equal_bits, randn

ROUTINGS = ["random", "one slot", "none", "repeated", "no tokens"]


def make_ids(routing: str, num_ranks: int, num_tokens: int, topk: int, num_slots: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_ranks, num_tokens, num_slots, generator=generator).argsort(-1)[:, :, :topk]
    match routing:
        case "random":
            ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        case "one slot":
            ids[:, :, 1:], ids[:, :, 0] = -1, num_slots - 1
        case "none":
            ids[:] = -1
        case "repeated":
            ids[:, :, -1] = ids[:, :, 0]
        case "no tokens":
            ids = ids[:, :0]
    return ids


def make_ranks(device: str, region: Region, dtype: torch.dtype, **options: object) -> object:
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from tests.dispatch.gpu.virtual import virtual_regions

    ranks = SlabRanks(virtual_regions(region, torch.device(device)), dtype, **options)
    for slab in ranks._slabs:  # poison: what is not written must not look like a row
        slab.x.view(torch.uint8).fill_(255)
        slab.origin.fill_(-1)
    return ranks


def check_round_trip(
    device: str, routing: str, num_ranks: int, slots_per_rank: int, hidden: int, topk: int, wire: str, stages: bool,
    max_tokens: int = 3, turns: int = 3,
) -> None:  # fmt: skip
    region = Region(
        num_ranks, slots_per_rank, max_tokens, hidden, topk, value_bytes=1 if wire == "fp8" else 2,
        result_value_bytes=2, stages=stages,
    )  # fmt: skip
    ranks = make_ranks(device, region, torch.bfloat16, max_spins=4)
    num_slots = num_ranks * slots_per_rank
    for turn in range(turns):  # the same queue again: rows and flags of earlier rounds lie in the buffers
        x = randn(device, num_ranks, max_tokens, hidden, seed=turn)
        ids = make_ids(routing, num_ranks, max_tokens, topk, num_slots, seed=turn)
        x = x[:, : ids.shape[1]]
        weights = randn(device, *ids.shape, dtype=torch.float32, seed=turn + 10)
        weights[ids.to(device) < 0] = torch.nan  # never read
        sent = ranks.dispatch_send(x, ids.to(device), queue=turn % 2)
        slabs = ranks.dispatch_receive(sent)
        wired = x.cpu()
        if wire == "fp8":
            wired = torch.stack([dequantize_reference(*quantize_reference(row), torch.bfloat16) for row in x.cpu()])
        expected = slab_reference(list(wired), list(ids), num_slots)
        for rank in range(num_ranks):
            for slot in range(slots_per_rank):
                rows = slabs.x[rank, slot, : len(expected[rank][slot])]
                assert slabs.rows_per_slot[rank, slot] == len(rows)
                assert_equal_bits(rows, expected[rank][slot])

        # Each slot multiplies by its own number, so a result from the wrong expert shows.
        factor = torch.arange(1, num_slots + 1, device=device).view(num_ranks, slots_per_rank, 1, 1)
        results = (slabs.x.float() * factor).bfloat16()
        staged = ranks.staged[sent.queue]
        assert (staged is not None) == stages
        if stages and turn != 1:  # as experts do, which write there; others copy
            results = staged.copy_(results)
        ranks.combine_send(sent, results)
        out = ranks.combine_receive(sent, weights)
        for rank in range(num_ranks):
            outputs = (wired[rank][:, None].float() * (ids[rank].clamp(min=0) + 1)[:, :, None]).bfloat16()
            index = torch.where(ids[rank] < 0, -1, torch.arange(ids[rank].numel()).view(ids[rank].shape))
            home = weighted_sum_reference(outputs.flatten(0, 1), index, weights[rank].cpu())
            assert_equal_bits(out[rank], home)
        assert (ranks.late == 0).all()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_arrive_by_slot_and_source_and_return_in_topk_order(on_device: RunCheck, routing: str) -> None:
    on_device(check_round_trip, routing, 2, 2, 136, 3, "bf16", False)


@pytest.mark.parametrize("wire, stages", [("fp8", False), ("bf16", True), ("fp8", True)])
def test_every_wire_and_both_ways_of_sending_give_the_same_rows(on_device: RunCheck, wire: str, stages: bool) -> None:
    on_device(check_round_trip, "random", 2, 2, 264, 2, wire, stages)


def test_one_rank_with_one_slot_works(on_device: RunCheck) -> None:
    on_device(check_round_trip, "random", 1, 1, 16, 1, "bf16", False)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_eight_ranks_of_production_width(routing: str, wire: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_round_trip("cuda", routing, 8, 36, 7168, 8, wire, False)


def check_many_tokens(device: str) -> None:
    import triton.language as tl

    from moe_serve.dispatch.gpu import launch_triton, send_triton

    shape, num_tokens, few = ("repeated", 1, 3, 16, 2, "bf16", False), 1300, send_triton.TOKENS_COUNTED
    if device == "cpu":  # the interpreter takes minutes for so many tokens
        num_tokens, few = 9, tl.constexpr(4)
    with mock.patch.object(send_triton, "TOKENS_COUNTED", few), mock.patch.object(launch_triton, "TOKENS_COUNTED", few):
        check_round_trip(device, *shape, num_tokens, 1)


def test_more_tokens_than_one_program_looks_through_take_the_same_places(on_device: RunCheck) -> None:
    on_device(check_many_tokens)


def check_counts(device: str, num_tokens: int) -> None:
    from moe_serve.dispatch.gpu.send_triton import TOKENS_COUNTED

    region = Region(4, 5, num_tokens, 16, 3, value_bytes=2, result_value_bytes=2)
    ranks = make_ranks(device, region, torch.bfloat16)
    ids = make_ids("random", 4, num_tokens, 3, 20)
    ids[:, ::7, -1] = ids[:, ::7, 0]
    before = ranks._count_before(ids.to(device).contiguous())
    assert (before is None) == (num_tokens <= TOKENS_COUNTED.value)
    if before is not None:
        ends = [*range(0, num_tokens, TOKENS_COUNTED.value), num_tokens]
        expected = [[segment_rows(each[:end], 20)[1].tolist() for end in ends] for each in ids]
        assert before.tolist() == expected


@pytest.mark.parametrize("num_tokens", [512, 513, 1300])
def test_counts_up_to_every_block_of_tokens_are_those_of_the_ids(on_device: RunCheck, num_tokens: int) -> None:
    on_device(check_counts, num_tokens)


def check_two_in_flight(device: str) -> None:
    region = Region(2, 1, 2, 32, 1, value_bytes=2, result_value_bytes=2)
    ranks = make_ranks(device, region, torch.bfloat16, max_spins=4)
    ids = torch.tensor([[[1], [0]], [[0], [1]]], device=device)
    ones = torch.ones(2, 2, 1, device=device)
    for turn in range(2):
        inputs = [randn(device, 2, 2, 32, seed=2 * turn + queue) for queue in range(2)]
        sent = [ranks.dispatch_send(inputs[queue], ids, queue) for queue in range(2)]
        for queue in range(2):
            ranks.combine_send(sent[queue], ranks.dispatch_receive(sent[queue]).x)
        for queue in range(2):
            assert torch.equal(ranks.combine_receive(sent[queue], ones), inputs[queue])


def test_two_handles_in_flight_do_not_meet(on_device: RunCheck) -> None:
    on_device(check_two_in_flight)


def check_missing_peer(device: str) -> None:
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from moe_serve.dispatch.gpu.symmetric import SymmetricRegions
    from tests.dispatch.gpu.virtual import virtual_regions

    region = Region(2, 1, 2, 32, 1, value_bytes=2, result_value_bytes=2)
    both = virtual_regions(region, torch.device(device))
    alone = SlabRanks(SymmetricRegions(region, both.peers, 0, 1, both.memory), torch.bfloat16, max_spins=3)
    sent = alone.dispatch_send(randn(device, 1, 2, 32), torch.tensor([[[1], [0]]], device=device))
    slabs = alone.dispatch_receive(sent)  # ends, although rank 1 never sends
    assert alone.late.tolist() == [[0, 1]]
    assert slabs.rows_per_slot.tolist() == [[1]]
    alone.combine_send(sent, slabs.x)
    alone.combine_receive(sent, torch.ones(1, 2, 1, device=device))
    assert alone.late.tolist() == [[0, 1]]


def test_a_rank_that_never_sends_is_named_and_nobody_hangs(on_device: RunCheck) -> None:
    on_device(check_missing_peer)


def check_canaries(device: str) -> None:
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from moe_serve.dispatch.gpu.symmetric import SymmetricRegions

    region = Region(2, 2, 2, 40, 2, value_bytes=1, result_value_bytes=2, stages=True)
    size = region.region_bytes + 256
    memory = torch.full((2, size), 0xA5, dtype=torch.uint8, device=device)
    memory[:, 128:-128] = 0
    peers = memory.data_ptr() + 128 + torch.arange(2, device=device) * size
    ranks = SlabRanks(SymmetricRegions(region, peers, 0, 2, memory), torch.bfloat16, max_spins=4)
    for queue in range(2):
        sent = ranks.dispatch_send(randn(device, 2, 2, 40), torch.tensor([[[3, 0]] * 2] * 2, device=device), queue)
        ranks.combine_send(sent, ranks.dispatch_receive(sent).x)
        ranks.combine_receive(sent, torch.ones(2, 2, 2, device=device))
    assert (memory[:, :128] == 0xA5).all()
    assert (memory[:, -128:] == 0xA5).all()


def test_nothing_is_written_outside_a_region(on_device: RunCheck) -> None:
    on_device(check_canaries)


@pytest.mark.gpu
def test_a_captured_graph_replays_fresh_rounds() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    region = Region(4, 4, 8, 256, 4, value_bytes=1, result_value_bytes=2)
    ranks = make_ranks("cuda", region, torch.bfloat16)
    x, weights = torch.empty(4, 8, 256, dtype=torch.bfloat16, device="cuda"), torch.rand(4, 8, 4, device="cuda")
    ids = make_ids("random", 4, 8, 4, 16).cuda()

    def step() -> Tensor:
        sent = ranks.dispatch_send(x, ids)
        ranks.combine_send(sent, ranks.dispatch_receive(sent).x)
        return ranks.combine_receive(sent, weights)

    x.copy_(randn("cuda", 4, 8, 256))
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for turn in range(5):
        x.copy_(randn("cuda", 4, 8, 256, seed=turn))
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, step())


def test_segment_rows_count_earlier_tokens_of_the_same_slot() -> None:
    ids = torch.tensor([[2, 0], [2, -1], [0, 2], [1, 1]])
    row, counts = segment_rows(ids, 4)
    assert row.tolist() == [[0, 0], [1, -1], [1, 2], [0, 0]]  # the repeated slot shares its row
    assert counts.tolist() == [2, 1, 3, 0]


def test_region_parts_do_not_overlap_and_are_aligned() -> None:
    for stages in (False, True):
        region = Region(3, 5, 7, 200, 6, 1, 2, stages)
        starts = [region.counts_at, region.done_at, region.arrived_at, region.result_arrived_at, region.rows_at,
                  region.result_rows_at, region.staged_at, region.result_staged_at, region.queue_bytes]  # fmt: skip
        assert starts == sorted(starts)
        assert all(start % 128 == 0 for start in starts)
        assert region.row_bytes % 16 == 0
        assert region.scales_at % 16 == 0
        assert region.result_rows_at - region.rows_at >= 5 * 3 * 7 * region.row_bytes


def check_contract(device: str, dtype_name: str) -> None:
    from moe_serve.dispatch.base import BufferLimits, EpGroup
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from moe_serve.dispatch.gpu.region import gpu_region
    from moe_serve.dispatch.gpu.transport import GpuSlabAllToAll
    from moe_serve.dispatch.local import LocalAllToAll
    from moe_serve.dispatch.wire import make_wire
    from tests.dispatch.gpu.virtual import virtual_regions

    dtype = getattr(torch, dtype_name)
    region = gpu_region(1, BufferLimits(4, 136, 2, 3), dtype, "fp8", stages=True)
    ranks = SlabRanks(virtual_regions(region, torch.device(device)), dtype, max_spins=4)
    low_latency = GpuSlabAllToAll(ranks, EpGroup(0, 1, torch.device(device)))
    local = LocalAllToAll(3, make_wire("fp8", dtype))
    x, ids = randn("cpu", 3, 136, dtype=dtype), torch.tensor([[2, 0], [-1, 2], [1, 2]])
    weights = randn("cpu", 3, 2, dtype=torch.float32)
    for _ in range(2):
        got = low_latency.dispatch(x.to(device), ids.to(device)).wait()
        expected = local.dispatch(x, ids).wait()
        filled = torch.cat([slab[:n] for slab, n in zip(got.rows.x, got.rows.rows_per_slot.tolist(), strict=True)])
        assert_equal_bits(filled, expected.rows.x)
        home = low_latency.combine(got.rows.x, weights.to(device), got.handle).wait()
        assert_equal_bits(home, local.combine(expected.rows.x, weights, expected.handle).wait())
        low_latency.end_step()
        low_latency.check_step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gpu_transport_gives_the_bits_of_the_local_one(on_device: RunCheck, dtype: str) -> None:
    on_device(check_contract, dtype)


def layers(transport, hidden, ids, weights):
    """Rows through layers that take turns as MoeLayer does, with experts that multiply by three."""
    for _ in range(3):
        sent = transport.dispatch(hidden, ids)
        yield
        arrived = sent.wait()
        sent = transport.combine(arrived.rows.x * 3, weights, arrived.handle)
        yield
        hidden = sent.wait()
    return hidden


def check_halves(device: str) -> None:
    from moe_serve.dispatch.base import BufferLimits, EpGroup
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from moe_serve.dispatch.gpu.region import gpu_region
    from moe_serve.dispatch.gpu.transport import GpuSlabAllToAll
    from moe_serve.dispatch.local import LocalAllToAll
    from moe_serve.dispatch.wire import make_wire
    from moe_serve.ep.moe_layer import take_turns
    from tests.dispatch.gpu.virtual import virtual_regions

    region = gpu_region(1, BufferLimits(4, 136, 2, 3), torch.float32, "auto", stages=True)
    ranks = SlabRanks(virtual_regions(region, torch.device(device)), torch.float32, max_spins=4)
    low_latency = GpuSlabAllToAll(ranks, EpGroup(0, 1, torch.device(device)))
    x, ids = randn("cpu", 6, 136, dtype=torch.float32), torch.tensor([[2, 0], [-1, 2], [1, 2], [0, 1], [2, 1], [0, -1]])
    weights = randn("cpu", 6, 2, dtype=torch.float32)
    results = []
    for num_halves, transport, where in (
        (2, low_latency, device),
        (1, LocalAllToAll(3, make_wire("auto", torch.float32)), "cpu"),
    ):
        parts = zip(*(part.to(where).tensor_split(num_halves) for part in (x, ids, weights)), strict=True)
        results.append(torch.cat(take_turns([layers(transport, *part) for part in parts])))
    low_latency.end_step()
    low_latency.check_step()
    assert_equal_bits(*results)


def test_halves_over_the_gpu_transport_have_the_bits_of_a_whole_batch_over_the_local_one(on_device: RunCheck) -> None:
    on_device(check_halves)


@pytest.mark.slow
def test_eight_virtual_ranks_in_one_process(on_device: RunCheck) -> None:
    on_device(check_round_trip, "random", 8, 1, 16, 2, "bf16", False)


@pytest.mark.gpu
def test_the_same_step_gives_the_same_bits_every_time() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    region = Region(8, 36, 32, 7168, 8, value_bytes=1, result_value_bytes=2)
    ranks = make_ranks("cuda", region, torch.bfloat16)
    x, ids = randn("cuda", 8, 32, 7168), make_ids("random", 8, 32, 8, 288).cuda()
    weights = torch.rand(8, 32, 8, device="cuda")
    first = None
    for turn in range(20):
        sent = ranks.dispatch_send(x, ids, queue=turn % 2)
        ranks.combine_send(sent, ranks.dispatch_receive(sent).x)
        out = ranks.combine_receive(sent, weights)
        first = out if first is None else first
        assert torch.equal(out, first)
    assert (ranks.late == 0).all()
