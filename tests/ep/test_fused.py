import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import barrier
from moe_serve.dispatch.shm.transport import make_shm
from moe_serve.ep.fused import make_fused
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.ep.pass_recorder import PassRecorder
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PeerError
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import find_cpu_library
from moe_serve.kernels.cpu.packed import gate_up_size, packed_size
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import COMPILED, FAST
from moe_serve.kernels.part_clock import PartClock
from tests.dispatch.contract import Scenario
from tests.dispatch.hosts.pretended import on_hosts
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
    fused = make_fused(transport, PartClock())
    hidden, ids, weights = scenario.inputs(rank)
    experts = draw_experts(rank, scenario.slots_per_rank, scenario.hidden)

    def in_steps() -> Tensor:
        arrived: Any = transport.dispatch(hidden, ids).wait()
        out = packed_ffn(arrived.rows.x, arrived.rows.rows_per_slot, experts, arrived.out)
        return transport.combine(out, weights, arrived.handle).wait()

    def in_one_call() -> Tensor:
        out = torch.full_like(hidden, float("nan"))
        fused.bind(hidden, ids, weights, experts, out)(len(hidden))
        return out

    expected = in_steps()
    for number in range(7):
        # From the third on, ranks differ in which of both they do.
        make = in_steps if number > 2 and (number + rank) % 2 else in_one_call
        assert torch.equal(make(), expected), f"call {number}"
    if scenario.tokens[rank]:
        with pytest.raises(IndexError, match="slots"):
            fused.bind(hidden, torch.full_like(ids, scenario.num_slots), weights, experts, hidden)(len(hidden))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_one_call_gives_the_bits_of_dispatch_experts_and_combine_and_ranks_may_mix_both(scenario: Scenario) -> None:
    run_ranks(scenario.num_ranks, run_both, scenario)


def run_on_hosts(rank: int, group: EpGroup, scenario: Scenario, hosts: tuple[int, ...]) -> None:
    linked = on_hosts(group, hosts)
    run_both(rank, linked, scenario)
    barrier(group.process_group)  # until the last acknowledgement has come
    assert linked.link is not None
    linked.link.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_one_call_carries_rows_to_other_hosts_too(scenario: Scenario) -> None:
    hosts = (0, 1) if scenario.num_ranks == 2 else (0, 1, 1)
    run_ranks(scenario.num_ranks, run_on_hosts, scenario, hosts)


def run_with_shared_cores(rank: int, group: EpGroup, scenario: Scenario) -> None:
    """As run_both, with two threads for each rank, whatever the number of cores; rank 1 is late once."""
    library = find_cpu_library()
    assert library is not None
    library.set_threads(2)
    with patch("moe_serve.dispatch.shm.transport.are_shared", lambda *_: True):
        run_both(rank, group, scenario)
        transport = make_shm(group, scenario.request("shm", cpu_kernels=True))
    hidden, ids, weights = scenario.inputs(rank)
    experts = draw_experts(rank, scenario.slots_per_rank, scenario.hidden)
    fused = make_fused(transport, PartClock())
    barrier(group.process_group)
    if rank == 1:
        time.sleep(0.05)
    fused.bind(hidden, ids, weights, experts, hidden)(len(hidden))
    assert rank != 0 or 0.001 < transport.waited_s[1] < 10
    transport.close()
    library.set_threads(1)


@pytest.mark.parametrize("scenario", SCENARIOS[1:4], ids=str)
def test_ranks_that_share_cores_give_the_same_bits_and_count_their_waits(scenario: Scenario) -> None:
    run_ranks(scenario.num_ranks, run_with_shared_cores, scenario)


def misses_a_rank(rank: int, group: EpGroup) -> None:
    scenario = Scenario((2, 2), 2, 2, 16)
    with patch("moe_serve.dispatch.shm.transport.are_shared", lambda *_: True):
        transport = make_shm(group, scenario.request("shm", cpu_kernels=True, deadline_s=0.1))
    hidden, ids, weights = scenario.inputs(rank)
    fused = make_fused(transport, PartClock()).bind(hidden, ids, weights, draw_experts(rank, 2, 16), hidden)
    if rank == 0:
        with pytest.raises(PeerError, match="rank 1 did not arrive in dispatch receive 1 within"):
            fused(len(hidden))
    barrier(group.process_group)
    transport.close()


def test_a_rank_that_lends_its_core_still_finds_that_another_one_is_missing() -> None:
    run_ranks(2, misses_a_rank)


def forms_of(rank: int, group: EpGroup) -> list[str]:
    """Returns the form of a rank's layers over shared memory, for each case of `FORMS`."""
    scenario = Scenario((2, 2), 2, 2, 16)
    spec, forms = RouterSpec(num_logical=4, topk=2), []
    for options, num_redundant, passes, _ in FORMS:
        request = scenario.request("shm", **{"cpu_kernels": True, **options})
        replicas = ReplicaMap(Placement.trivial(1, 4, 2, num_redundant))
        numerics = COMPILED if request.cpu_kernels else FAST
        transport = make_shm(group, request)
        parallel = ExpertParallel(rank, spec, transport, replicas, None, 64, numerics, passes)
        assert (parallel.fused is not None) == (parallel.form == "fused")
        forms.append(parallel.form)
        transport.close()
    return forms


FORMS: list[tuple[dict[str, Any], int, PassRecorder | None, str]] = [
    ({}, 0, None, "fused"),
    ({}, 2, None, "fused"),
    ({}, 0, PassRecorder(1, 4, per_token=False), "rounds"),
    ({"cpu_kernels": False}, 0, None, "rounds"),
    ({"compiled": False}, 0, None, "rounds"),
    ({"combine": "rank_sum"}, 0, None, "rounds"),
    ({"wire_dtype": "bf16"}, 0, None, "rounds"),
    ({"rows": "masked"}, 0, None, "rounds"),
]


def test_recorded_passes_and_other_forms_of_rows_and_sums_take_the_way_in_rounds() -> None:
    assert run_ranks(2, forms_of) == [[form for *_, form in FORMS]] * 2
