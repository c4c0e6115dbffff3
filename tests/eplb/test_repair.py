"""After a loss every expert gets a second rank where that is possible, and a lost one gets a slot to load into."""

import cProfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from moe_serve.eplb.migration.moves import apply_round
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.repair import ReloadedExpert, give_ranks, with_lost_experts, with_second_slots
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology


def holders(placement: Placement) -> np.ndarray:
    """Returns which rank holds which expert, [L, R, E] bool."""
    table = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1)
    return (table[:, :, :, None] == np.arange(placement.num_logical)).any(axis=2)


def num_changes(old: Placement, new: Placement) -> np.ndarray:
    return (old.physical_to_logical != new.physical_to_logical).sum(axis=1)


def best_by_integer_program(placement: Placement, row: int, live: list[int], num_wanted: int) -> tuple[int, int]:
    """Returns the most ranks that experts can be on, counted up to num_wanted each, and the fewest changes for that.

    Variables: whether rank r holds expert e, and how many of the wanted ranks e has.
    """
    if not live:
        return 0, 0
    num_ranks, num_experts, slots = len(live), placement.num_logical, placement.slots_per_rank
    held = holders(placement)[row][live]
    count = held.sum(axis=0)
    size = num_ranks * num_experts

    def on(r: int, e: int) -> np.ndarray:
        row = np.zeros(size + num_experts)
        row[r * num_experts + e] = 1
        return row

    rules = [LinearConstraint(sum(on(r, e) for e in range(num_experts)), 0, slots) for r in range(num_ranks)]
    for e in range(num_experts):
        total = sum(on(r, e) for r in range(num_ranks))
        total[size + e] = -1
        rules.append(LinearConstraint(total, 0, np.inf if count[e] else 0))
    least = np.zeros(size + num_experts)
    least[size:] = np.minimum(count, num_wanted)
    new = np.concatenate([~held.ravel(), np.zeros(num_experts)]).astype(float)
    covered = np.concatenate([np.zeros(size), np.ones(num_experts)])
    most = np.concatenate([np.ones(size), num_wanted * (count > 0)])
    solved = milp(new - 1000 * covered, constraints=rules, integrality=np.ones(size + num_experts),
                  bounds=(least, most))  # fmt: skip
    assert solved.success
    return round(float(covered @ solved.x)), round(float(new @ solved.x))


@st.composite
def after_a_loss(draw: st.DrawFn) -> tuple[Placement, list[int]]:
    """Returns any placement from which ranks were lost, experts too, with the ranks that are left."""
    num_ranks, slots = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, num_ranks * slots))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        free = num_ranks * slots - num_experts
        more = draw(st.lists(st.integers(-1, num_experts - 1), min_size=free, max_size=free))
        rows.append(draw(st.permutations([*range(num_experts), *more])))
    lost = draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    placement, _ = Placement(np.array(rows), num_experts, num_ranks, version=7).without_ranks(lost)
    return placement, [rank for rank in range(num_ranks) if rank not in lost]


@settings(deadline=None)
@given(after_a_loss(), st.integers(1, 4))
def test_experts_get_as_many_ranks_as_spare_slots_allow(case: tuple[Placement, list[int]], num_wanted: int):
    placement, live = case
    for row in range(placement.num_layers):
        table = placement.physical_to_logical[row].reshape(placement.num_ranks, -1).copy()
        num_changed = give_ranks(table, live, num_wanted)
        after = Placement(table.reshape(1, -1), placement.num_logical, placement.num_ranks, allow_lost=True)
        ranks_of = holders(after)[0].sum(axis=0)
        most, _ = best_by_integer_program(placement, row, live, num_wanted)
        assert np.minimum(ranks_of, num_wanted).sum() == most
        assert (ranks_of >= np.minimum(holders(placement)[row].sum(axis=0), num_wanted)).all()
        assert num_changed == (table.ravel() != placement.physical_to_logical[row]).sum()


