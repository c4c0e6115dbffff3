"""The contract of the transports between ranks, on real processes (gloo), with 1 to 4 ranks.

Beside our own, these are the checks of DeepEP's tests that apply: counts, data that names its origin, order by source,
combine error, determinism by repetition, unequal and zero tokens, unbalanced gates, -1 entries, two buffers in flight,
bitwise dispatch and bitwise combine.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_serve.dispatch.base import PackedRows
from tests.dispatch.contract import TRANSPORTS, MakeTransport, Scenario, check_scenario, run_check, slots_of_rows

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)
RANKS = pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3, 4])
WIRES = ("auto", "float32", "bf16", "fp8")


def scenario(num_ranks: int, **changes: object) -> Scenario:
    tokens = tuple(5 + 2 * rank for rank in range(num_ranks))
    return Scenario(**{"tokens": tokens, "topk": 3, "slots_per_rank": 3, "hidden": 130, "seed": 1} | changes)  # type: ignore[arg-type]


def check_all(rank: int, make: MakeTransport, scenarios: list[Scenario]) -> None:
    for one in scenarios:
        for with_counts in (False, True):
            check_scenario(rank, make, one, with_counts)


@RANKS
def test_every_wire_and_dtype_carries_rows_there_and_back(transport: str, num_ranks: int) -> None:
    cases = [scenario(num_ranks, wire=wire, dtype=dtype) for wire in WIRES for dtype in (torch.float32, torch.bfloat16)]
    run_check(transport, num_ranks, check_all, cases)


@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
@pytest.mark.parametrize("gate", ["random", "one_slot", "skewed", "masked", "none"])
def test_every_gate_is_served(transport: str, num_ranks: int, gate: str) -> None:
    run_check(transport, num_ranks, check_all, [scenario(num_ranks, gate=gate, topk=k) for k in (1, 4, 16)])


@RANKS
def test_zero_is_a_normal_size(transport: str, num_ranks: int) -> None:
    one_has_some = tuple(4 if rank == num_ranks - 1 else 0 for rank in range(num_ranks))
    one_has_none = tuple(0 if rank == 0 else 3 for rank in range(num_ranks))
    cases = [scenario(num_ranks, tokens=tokens) for tokens in (one_has_some, one_has_none, (0,) * num_ranks)]
    cases += [scenario(num_ranks, slots_per_rank=1, topk=1), scenario(num_ranks, hidden=1)]
    run_check(transport, num_ranks, check_all, cases)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_shape_is_carried(transport: str, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    tokens = data.draw(st.tuples(*[st.integers(0, 12)] * num_ranks))
    one = Scenario(
        tokens=tokens,
        topk=data.draw(st.integers(1, 16)),
        slots_per_rank=data.draw(st.integers(1, 6)),
        hidden=data.draw(st.integers(1, 40)),
        seed=data.draw(st.integers(0, 1000)),
        gate=data.draw(st.sampled_from(["random", "one_slot", "skewed", "masked", "none"])),
        wire=data.draw(st.sampled_from(WIRES)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    run_check(transport, num_ranks, check_all, [one])


def check_origin(rank: int, make: MakeTransport, one: Scenario) -> None:
    """Rows say who sent them: all channels but the last hold the rank, the last one the token."""
    _, ids, _ = one.inputs(rank)
    hidden = torch.full((one.tokens[rank], one.hidden), float(rank - 128))
    hidden[:, -1] = torch.arange(one.tokens[rank])
    arrived = make(one).dispatch(hidden, ids).wait()
    assert isinstance(arrived.rows, PackedRows)
    x = arrived.rows.x
    assert torch.equal(x[:, :-1].amin(1), x[:, :-1].amax(1)), "a row comes from one source"
    slots = slots_of_rows(arrived.rows, rank).tolist()
    named = [(slot, int(row[0]) + 128, int(row[-1])) for slot, row in zip(slots, x, strict=True)]
    assert named == one.placed(rank)


@RANKS
def test_rows_name_their_origin_and_are_ordered_by_slot_then_source_then_token(transport: str, num_ranks: int) -> None:
    run_check(transport, num_ranks, check_origin, scenario(num_ranks, tokens=(20,) * num_ranks, gate="masked"))


def check_counts(rank: int, make: MakeTransport, one: Scenario, num_counts: int) -> None:
    counts = torch.arange(num_counts) + 100 * rank
    gathered = make(one).exchange_counts(counts)
    expected = torch.arange(num_counts) + 100 * torch.arange(one.num_ranks)[:, None]
    assert torch.equal(gathered.wait(), expected)
    assert torch.equal(gathered.wait(), expected), "waiting twice is harmless"


@RANKS
@pytest.mark.parametrize("num_counts", [1, 7, 256])
def test_every_rank_learns_all_counts(transport: str, num_ranks: int, num_counts: int) -> None:
    run_check(transport, num_ranks, check_counts, scenario(num_ranks), num_counts)


def check_two_in_flight(rank: int, make: MakeTransport, cases: list[Scenario]) -> None:
    """Two half-batches as an overlapping caller runs them: both sends are out before the first receive."""
    transport = make(cases[0])
    inputs = [one.inputs(rank) for one in cases]
    sent = [transport.dispatch(hidden, ids) for hidden, ids, _ in inputs]
    arrived = [pending.wait() for pending in sent]
    returning = []
    for one, here, (_, _, weights) in zip(cases, arrived, inputs, strict=True):
        assert isinstance(here.rows, PackedRows)
        assert torch.equal(here.rows.x, one.expected_rows(rank))
        out = one.expert_out(here.rows.x, slots_of_rows(here.rows, rank))
        returning.append(transport.combine(out, weights, here.handle))
    for one, pending in zip(cases, returning, strict=True):
        assert torch.equal(pending.wait(), one.expected_combined(rank))


@RANKS
def test_two_handles_in_flight_do_not_mix(transport: str, num_ranks: int) -> None:
    cases = [scenario(num_ranks, seed=seed, tokens=(4 + seed,) * num_ranks) for seed in (3, 4)]
    run_check(transport, num_ranks, check_two_in_flight, cases)


def check_repeats(rank: int, make: MakeTransport, one: Scenario) -> None:
    first = check_scenario(rank, make, one)
    for _ in range(20):
        again = check_scenario(rank, make, one)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_twenty_repetitions_give_the_same_bits(transport: str, num_ranks: int) -> None:
    run_check(transport, num_ranks, check_repeats, scenario(num_ranks, gate="skewed", wire="fp8"))


def calc_diff(x: Tensor, y: Tensor) -> float:
    """DeepEP's measure: 1 - 2 sum(xy) / sum(x^2 + y^2), with all values shifted by one, in float64."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def check_identity_experts(rank: int, make: MakeTransport, one: Scenario, limit: float) -> None:
    transport = make(one)
    hidden, ids, weights = one.inputs(rank)
    arrived = transport.dispatch(hidden, ids).wait()
    assert isinstance(arrived.rows, PackedRows)
    combined = transport.combine(arrived.rows.x, weights, arrived.handle).wait()
    total = weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
    assert not combined.isnan().any()
    assert calc_diff(hidden.float() * total, combined) < limit


