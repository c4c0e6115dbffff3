"""Migrations end where they should, over rounds that are each legal, with few bytes over slow links."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.migration.moves import MigrationRound, RoundLimits, SlotMove, apply_round
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.relabel import relabel_ranks
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology
from tests.eplb.loads import same_slots

RELABEL = ("ranks", "nodes", "none", "exact")


def check_migration(old, new, topology, limits=RoundLimits(), relabel="nodes"):
    """Carries the plan out and checks everything that must hold on the way."""
    plan = plan_migration(old, new, topology, limits, relabel)
    now = old
    for migration_round in plan.rounds:
        staged: dict[int, int] = {}
        for move in migration_round.moves:
            if move.src_rank not in (move.dst_rank, -1):
                staged[move.dst_rank] = staged.get(move.dst_rank, 0) + 1
        for ring in local_rings(migration_round):  # needs a spare buffer
            rank = min(ring)[1] // old.slots_per_rank
            staged[rank] = staged.get(rank, 0) + 1
        assert max([migration_round.busiest(), *staged.values()]) <= limits.per_rank
        check_links(migration_round, topology, limits)
        check_local_order(migration_round)
        now = apply_round(now, migration_round)  # raises when an expert is lost
    assert same_slots(now, plan.target)
    assert now.version == plan.target.version == old.version + len(plan.rounds)
    assert same_up_to(plan.target, new, topology, relabel)
    return plan


def check_links(migration_round, topology, limits):
    """No pair of ranks and no node's network carries more than it may."""
    hops = [(m.src_rank, m.dst_rank) for m in migration_round.moves if m.src_rank not in (m.dst_rank, -1)]
    nodes = [(topology.node_of(src), topology.node_of(dst)) for src, dst in hops]
    network = [(src, dst) for src, dst in nodes if src != dst]
    for carried, limit in (
        (Counter(hops), limits.per_pair),
        (Counter(src for src, _ in network), limits.per_node),
        (Counter(dst for _, dst in network), limits.per_node),
    ):
        assert limit is None or max(carried.values(), default=0) <= limit


def local_rings(migration_round):
    """Rings of moves inside a rank, as sets of (layer, slot)."""
    source = {(m.layer, m.dst_slot): (m.layer, m.src_slot) for m in migration_round.moves if m.src_rank == m.dst_rank}
    rings = []
    for start in source:
        path = [start]
        while path[-1] in source and source[path[-1]] not in path:
            path.append(source[path[-1]])
        if source.get(path[-1]) == start and set(path) not in rings:
            rings.append(set(path))
    return rings


def check_local_order(migration_round):
    """A move inside a rank comes before the one that overwrites what it reads, unless they form a ring."""
    local = [m for m in migration_round.moves if m.src_rank == m.dst_rank]
    assert list(migration_round.moves[: len(local)]) == local
    on_ring = set().union(*local_rings(migration_round))
    written: set[tuple[int, int]] = set()
    for move in local:
        assert (move.layer, move.src_slot) not in written or (move.layer, move.src_slot) in on_ring
        written.add((move.layer, move.dst_slot))


def same_up_to(target, new, topology, relabel):
    """Whether target is new with nothing renamed but what relabel allows."""
    if relabel == "exact":
        return same_slots(target, new)
    parts = lambda p: np.sort(p.physical_to_logical.reshape(p.num_layers, p.num_ranks, -1), axis=2)  # noqa: E731
    for have, want in zip(parts(target).tolist(), parts(new).tolist(), strict=True):
        if relabel == "none":
            equal = have == want
        elif relabel == "ranks":
            equal = sorted(have) == sorted(want)
        else:
            per_node = topology.ranks_per_node
            nodes = lambda ranks: sorted(sorted(ranks[n : n + per_node]) for n in range(0, len(ranks), per_node))  # noqa: B023, E731
            equal = nodes(have) == nodes(want)
        if not equal:
            return False
    return True


def random_placement(rng, num_layers, num_logical, num_ranks, slots_per_rank):
    rows = []
    for _ in range(num_layers):
        extra = rng.integers(-1, num_logical, num_ranks * slots_per_rank - num_logical)
        rows.append(rng.permutation(np.concatenate([np.arange(num_logical), extra])))
    return Placement(np.array(rows), num_logical, num_ranks, version=int(rng.integers(5)))


def one_layer(row, num_logical, num_ranks):
    return Placement(np.array([row]), num_logical, num_ranks)