@settings(deadline=None)
@given(after_a_loss())
def test_as_many_experts_as_possible_get_a_second_rank_with_the_fewest_changes(case: tuple[Placement, list[int]]):
    placement, left = case
    live, lost = placement.live_ranks.tolist(), set(range(placement.num_ranks)) - set(left)
    repaired = with_second_slots(placement)
    before, after = holders(placement).sum(axis=1), holders(repaired).sum(axis=1)
    assert (after >= np.minimum(before, 2)).all(), "no expert on two ranks is left with one"
    assert not holders(repaired)[:, sorted(lost)].any()
    changes = num_changes(placement, repaired)
    for row in range(placement.num_layers):
        assert (np.minimum(after[row], 2).sum(), changes[row]) == best_by_integer_program(placement, row, live, 2)
    assert (repaired is placement) == (not changes.any())
    assert with_second_slots(repaired) is repaired, "and a second time there is nothing left to do"
    if (before > 0).all():
        migration = plan_migration(placement, repaired, Topology(1, placement.num_ranks), relabel="exact")
        for each in migration.rounds:
            placement = apply_round(placement, each)


@settings(deadline=None)
@given(after_a_loss())
def test_every_lost_expert_gets_a_slot_where_there_are_enough(case: tuple[Placement, list[int]]):
    placement, live = case
    lost = set(range(placement.num_ranks)) - set(live)
    if len(live) * placement.slots_per_rank < placement.num_logical:
        with pytest.raises(PlacementError, match=f"the {len(live)} ranks that are left have"):
            with_lost_experts(placement, lost)
        return
    full, reloaded = with_lost_experts(placement, lost)
    assert full.replica_count.all()
    assert not full.allow_lost
    assert full.version == placement.version + 1
    assert not holders(full)[:, sorted(lost)].any()
    gone = np.argwhere(placement.replica_count == 0).tolist()
    assert [[each.layer_row, each.expert] for each in reloaded] == gone, "each once"
    assert num_changes(placement, full).sum() == len(gone), "and nothing else changes"
    for each in reloaded:
        assert full.physical_to_logical[each.layer_row, each.slot] == each.expert


def test_a_second_rank_is_made_by_moving_another_expert_where_that_is_the_only_way():
    """Expert 0 is on rank 0, where the only spare slot is: expert 1 moves there from rank 1."""
    placement = Placement(np.array([[0, -1, 1, 2, 1, 2]]), 3, 3)
    repaired = with_second_slots(placement)
    assert num_changes(placement, repaired) == 2
    assert (holders(repaired).sum(axis=1) == 2).all()


def test_the_work_after_a_loss_is_a_few_calls_for_each_expert_of_a_large_model():
    """It runs beside the steps of the leader. A count of calls does not depend on the machine, as a time would."""
    layers, experts, ranks, slots = 58, 256, 32, 9  # 23 slots for the second replicas of nearly 256 experts
    random = np.random.default_rng(0)
    rows = [
        random.permutation(np.concatenate([np.arange(experts), random.integers(0, experts, ranks * slots - experts)]))
        for _ in range(layers)
    ]
    placement, _ = Placement(np.array(rows), experts, ranks).without_ranks([3])
    with cProfile.Profile() as profile:
        repaired = with_second_slots(placement)
    assert repaired is not placement
    num_calls = sum(entry.callcount for entry in profile.getstats())
    assert num_calls < 20 * layers * experts, "without a look at all ranks for each expert that finds no slot"


def test_experts_to_reload_take_empty_slots_first_and_are_spread_over_the_ranks():
    rows = [[0, 1, -1, 2, 3, -1, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3, 4, 5]]
    placement, lost = Placement(np.array(rows), 7, 3, allow_lost=True).without_ranks([2])
    assert len(lost) == 3 + 4
    with pytest.raises(
        PlacementError, match=r"2 ranks that are left have 6 slots .* 7 experts; they need 4 slots each"
    ):
        with_lost_experts(placement, [2])
    rows = [[0, 1, -1, 2, 3, -1, 4, 5, 4], [0, 1, 2, 0, 1, 3, 3, 4, 5]]
    placement, _ = Placement(np.array(rows), 6, 3).without_ranks([2])
    full, reloaded = with_lost_experts(placement, [2])
    assert reloaded == [
        ReloadedExpert(0, 4, 2), ReloadedExpert(0, 5, 5),  # the empty ones
        ReloadedExpert(1, 4, 0), ReloadedExpert(1, 5, 4),  # one of two replicas of 0, then of 1, on different ranks
    ]  # fmt: skip
    assert full.physical_to_logical.tolist() == [[0, 1, 4, 2, 3, 5, -1, -1, -1], [4, 1, 2, 0, 5, 3, -1, -1, -1]]