@RANKS
@pytest.mark.parametrize("wire, limit", [("auto", 1e-9), ("bf16", 1e-5), ("fp8", 9e-4)])
def test_round_trip_with_identity_experts_returns_weighted_input(
    transport: str, num_ranks: int, wire: str, limit: float
) -> None:
    one = scenario(num_ranks, tokens=(32,) * num_ranks, topk=8, hidden=512, gate="masked", wire=wire)
    run_check(transport, num_ranks, check_identity_experts, one, limit)


def check_poison(rank: int, make: MakeTransport, one: Scenario) -> None:
    transport = make(one)
    hidden, ids, weights = one.inputs(rank)
    hidden[0] = float("nan")
    hidden[1] = float("inf")
    arrived = transport.dispatch(hidden, ids).wait()
    assert isinstance(arrived.rows, PackedRows)
    out = one.expert_out(arrived.rows.x, slots_of_rows(arrived.rows, rank))
    combined = transport.combine(out, weights, arrived.handle).wait()
    assert torch.equal(combined[2:], one.expected_combined(rank)[2:])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_nan_and_infinity_stay_with_their_token(transport: str, num_ranks: int) -> None:
    run_check(transport, num_ranks, check_poison, scenario(num_ranks, gate="masked"))


def sum_in_rank_order(one: Scenario, rank: int) -> Tensor:
    """The mutation: each rank adds what it has for a token before sending it home, and home adds up the ranks."""
    hidden, ids, weights = one.inputs(rank)
    total = torch.zeros_like(hidden)
    for owner in range(one.num_ranks):
        partial = torch.zeros_like(hidden)
        for k in range(one.topk):
            here = (ids[:, k] // one.slots_per_rank == owner)[:, None]
            out = one.expert_out(hidden, ids[:, k])
            partial = torch.where(here, torch.addcmul(partial, weights[:, k, None], out), partial)
        total = total + partial
    return total


def check_order_matters(rank: int, make: MakeTransport, one: Scenario) -> None:
    _, combined = check_scenario(rank, make, one)
    other = sum_in_rank_order(one, rank)
    assert torch.allclose(other, combined, atol=1e-5), "the same sum"
    assert not torch.equal(other, combined), "in other bits"


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_adding_per_rank_before_sending_results_would_change_bits(transport: str, num_ranks: int) -> None:
    one = scenario(num_ranks, tokens=(16,) * num_ranks, topk=6, hidden=64)
    run_check(transport, num_ranks, check_order_matters, one)


def check_late_counts(rank: int, make: MakeTransport, one: Scenario) -> None:
    """Counts, dispatch and combine of one transport interleave with those of another."""
    first, second = make(one), make(one)
    hidden, ids, _ = one.inputs(rank)
    counting = first.exchange_counts(torch.tensor([rank]))
    sent = second.dispatch(hidden, ids)
    assert counting.wait().flatten().tolist() == list(range(one.num_ranks))
    rows = sent.wait().rows
    assert torch.equal(rows.x, one.expected_rows(rank))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_calls_of_two_transports_interleave(transport: str, num_ranks: int) -> None:
    run_check(transport, num_ranks, check_late_counts, scenario(num_ranks))


class Reversed(Scenario):
    def expected_rows(self, rank: int) -> Tensor:
        return super().expected_rows(rank).flip(0)


def test_the_checks_can_fail(transport: str) -> None:
    with pytest.raises(AssertionError, match="placed order"):
        run_check(transport, 2, check_scenario, Reversed((4, 4), topk=2, slots_per_rank=2, hidden=8))


def check_rank_sums(rank: int, make: MakeTransport, scenarios: list[Scenario], with_counts: bool) -> list[Tensor]:
    results = []
    for one in scenarios:
        transport = make(one, "rank_sum")
        assert not transport.capabilities.bitwise, "the mode says that its bits are its own"
        hidden, ids, weights = one.inputs(rank)
        rows, sums = one.expected_rows(rank), one.expected_rank_sums(rank)
        for _ in range(3):
            arrived = transport.dispatch(hidden, ids, one.slot_counts() if with_counts else None, weights).wait()
            assert torch.equal(arrived.rows.x, rows)
            out = one.expert_out(arrived.rows.x, slots_of_rows(arrived.rows, rank))
            combined = transport.combine(out, weights, arrived.handle).wait()
            assert torch.equal(combined, sums), "within a rank by k, then by rank"
        results.append(combined)
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_fast_mode_adds_on_each_rank_first(transport: str, num_ranks: int) -> None:
    tokens = (7, 0, 12)[:num_ranks]
    scenarios = [Scenario(tokens, 6, 2, 70, gate=gate) for gate in ("random", "one_slot", "none")]
    scenarios += [Scenario(tokens, 6, 2, 70, gate="masked", wire=wire) for wire in ("auto", "bf16", "fp8")]
    scenarios.append(Scenario(tokens, 6, 2, 70, dtype=torch.bfloat16))
    for with_counts in (False, True):
        run_check(transport, num_ranks, check_rank_sums, scenarios, with_counts)


def check_two_sums_in_flight(rank: int, make: MakeTransport, one: Scenario) -> None:
    transport = make(one, "rank_sum")
    hidden, ids, weights = one.inputs(rank)
    sent = [transport.dispatch(scale * hidden, ids, None, weights) for scale in (1, 2)]
    arrived = [pending.wait() for pending in sent]
    going = [transport.combine(a.rows.x, weights, a.handle) for a in arrived]
    once, twice = (pending.wait() for pending in going)
    assert torch.equal(2 * once, twice), "what a handle keeps of its entries is its own"


def test_two_handles_of_the_fast_mode_in_flight(transport: str) -> None:
    run_check(transport, 3, check_two_sums_in_flight, Scenario((5, 9, 0), 4, 3, 33))


def test_the_fast_mode_needs_the_weights_with_the_rows(transport: str) -> None:
    run_check(transport, 1, check_weights_are_needed)


def check_weights_are_needed(rank: int, make: MakeTransport) -> None:
    one = Scenario((3,), 2, 4, 16)
    transport = make(one, "rank_sum")
    with pytest.raises(TypeError, match="dispatch needs the weights"):
        transport.dispatch(*one.inputs(rank)[:2])
