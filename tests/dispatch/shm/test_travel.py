from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.shm.transport import make_shm
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import find_cpu_library
from moe_serve.kernels.cpu.packed import gate_up_size, packed_size
from tests.dispatch.contract import Scenario
from tests.ranks import run_ranks

WIDTH = 40
SCENARIOS = [
    Scenario((0, 0), 2, 2, 16),
    Scenario((1, 0), 4, 3, 512, seed=1),
    Scenario((5, 64), 4, 3, 36, seed=2, gate="masked"),
    Scenario((7, 0, 30), 3, 1, 64, seed=3, gate="one_slot"),
    Scenario((3, 2), 2, 4, 20, seed=4, gate="none"),
]
pytestmark = pytest.mark.skipif(find_cpu_library() is None, reason="needs a C compiler")


def draw_experts(rank: int, slots: int, hidden: int) -> PackedExperts:
    draw = torch.Generator().manual_seed(rank)
    gate_up = torch.randn(slots, gate_up_size(WIDTH, hidden), generator=draw)
    return PackedExperts(gate_up, torch.randn(slots, packed_size(hidden, WIDTH), generator=draw), hidden, WIDTH)


def run_both(rank: int, group: EpGroup, scenario: Scenario) -> None:
    transport = make_shm(group, scenario.request("shm", cpu_kernels=True))
    hidden, ids, weights = scenario.inputs(rank)
    experts = draw_experts(rank, scenario.slots_per_rank, scenario.hidden)

    def in_steps() -> Tensor:
        arrived: Any = transport.dispatch(hidden, ids).wait()
        out = packed_ffn(arrived.rows.x, arrived.rows.rows_per_slot, experts, arrived.out)
        return transport.combine(out, weights, arrived.handle).wait()

    def in_one_call() -> Tensor:
        out = torch.full_like(hidden, float("nan"))
        assert transport.travel(hidden, ids, weights, experts, out)
        return out

    expected = in_steps()
    for number in range(7):
        # From the third on, ranks differ in which of both they do.
        make = in_steps if number > 2 and (number + rank) % 2 else in_one_call
        assert torch.equal(make(), expected), f"call {number}"
    if scenario.tokens[rank]:
        with pytest.raises(IndexError, match="slots"):
            transport.travel(hidden, torch.full_like(ids, scenario.num_slots), weights, experts, hidden)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_one_call_gives_the_bits_of_dispatch_experts_and_combine_and_ranks_may_mix_both(scenario: Scenario) -> None:
    run_ranks(scenario.num_ranks, run_both, scenario)


def refuses(rank: int, group: EpGroup) -> list[bool]:
    scenario = Scenario((2, 2), 2, 2, 16)
    hidden, ids, weights = scenario.inputs(rank)
    experts = draw_experts(rank, 2, 16)
    requests = [
        scenario.request("shm"),
        scenario.request("shm", cpu_kernels=True, compiled=False),
        scenario.request("shm", cpu_kernels=True, combine="rank_sum"),
        scenario.request("shm", cpu_kernels=True, wire_dtype="bf16"),
        scenario.request("shm", cpu_kernels=True, rows="masked"),
    ]
    return [make_shm(group, request).travel(hidden, ids, weights, experts, hidden) for request in requests]


def test_other_forms_of_rows_and_sums_take_the_way_in_steps() -> None:
    assert run_ranks(2, refuses) == [[False] * 5] * 2
