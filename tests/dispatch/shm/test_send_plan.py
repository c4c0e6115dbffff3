"""The plan of a dispatch with one row per (token, rank): each array against its meaning; arrival puts rows in place."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dispatch.layout import FIRST, by_slot, count_slots, rank_order, row_begins
from moe_serve.dispatch.shm.send_plan import placed_starts, plan_sends, read_entries


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9), st.integers(1, 16), st.integers(0, 1000))
def test_a_row_goes_once_to_each_rank_that_wants_it(ranks: int, slots: int, tokens: int, topk: int, seed: int) -> None:
    ids = torch.randint(-1, ranks * slots, (tokens, topk), generator=torch.Generator().manual_seed(seed))
    plan = plan_sends(ids.numpy(), ranks, slots)
    assert plan.counts.tolist() == count_slots(ids, ranks * slots).tolist()
    order, per_rank = rank_order(ids, ranks * slots, ranks)
    begins = row_begins(order, per_rank, topk)
    first = 0
    for rank in range(ranks):
        wanted = [t for t in range(tokens) if ((ids[t] >= 0) & (ids[t] // slots == rank)).any()]
        assert plan.tokens[rank].tolist() == wanted
        pairs = [p for p, slot in enumerate(ids.flatten().tolist()) if slot >= 0 and slot // slots == rank]
        assert plan.pairs[rank].tolist() == pairs
        arrived = read_entries(plan.entries[rank])
        assert [wanted[row] for row in arrived.row] == [pair // topk for pair in pairs]
        assert (arrived.slot + rank * slots).tolist() == ids.flatten()[pairs].tolist()
        within = [
            slots_here[:i].count(slot) for slots_here in [arrived.slot.tolist()] for i, slot in enumerate(slots_here)
        ]
        assert within == plan.nth.reshape(-1)[pairs].tolist(), "both ends count the same"
        assert arrived.k.tolist() == [arrived.row[:i].tolist().count(row) for i, row in enumerate(arrived.row)]
        mine = slice(first, first + int(per_rank[rank]))
        assert order[mine].tolist() == pairs, "the torch form has the same order"
        assert begins[mine].tolist() == (plan.entries[rank] >= FIRST).tolist()
        first = mine.stop
    assert (plan.nth == -1).tolist() == (ids < 0).tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_arrived_entries_go_where_the_placed_layout_says(num_ranks: int, num_slots: int, seed: int) -> None:
    counts = torch.randint(0, 4, (num_ranks, num_slots), generator=torch.Generator().manual_seed(seed))
    slots = torch.arange(num_slots).repeat(num_ranks)
    _, expected = by_slot(slots.repeat_interleave(counts.reshape(-1)))
    sizes = counts.numpy().reshape(-1)
    within = np.concatenate([np.arange(size) for size in sizes])
    assert (np.repeat(placed_starts(counts.numpy()).reshape(-1), sizes) + within).tolist() == expected.tolist()
    slabs = placed_starts(counts.numpy(), slab_rows=100)
    assert slabs[0].tolist() == [100 * slot for slot in range(num_slots)]
    assert (np.diff(slabs, axis=0) == counts.numpy()[:-1]).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4))
def test_entries_of_several_sources_are_packed_by_slot_then_source(slots_of_sources: list[list[int]]) -> None:
    slots = [slot for source in slots_of_sources for slot in source]
    packed = read_entries(np.array(slots, dtype=np.int32) | FIRST).packed()
    counts = np.array([[source.count(slot) for slot in range(4)] for source in slots_of_sources])
    assert sorted(packed.tolist()) == list(range(len(slots)))
    assert [slots[i] for i in np.argsort(packed)] == sorted(slots)
    begins = placed_starts(counts)
    at = 0
    for number, source in enumerate(slots_of_sources):
        for slot in set(source):
            mine = [int(packed[at + i]) for i, other in enumerate(source) if other == slot]
            assert mine == list(range(int(begins[number, slot]), int(begins[number, slot]) + len(mine)))
        at += len(source)


def test_one_hand_worked_plan() -> None:
    # Two ranks of two slots. Token 0 goes to slots 3, 0 and 2; token 1 to slot 3 twice.
    plan = plan_sends(np.array([[3, 0, 2], [3, -1, 3]]), 2, 2)
    assert [tokens.tolist() for tokens in plan.tokens] == [[0], [0, 1]]  # each token once to a rank
    assert [entries.tolist() for entries in plan.entries] == [[FIRST + 0], [FIRST + 1, 0, FIRST + 1, 1]]
    assert [pairs.tolist() for pairs in plan.pairs] == [[1], [0, 2, 3, 5]]
    assert plan.nth.tolist() == [[0, 0, 0], [1, -1, 2]]  # slot 3 has three entries: token 0's, and two of token 1