@pytest.mark.parametrize("relabel", RELABEL)
@pytest.mark.parametrize(("nodes", "per_node", "slots"), [(1, 5, 1), (1, 2, 2), (2, 1, 2), (5, 1, 1), (1, 1, 4)])
def test_all_permutations_of_single_copies_arrive(relabel, nodes, per_node, slots):
    num_ranks = nodes * per_node
    num_logical = num_ranks * slots
    old = one_layer(range(num_logical), num_logical, num_ranks)
    for row in permutations(range(num_logical)):
        check_migration(old, one_layer(row, num_logical, num_ranks), Topology(nodes, per_node), relabel=relabel)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(RELABEL),
    st.builds(RoundLimits, st.integers(1, 3), st.sampled_from([None, 1, 2]), st.sampled_from([None, 1, 2])),
)
def test_any_two_placements_are_joined_by_legal_rounds(seed, relabel, limits):
    rng = np.random.default_rng(seed)
    nodes, per_node, slots = (int(rng.integers(1, n)) for n in (4, 4, 5))
    num_ranks = nodes * per_node
    num_logical = int(rng.integers(1, num_ranks * slots + 1))
    layers = int(rng.integers(1, 4))
    old, new = (random_placement(rng, layers, num_logical, num_ranks, slots) for _ in range(2))
    check_migration(old, new, Topology(nodes, per_node), limits, relabel)


def test_a_ring_that_passes_a_rank_twice_is_cut_by_parking():
    # The ring is slot 0 -> 3 -> 1 -> 2 -> 0, on ranks 0, 1, 0, 1: two arrivals a rank, room for one in a round.
    old, new = one_layer([0, 1, 2, 3], 4, 2), one_layer([2, 3, 1, 0], 4, 2)
    plan = check_migration(old, new, Topology(1, 2), relabel="exact")
    assert len(plan.rounds) == 2
    assert plan.num_transfers == 4  # the expert that has to wait is parked on its own rank


def test_a_ring_over_all_ranks_is_one_round():
    old = one_layer(range(6), 6, 6)
    plan = check_migration(old, one_layer([5, 0, 1, 2, 3, 4], 6, 6), Topology(2, 3), relabel="exact")
    assert [len(r.moves) for r in plan.rounds] == [6]


def test_nothing_moves_when_ranks_only_change_names():
    rng = np.random.default_rng(0)
    old = random_placement(rng, 3, 24, 8, 4)
    by_rank = old.physical_to_logical.reshape(3, 8, 4)
    topology = Topology(2, 4)
    swapped = Placement(rng.permuted(by_rank[:, rng.permutation(8)], axis=2).reshape(3, 32), 24, 8)
    assert plan_migration(old, swapped, topology, relabel="ranks").rounds == ()
    nodes = by_rank[:, [6, 4, 5, 7, 1, 0, 3, 2]].reshape(3, 32)
    assert plan_migration(old, Placement(nodes, 24, 8), topology, relabel="nodes").rounds == ()
    assert plan_migration(old, Placement(nodes, 24, 8), topology, relabel="none").num_transfers > 0


