"""The plan of a dispatch with one row per (token, rank): each array against its meaning, plain and compiled alike."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dispatch.layout import count_slots, home_index, placed_order, send_order
from moe_serve.dispatch.send_plan import placed_rows, plan_sends


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9), st.integers(1, 16), st.integers(0, 1000))
def test_a_row_goes_once_to_each_rank_that_wants_it(ranks: int, slots: int, tokens: int, topk: int, seed: int) -> None:
    ids = torch.randint(-1, ranks * slots, (tokens, topk), generator=torch.Generator().manual_seed(seed))
    plan = plan_sends(ids.numpy(), ranks, slots)
    assert plan.counts.tolist() == count_slots(ids, ranks * slots).tolist()
    order = send_order(ids, ranks * slots, int((ids >= 0).sum()))
    assert plan.home.tolist() == home_index(order, tokens, topk).tolist()
    for rank in range(ranks):
        sent = plan.tokens[plan.first_token[rank] : plan.first_token[rank + 1]]
        wanted = [t for t in range(tokens) if ((ids[t] >= 0) & (ids[t] // slots == rank)).any()]
        assert sent.tolist() == wanted
        first, end = plan.first_entry[rank], plan.first_entry[rank + 1]
        assert sent[plan.row[first:end]].tolist() == (order[first:end] // topk).tolist()
    assert plan.first_entry[-1] == len(order)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_arrived_entries_go_where_the_placed_layout_says(num_ranks: int, num_slots: int, seed: int) -> None:
    counts = torch.randint(0, 4, (num_ranks, num_slots), generator=torch.Generator().manual_seed(seed))
    _, expected = placed_order(counts, int(counts.sum()))
    assert placed_rows(counts.numpy()).tolist() == expected.tolist()


def test_one_hand_worked_plan() -> None:
    # Two ranks of two slots. Token 0 goes to slots 3, 0 and 2; token 1 to slot 3 twice.
    plan = plan_sends(np.array([[3, 0, 2], [3, -1, 3]]), 2, 2)
    assert plan.tokens.tolist() == [0, 0, 1]  # rank 0 gets token 0; rank 1 gets tokens 0 and 1, each once
    assert plan.first_token == [0, 1, 3]
    assert plan.first_entry == [0, 1, 5]
    assert plan.row.tolist() == [0, 0, 0, 1, 1]  # slot 0: row 0; slot 2: row 0; slot 3: rows 0, 1, 1
    assert plan.home.tolist() == [[2, 0, 1], [3, -1, 4]]
