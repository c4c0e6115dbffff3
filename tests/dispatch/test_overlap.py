"""Overlap hides time, and changes no bit. Time is counted, not measured."""

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import EpGroup, MaskedRows, PackedRows, make_all_to_all
from moe_serve.dispatch.delayed import CountedClock, DelayedAllToAll
from moe_serve.dispatch.local import LocalAllToAll
from moe_serve.dispatch.overlap import HalfBatch, run_in_turn, run_overlapped
from moe_serve.dispatch.wire import make_wire
from moe_serve.ep.moe_layer import ExpertParallel, make_moe_layer
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.numerics import FAST
from tests.dispatch.contract import Scenario
from tests.ranks import run_ranks

ONE = Scenario((8,), topk=2, slots_per_rank=4, hidden=16)
ROUND_BYTES = 8 * 2 * 16 * 4  # of one half on one way


def halves(scenario: Scenario, rank: int) -> tuple[HalfBatch, HalfBatch]:
    hidden, ids, weights = scenario.inputs(rank)
    middle = len(hidden) // 2
    return HalfBatch(hidden[:middle], ids[:middle], weights[:middle]), HalfBatch(hidden, ids, weights)


def total_s(overlapped: bool, transfer_s: float, compute_s: float) -> tuple[float, tuple[Tensor, ...]]:
    """Returns the counted time of two equal halves, and their results."""
    clock = CountedClock()
    inner = LocalAllToAll(ONE.slots_per_rank, make_wire("auto", ONE.dtype))
    delayed = DelayedAllToAll(inner, bytes_per_s=ROUND_BYTES / transfer_s, clock=clock)
    half = halves(ONE, 0)[1]

    def experts(rows: PackedRows | MaskedRows) -> Tensor:
        clock.spend(compute_s)
        return rows.x * 2

    run = run_overlapped(delayed, half, half, experts) if overlapped else run_in_turn(delayed, (half, half), experts)
    return clock.now_s(), run


@pytest.mark.parametrize("transfer_s, compute_s", [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (1.0, 0.0)])
def test_two_batches_hide_what_can_be_hidden(transfer_s: float, compute_s: float) -> None:
    in_turn_s, plain = total_s(False, transfer_s, compute_s)
    overlapped_s, results = total_s(True, transfer_s, compute_s)
    assert in_turn_s == pytest.approx(2 * (2 * transfer_s + compute_s))
    # Nothing can hide the first half's way out and the last one's way home, nor the longer of what is left.
    floor_s = 2 * transfer_s + max(2 * compute_s, transfer_s + compute_s, 2 * transfer_s)
    assert overlapped_s <= floor_s + 1e-9 or overlapped_s == pytest.approx(floor_s)
    hideable_s = in_turn_s - floor_s
    assert in_turn_s - overlapped_s >= 0.8 * hideable_s
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))


def test_the_shared_expert_computes_while_rows_travel() -> None:
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
        layer(ONE.inputs(0)[0], num_tokens=8, num_chunks=1)
        layer_time[compute_s] = clock.now_s() - started_s
    assert layer_time[0.0] == pytest.approx(4.0)
    assert layer_time[1.0] == pytest.approx(4.0), "one second of the shared expert costs nothing"


def a_layer(transport: DelayedAllToAll, shared):  # type: ignore[no-untyped-def]
    from moe_serve.ep.load_recorder import LoadRecorder
    from moe_serve.ep.routing import RouterSpec

    spec = RouterSpec(num_logical=4, topk=2, scoring="softmax", norm_topk=True)
    placement = Placement.trivial(1, 4, 1)
    group = EpGroup(0, 1, torch.device("cpu"))
    parallel = ExpertParallel(
        0, spec, transport, ReplicaMap(placement), LoadRecorder(1, 4, group, 4), max_tokens_per_rank=8, numerics=FAST
    )
    experts = {"gate_up": torch.randn(4, 16, 16), "down": torch.randn(4, 16, 8)}
    return make_moe_layer(parallel, 0, torch.randn(4, 16), None, experts, shared)


def check_overlap(rank: int, group: EpGroup, backend: str, scenario: Scenario) -> None:
    transport = make_all_to_all(
        backend, group, scenario.slots_per_rank, scenario.dtype,
        max_tokens_per_rank=16, hidden=scenario.hidden, topk=scenario.topk,
    )  # fmt: skip
    first, second = halves(scenario, rank)
    for _ in range(5):
        results = run_overlapped(transport, first, second, lambda rows: rows.x * 3)
        plain = run_in_turn(transport, (first, second), lambda rows: rows.x * 3)
        assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))


@pytest.mark.parametrize("backend", ["collective", "low_latency"])
def test_overlapped_halves_have_the_bits_of_plain_rounds(backend: str) -> None:
    run_ranks(3, check_overlap, backend, Scenario((9, 0, 12), topk=3, slots_per_rank=3, hidden=40, gate="masked"))
