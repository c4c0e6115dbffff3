"""Sizes of static buffers, and what `auto` chooses."""

import io
import logging
import platform
from dataclasses import replace
from unittest import mock

import pytest
import torch

from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.capabilities import Wanted, problems
from moe_serve.dispatch.choose import choose_among_cpus, choose_transport
from moe_serve.dispatch.gpu.region import gpu_buffer_sizes, gpu_region, most_gpu_tokens
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm.region import buffer_sizes, most_tokens, region_shape
from moe_serve.dispatch.wire import make_wire
from tests.ranks import run_ranks

WIRE = make_wire("bf16", torch.bfloat16)
V3 = BufferLimits(max_tokens_per_rank=128, hidden=7168, topk=8, slots_per_rank=36)


def test_a_hand_worked_size() -> None:
    sizes = buffer_sizes(8, V3, WIRE)
    assert sizes.parts["rows"] == 2 * 8 * 128 * 7168 * 2
    assert sizes.parts["results"] == 2 * 8 * 128 * 8 * 7168 * 2
    assert sum(sizes.parts.values()) <= sizes.total <= sum(sizes.parts.values()) * 1.01
    assert "per rank" in sizes.line


def test_redundant_experts_are_counted() -> None:
    with_redundant = replace(V3, slots_per_rank=1000)
    assert buffer_sizes(8, with_redundant, WIRE).total > buffer_sizes(8, V3, WIRE).total


@pytest.mark.parametrize("free_gib", [0.001, 0.1, 3, 700])
def test_most_tokens_fit_and_one_more_does_not(free_gib: float) -> None:
    free = int(free_gib * 2**30)
    most = most_tokens(8, V3, WIRE, free)
    assert 8 * region_shape(8, replace(V3, max_tokens_per_rank=most + 1), WIRE).num_bytes > free
    assert most == 0 or 8 * region_shape(8, replace(V3, max_tokens_per_rank=most), WIRE).num_bytes <= free


def test_what_a_gpu_needs_is_its_region_and_the_slabs() -> None:
    sizes = gpu_buffer_sizes(8, V3, torch.bfloat16, "fp8", stages=True)
    region = gpu_region(8, V3, torch.bfloat16, "fp8", stages=True)
    assert sizes.parts["slabs"] == 2 * 36 * 8 * 128 * (7168 * 2 + 8)
    assert sizes.parts["rows"] == 2 * 36 * 8 * 128 * region.row_bytes
    assert sizes.total == region.region_bytes + sizes.parts["slabs"]
    assert sum(sizes.parts.values()) <= sizes.total <= sum(sizes.parts.values()) * 1.01
    assert gpu_buffer_sizes(8, V3, torch.bfloat16, "fp8", stages=False).total < sizes.total
    most = most_gpu_tokens(8, V3, torch.bfloat16, "fp8", True, sizes.total)
    assert most == 128
    assert "for 128 tokens per rank" in sizes.line


def check_choices(rank: int, group: EpGroup) -> list[str]:
    def transport(max_tokens: int = 128) -> str:
        limits = replace(V3, hidden=64, max_tokens_per_rank=max_tokens)
        choice = choose_transport(group, TransportRequest("auto", limits, torch.bfloat16))
        assert choice.why
        return choice.transport

    chosen = [transport(), transport(1 << 40)]
    with mock.patch.object(platform, "machine", return_value="aarch64"):
        chosen.append(transport())
    return chosen


def test_auto_takes_shared_memory_on_one_host_and_says_why_not_elsewhere() -> None:
    assert run_ranks(1, check_choices) == [["local"] * 3]
    assert run_ranks(2, check_choices) == [["shm", "collective", "collective"]] * 2


def test_more_ranks_than_a_group_can_have_go_another_way() -> None:
    def choice(num_ranks: int) -> str:
        few = replace(V3, hidden=64, max_tokens_per_rank=1)
        request = TransportRequest("auto", few, torch.bfloat16)
        return choose_among_cpus([0] * num_ranks, 1 << 40, "x86_64", request).transport

    assert (choice(62), choice(63)) == ("shm", "collective")
    (problem,) = problems("shm", Wanted(63, "cpu"))
    assert "joins up to 62 CPU ranks and parallel.num_ranks is 63; set dispatch.backend" in problem


def check_log(rank: int, group: EpGroup, backend: str) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("moe_serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        make_all_to_all(group, TransportRequest(backend, BufferLimits(8, 64, 2, 4), torch.float32))
    finally:
        logger.removeHandler(handler)
    return stream.getvalue()


@pytest.mark.parametrize("backend", ["auto", "low_latency"])
def test_sizes_of_buffers_are_logged_whoever_chose_them(backend: str) -> None:
    for text in run_ranks(2, check_log, backend):
        assert "low-latency buffers for 8 tokens per rank: up to" in text
        assert ("dispatch.backend auto: shm (2 CPU ranks on one host)" in text) == (backend == "auto")


def test_auto_logs_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("moe_serve").propagate = True
    with caplog.at_level(logging.INFO, logger="moe_serve"):
        request = TransportRequest("auto", BufferLimits(8, 64, 2, 4), torch.float32)
        make_all_to_all(EpGroup(0, 1, torch.device("cpu")), request)
    assert "dispatch.backend auto: local (one rank)" in caplog.text
