"""The contract of the transports of one rank, in this process."""

from collections.abc import Iterator

import pytest
import torch

from moe_serve.dispatch.capabilities import Combine
from moe_serve.dispatch.local import LocalAllToAll, OneRank
from moe_serve.dispatch.wire import make_wire
from tests.dispatch.contract import MakeTransport, Scenario
from tests.dispatch.test_contract import (
    WIRES,
    check_all,
    check_counts,
    check_origin,
    check_poison,
    check_rank_sums,
    check_two_in_flight,
    check_two_sums_in_flight,
    check_weights_are_needed,
    scenario,
)


def plain(one: Scenario, combine: Combine = "ordered") -> LocalAllToAll:
    return LocalAllToAll(one.slots_per_rank, make_wire(one.wire, one.dtype), combine)


def compiled(one: Scenario) -> OneRank:
    return OneRank(one.slots_per_rank, make_wire(one.wire, one.dtype))


def scenarios() -> Iterator[Scenario]:
    for wire in WIRES:
        yield scenario(1, wire=wire)
    for gate in ("random", "one_slot", "skewed", "masked", "none"):
        for topk in (1, 4, 16):
            yield scenario(1, gate=gate, topk=topk)
    yield from (scenario(1, tokens=(0,)), scenario(1, slots_per_rank=1, topk=1), scenario(1, hidden=1))


@pytest.mark.parametrize("make", [plain, compiled])
def test_one_rank_keeps_the_contract(make: MakeTransport) -> None:
    check_all(0, make, list(scenarios()))
    check_origin(0, make, scenario(1, tokens=(20,), gate="masked"))
    check_counts(0, make, scenario(1), 7)
    check_two_in_flight(0, make, [scenario(1, seed=seed, tokens=(4 + seed,)) for seed in (3, 4)])
    check_poison(0, make, scenario(1, gate="masked"))


def test_the_plain_form_carries_bfloat16_and_adds_in_the_fast_mode() -> None:
    check_all(0, plain, [scenario(1, wire=wire, dtype=torch.bfloat16) for wire in WIRES])
    sums = [Scenario((7,), 6, 2, 70, gate=gate) for gate in ("random", "one_slot", "none")]
    sums += [Scenario((7,), 6, 2, 70, gate="masked", wire=wire) for wire in WIRES]
    for with_counts in (False, True):
        check_rank_sums(0, plain, [*sums, Scenario((7,), 6, 2, 70, dtype=torch.bfloat16)], with_counts)
    check_two_sums_in_flight(0, plain, Scenario((5,), 4, 3, 33))
    check_weights_are_needed(0, plain)