def test_relabelling_sends_the_fewest_experts_over_slow_links_then_over_all():
    rng = np.random.default_rng(1)
    topology = Topology(2, 2)
    for _ in range(30):
        old, new = (random_placement(rng, 1, 6, 4, 2) for _ in range(2))
        held = [set(part) - {-1} for part in old.physical_to_logical.reshape(4, 2).tolist()]
        wants = [set(part) - {-1} for part in new.physical_to_logical.reshape(4, 2).tolist()]
        near = [held[r] | held[r ^ 1] for r in range(4)]
        price = lambda part: (  # noqa: E731
            sum(len(wants[part[r]] - near[r]) for r in range(4)),  # noqa: B023
            sum(len(wants[part[r]] - held[r]) for r in range(4)),  # noqa: B023
        )
        chosen = {
            relabel: (relabel_ranks(old, new, topology, relabel)[0].reshape(4, 2)[:, 0] // 2).tolist()
            for relabel in ("ranks", "nodes")
        }
        assert price(chosen["ranks"]) == min(price(p) for p in permutations(range(4)))
        same_node = [p for p in permutations(range(4)) if p[0] // 2 == p[1] // 2]
        assert price(chosen["nodes"]) == min(price(p) for p in same_node)


def test_an_expert_that_two_ranks_of_a_node_need_crosses_the_slow_link_once():
    # Node 0 holds expert 0 on rank 0; both ranks of node 1 want it.
    old = one_layer([0, 1, 2, 3, 4, 5, 1, 2], 6, 4)
    new = one_layer([0, 1, 2, 3, 4, 0, 5, 0], 6, 4)
    plan = check_migration(old, new, Topology(2, 2), relabel="none")
    assert sum(m.src_rank // 2 != m.dst_rank // 2 for r in plan.rounds for m in r.moves) == 1


def test_sources_are_spread_over_the_copies_of_an_expert():
    # Expert 0 has replicas on ranks 0 and 1 and is wanted by ranks 2 .. 5; with one send a rank that is two rounds.
    old = one_layer([0, 1, 0, 2, 3, 3, 4, 4, 5, 5, 6, 6], 7, 6)
    new = one_layer([0, 1, 0, 2, 3, 0, 4, 0, 5, 0, 6, 0], 7, 6)
    plan = check_migration(old, new, Topology(1, 6), relabel="none")
    assert len(plan.rounds) == 2
    assert {m.src_rank for m in plan.rounds[0].moves} == {0, 1}


@pytest.mark.parametrize("relabel", ["ranks", "nodes"])
def test_a_large_rewrite_takes_hardly_more_rounds_than_its_busiest_rank_must_receive(relabel):
    rng = np.random.default_rng(2)
    old, new = (random_placement(rng, 8, 256, 32, 9) for _ in range(2))
    plan = check_migration(old, new, Topology(4, 8), relabel=relabel)
    arriving = np.zeros(32, dtype=int)
    for migration_round in plan.rounds:
        for move in migration_round.moves:
            arriving[move.dst_rank] += move.src_rank not in (move.dst_rank, -1)
    assert len(plan.rounds) <= 1.25 * arriving.max()


def test_unchanged_layers_keep_every_slot():
    rng = np.random.default_rng(3)
    old = random_placement(rng, 3, 12, 4, 4)
    rows = old.physical_to_logical.copy()
    rows[1] = rng.permutation(rows[1])
    plan = check_migration(old, Placement(rows, 12, 4), Topology(2, 2))
    assert np.array_equal(plan.target.physical_to_logical[[0, 2]], rows[[0, 2]])
    assert {m.layer for r in plan.rounds for m in r.moves} == {1}


def test_slots_can_become_empty_and_be_filled_again():
    full, sparse = one_layer([0, 1, 1, 0], 2, 2), one_layer([0, -1, 1, -1], 2, 2)
    topology = Topology(1, 2)
    emptied = check_migration(full, sparse, topology, relabel="none")
    assert emptied.num_transfers == 0
    assert check_migration(sparse, full, topology, relabel="none").num_transfers == 2


def test_an_expert_without_any_copy_is_named():
    left, lost = one_layer([0, 1, 2, 3], 4, 2).without_ranks([1])
    assert lost == [(0, 2), (0, 3)]
    with pytest.raises(PlacementError, match="expert 2 of row 0 has no replica to move from"):
        plan_migration(left, one_layer([0, 1, 2, 3], 4, 2), Topology(1, 2))


@pytest.mark.parametrize(
    ("topology", "new", "message"),
    [
        (Topology(1, 3), one_layer([0, 1], 2, 2), "topology has 3 ranks"),
        (Topology(1, 2), one_layer([0, 1, 0, 1], 2, 2), "keeps the shape"),
    ],
)
def test_what_does_not_fit_is_named(topology, new, message):
    with pytest.raises(PlacementError, match=message):
        plan_migration(one_layer([0, 1], 2, 2), new, topology)


@pytest.mark.parametrize("field", ["per_rank", "per_pair", "per_node"])
def test_a_round_that_may_move_nothing_is_refused(field):
    with pytest.raises(PlacementError, match=f"{field} of a round's limits is 0"):
        RoundLimits(**{field: 0})


def test_a_ring_over_nodes_goes_one_hop_at_a_time_where_their_network_is_limited():
    # Four ranks on two nodes pass their experts on: 0 -> 1 -> 2 -> 3 -> 0 crosses each node's network once each way ...
    old, new = one_layer([0, 1, 2, 3], 4, 4), one_layer([3, 0, 1, 2], 4, 4)
    narrow = RoundLimits(per_node=1)
    assert len(check_migration(old, new, Topology(2, 2), narrow, "exact").rounds) == 1
    # ... and 0 -> 2 -> 1 -> 3 -> 0 twice: what crosses a second time waits for another round.
    zigzag = one_layer([3, 2, 0, 1], 4, 4)
    assert len(check_migration(old, zigzag, Topology(2, 2), RoundLimits(), "exact").rounds) == 1
    assert len(check_migration(old, zigzag, Topology(2, 2), narrow, "exact").rounds) > 1


def test_one_source_of_many_experts_sends_a_pair_one_at_a_time():
    old, new = one_layer([0, 1, 2, 3, 0, 0, 0, 0], 4, 2), one_layer([0, 1, 2, 3, 0, 1, 2, 3], 4, 2)
    roomy = RoundLimits(per_rank=3)
    assert len(check_migration(old, new, Topology(1, 2), roomy, "exact").rounds) == 1
    assert len(check_migration(old, new, Topology(1, 2), RoundLimits(3, per_pair=1), "exact").rounds) == 3


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([SlotMove(0, 0, 0, 1, 1)], "has no slot"),
        ([SlotMove(0, 1, 0, 1, 1)], "does not own it"),
        ([SlotMove(0, 0, 0, 1, 1), SlotMove(0, 1, 1, 1, 1)], "written already"),
    ],
)
def test_an_illegal_round_is_refused(moves, message):
    with pytest.raises(PlacementError, match=message):
        apply_round(one_layer([0, 1], 2, 2), MigrationRound(tuple(moves)))
