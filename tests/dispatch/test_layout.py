"""Index arithmetic against brute force, no ranks needed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dispatch.layout import by_slot, count_slots, sent_index

SHAPES = st.tuples(st.integers(0, 9), st.integers(1, 16), st.integers(1, 12), st.integers(0, 1000))


def draw_ids(num_tokens: int, topk: int, num_slots: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, num_slots, (num_tokens, topk), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(SHAPES)
def test_counts_and_way_back_match_brute_force(shape: tuple[int, int, int, int]) -> None:
    num_tokens, topk, num_slots, seed = shape
    ids = draw_ids(num_tokens, topk, num_slots, seed)
    flat = ids.flatten().tolist()
    counts = count_slots(ids, num_slots)
    assert counts.tolist() == [flat.count(slot) for slot in range(num_slots)]
    expected = [entry for slot in range(num_slots) for entry, named in enumerate(flat) if named == slot]
    home = sent_index(torch.tensor(expected, dtype=torch.int64), num_tokens, topk)
    assert home.flatten().tolist() == [expected.index(e) if e in expected else -1 for e in range(len(flat))]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_placed_and_arrival_orders_are_inverse_and_sorted(num_ranks: int, num_slots: int, seed: int) -> None:
    counts = torch.randint(0, 4, (num_ranks, num_slots), generator=torch.Generator().manual_seed(seed))
    arrival = [(s, r, i) for r in range(num_ranks) for s in range(num_slots) for i in range(int(counts[r, s]))]
    to_placed, to_arrival = by_slot(torch.tensor([slot for slot, _, _ in arrival], dtype=torch.int64))
    assert [arrival[i] for i in to_placed.tolist()] == sorted(arrival)
    assert [sorted(arrival)[i] for i in to_arrival.tolist()] == arrival


def test_one_hand_worked_step() -> None:
    # Two ranks, two slots each. Token 0 goes to slots 3 and 0, token 1 to slot 3 alone.
    ids = torch.tensor([[3, 0], [-1, 3]])
    assert count_slots(ids, 4).tolist() == [1, 0, 0, 2]
    order = torch.tensor([1, 0, 3])  # to slot 0: token 0 (k=1); to slot 3: token 0 (k=0), token 1 (k=1)
    assert sent_index(order, 2, 2).tolist() == [[1, 0], [-1, 2]]


def test_no_rows_need_no_order() -> None:
    to_placed, to_arrival = by_slot(torch.empty(0, dtype=torch.int64))
    assert to_placed.shape == to_arrival.shape == (0,)
