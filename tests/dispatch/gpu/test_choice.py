"""What GPU ranks get, and what they are refused with which fix: rules over facts of machines that are not here."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_serve.dispatch import choose
from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.by_batch import ByBatchAllToAll
from moe_serve.dispatch.capabilities import Rows
from moe_serve.dispatch.choose import choose_among_gpus
from moe_serve.dispatch.gpu import facts as gpu_facts
from moe_serve.dispatch.gpu import transport as gpu_transport
from moe_serve.dispatch.gpu.facts import GpuFacts, gather_facts, wire_problem
from moe_serve.dispatch.gpu.transport import make_gpu_slabs
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.errors import CapacityError, ConfigError
from tests.dispatch.gpu.virtual import virtual_regions
from tests.ranks import run_ranks

H100 = GpuFacts(host=1, capability=(9, 0), free_bytes=60 << 30)
A100 = replace(H100, capability=(8, 0))
FAR = replace(H100, host=2, has_rdma=True)
DECODE = BufferLimits(max_tokens_per_rank=128, hidden=7168, topk=8, slots_per_rank=9)
PREFILL = replace(DECODE, max_tokens_per_rank=16384)
CUDA = EpGroup(0, 2, torch.device("cuda", 0), mock.Mock())
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "ranks, limits, wire, rows, transport, why",
    [
        ([H100] * 8, DECODE, "auto", "auto", "nvshmem", "NVSHMEM joins 8 GPU ranks"),
        ([H100] * 8, DECODE, "fp8", "auto", "nvshmem", "NVSHMEM joins"),
        ([H100] * 8, PREFILL, "auto", "auto", "by_batch", "up to 128 tokens per rank use it, larger ones NCCL"),
        ([H100] * 8, replace(PREFILL, max_tokens_per_rank=200), "auto", "masked", "nvshmem", "NVSHMEM joins"),
        ([H100] * 8, DECODE, "auto", "packed", "collective", "dispatch.rows is packed"),
        ([replace(H100, has_rdma=True), FAR], DECODE, "auto", "auto", "nvshmem", "NVSHMEM joins 2"),
        ([H100, FAR], DECODE, "auto", "auto", "collective", "on 2 hosts and rank 0 sees no RDMA device"),
        ([H100, replace(H100, lacks=1)], DECODE, "auto", "auto", "collective", "rank 1: nvshmem4py is not installed"),
        ([replace(H100, lacks=3)] * 2, DECODE, "auto", "auto", "collective", "nvidia-nvshmem-cu13, or set"),
        ([H100, replace(H100, is_linked=False)], DECODE, "auto", "auto", "collective", "rank 1 sees GPUs that cannot"),
        ([A100] * 2, DECODE, "fp8", "auto", "collective", "GPU of rank 0 is sm_80 and e4m3 begins with sm_89"),
        ([A100] * 2, DECODE, "auto", "auto", "nvshmem", "NVSHMEM joins"),
        ([H100] * 2, DECODE, "float32", "auto", "collective", "carries fp8 or the compute dtype"),
        ([replace(H100, free_bytes=1 << 30)] * 8, DECODE, "auto", "auto", "collective", r"tokens would fit"),
    ],
)  # fmt: skip
def test_auto_on_gpus(
    ranks: Sequence[GpuFacts], limits: BufferLimits, wire: str, rows: Rows, transport: str, why: str
) -> None:
    choice = choose_among_gpus(ranks, TransportRequest("auto", limits, BF16, wire, rows))
    assert choice.transport == transport
    assert why in choice.why


def test_sums_by_rank_need_nccl() -> None:
    choice = choose_among_gpus([H100] * 8, TransportRequest("auto", DECODE, BF16, combine="rank_sum"))
    assert choice.transport == "collective"
    with pytest.raises(ConfigError, match=r"rank_sum but cuda_ipc adds results its own way; set dispatch.combine: ord"):
        made("cuda_ipc", [H100] * 2, combine="rank_sum")
    assert not made("auto", [H100] * 2, combine="rank_sum").capabilities.bitwise


def test_fp8_is_refused_below_sm_89_and_the_rank_is_named() -> None:
    below = [wire_problem([H100, replace(H100, capability=c)], BF16, "fp8") for c in ((7, 5), (8, 0), (8, 6))]
    assert all(problem and "rank 1" in problem and "set dispatch.wire_dtype: auto" in problem for problem in below)
    fine = [wire_problem([replace(H100, capability=c)], BF16, "fp8") for c in ((8, 9), (9, 0), (10, 0), (12, 0))]
    assert fine == [None] * 4
    assert wire_problem([A100], BF16, "bf16") is None


def make(
    facts: Sequence[GpuFacts], transport: str = "nvshmem", limits: BufferLimits = DECODE, wire: str = "auto"
) -> object:
    with mock.patch.object(gpu_transport, "gather_facts", return_value=facts):
        return make_gpu_slabs(CUDA, TransportRequest(transport, limits, BF16, wire), transport)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([A100] * 2, "nvshmem", DECODE), "low_latency cannot serve here: dispatch.wire_dtype is fp8"),
        (([replace(H100, lacks=2)] * 2, "nvshmem", DECODE), "torch has no Triton bindings .*set dispatch.backend"),
        (
            ([H100, FAR], "cuda_ipc", DECODE),
            "cuda_ipc cannot serve here: .* rank 1 is on another host than rank 0",
        ),
        (
            ([H100, replace(H100, is_linked=False)], "cuda_ipc", DECODE),
            "rank 1 sees GPUs .* CUDA_VISIBLE_DEVICES, or",
        ),
    ],
)
def test_what_cannot_serve_is_refused_by_name_with_its_fix(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(*arguments, wire="fp8")


def test_buffers_that_a_gpu_has_no_room_for_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(
        CapacityError, match=r"for 16384 tokens per rank .* lower dispatch.max_tokens_per_rank to (\d+)"
    ):
        make([H100, replace(H100, free_bytes=20 << 30)], limits=PREFILL)


def test_one_rank_has_nobody_to_join() -> None:
    alone = replace(CUDA, num_ranks=1, process_group=None)
    with pytest.raises(ConfigError, match=r"joins several ranks, but .* is 1; set dispatch.backend: auto"):
        make_all_to_all(alone, TransportRequest("low_latency", DECODE, BF16))


def test_building_inside_a_graph_capture_is_refused() -> None:
    from moe_serve.dispatch.gpu.region import Region

    triton_ranks = pytest.importorskip("moe_serve.dispatch.gpu.launch_triton").SlabRanks
    regions = virtual_regions(Region(2, 1, 2, 32, 1, value_bytes=2, result_value_bytes=2), torch.device("cpu"))
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    with mock.patch.object(torch.cuda, "is_available", return_value=True), capturing:
        with pytest.raises(ConfigError, match="cannot be made while a CUDA graph is captured; build the transport and"):
            make([H100] * 2)
        with pytest.raises(ConfigError, match="captured"):
            make([H100] * 2, "cuda_ipc")
        with pytest.raises(ConfigError, match="captured"):
            triton_ranks(regions, BF16)


def made(backend: str, facts: Sequence[GpuFacts], limits: BufferLimits = DECODE, **changes: Any) -> AnyAllToAll:
    """What make_all_to_all gives on GPUs that are not here; regions are never made."""
    with (
        mock.patch.object(choose, "gather_facts", return_value=facts),
        mock.patch.object(gpu_transport, "gather_facts", return_value=facts),
        mock.patch.object(gpu_transport, "make_ranks") as make_ranks,
    ):
        make_ranks.return_value.region.num_queues = 2
        transport = make_all_to_all(CUDA, TransportRequest(backend, limits, BF16, **changes))
    made_for = [call.args[0].max_tokens for call in make_ranks.call_args_list]
    assert all(tokens <= 16384 for tokens in made_for)
    transport.made_for = made_for  # type: ignore[attr-defined]
    return transport


def test_low_latency_on_gpus_is_nvshmem() -> None:
    transport = made("low_latency", [H100] * 2)
    assert transport.note == "Triton kernels over NVSHMEM, masked slabs"
    assert transport.capabilities.bitwise
    assert made("cuda_ipc", [H100] * 2).note.startswith("Triton kernels over CUDA IPC")


def test_auto_gives_both_ways_and_the_small_one_is_sized_for_decode() -> None:
    transport = made("auto", [H100] * 2, PREFILL)
    assert isinstance(transport, ByBatchAllToAll)
    assert transport.capabilities.bitwise, "steps of either way have the same bits"
    assert transport.note.startswith("up to 128 tokens: Triton kernels over NVSHMEM")
    assert transport.made_for == [128]  # type: ignore[attr-defined]
    assert type(made("auto", [replace(H100, lacks=1)] * 2)).__name__ == "CollectiveAllToAll"


@pytest.mark.parametrize(
    "backend, rows, message",
    [
        ("low_latency", "packed", "rows is packed but low_latency gives masked slabs only; set dispatch.rows: auto"),
        ("cuda_ipc", "packed", "rows is packed but cuda_ipc"),
        ("collective", "masked", "rows is masked but collective does not give masked slabs for every step"),
    ],
)
def test_a_form_of_rows_that_a_transport_does_not_give_is_refused(backend: str, rows: Rows, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(backend, [H100] * 2, rows=rows)


def test_masked_rows_are_refused_where_auto_takes_a_transport_without_them() -> None:
    with pytest.raises(ConfigError, match="rows is masked but collective"):
        made("auto", [replace(H100, lacks=1)] * 2, rows="masked")


def test_gpu_transports_are_refused_on_cpus() -> None:
    with pytest.raises(ConfigError, match=r"cuda_ipc runs on GPUs only; set dispatch.backend: auto"):
        make_all_to_all(EpGroup(0, 2, torch.device("cpu")), TransportRequest("cuda_ipc", DECODE, BF16))


def check_gathering(rank: int, group: EpGroup) -> list[GpuFacts]:
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, rank)),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(1000 + rank, 5000)),
        mock.patch.object(gpu_facts, "nvshmem_lacks", return_value=rank),
        mock.patch.object(gpu_facts, "unlinked_pairs", return_value=((0, 1),) if rank else ()),
        mock.patch.object(gpu_facts, "rdma_devices", return_value=("mlx5_0",) if rank else ()),
    ):
        return gather_facts(group)


def test_every_rank_learns_the_facts_of_all() -> None:
    first, second = run_ranks(2, check_gathering)
    assert first == second
    host = gpu_facts.host_number()
    assert first == [GpuFacts(host, (9, 0), 1000, 0, True, False), GpuFacts(host, (9, 1), 1001, 1, False, True)]


def test_this_machine_can_be_asked() -> None:
    assert gpu_facts.nvshmem_lacks((9, 0)) in range(len(gpu_facts.NVSHMEM_LACKS))
    assert gpu_facts.unlinked_pairs() == () or torch.cuda.is_available()
