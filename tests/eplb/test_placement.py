import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError

EXAMPLE = Placement(np.array([[0, 1, 2, 3, 1, -1], [0, 1, 2, 3, 0, 2]]), num_logical=4, num_ranks=3)


def test_tables_of_the_example_that_opens_the_module():
    assert EXAMPLE.slots_per_rank == 2
    assert EXAMPLE.replica_count.tolist() == [[1, 2, 1, 1], [2, 1, 2, 1]]
    first, second = [[0, -1], [1, 4], [2, -1], [3, -1]], [[0, 4], [1, -1], [2, 5], [3, -1]]
    assert EXAMPLE.logical_to_physical.tolist() == [first, second]
    assert EXAMPLE.moe_layer_ids == (0, 1)
    assert EXAMPLE.num_duplicates.tolist() == [0, 0]


def test_a_placement_keeps_its_own_read_only_copy():
    table = np.array([[0, 1]])
    placement = Placement(table, 2, 1)
    table[0, 0] = 1
    assert placement.physical_to_logical.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="read-only"):
        placement.physical_to_logical[0, 0] = 1


@given(st.integers(0, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_the_trivial_placement_is_legal_even_and_without_duplicates(num_layers, num_logical, num_ranks, redundant):
    placement = Placement.trivial(num_layers, num_logical, num_ranks, redundant)
    assert placement.num_layers == num_layers
    assert (placement.replica_count >= 1).all()
    assert placement.num_duplicates.sum() == 0
    filled = (placement.physical_to_logical >= 0).sum(axis=1)
    assert (filled == min(num_logical + redundant, num_logical * num_ranks)).all()


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_slots_and_experts_name_each_other(seed, num_layers, num_logical, num_ranks):
    draw = np.random.default_rng(seed)
    slots = num_ranks * (-(-num_logical // num_ranks) + 2)
    table = draw.integers(-1, num_logical, (num_layers, slots))
    table[:, :num_logical] = np.arange(num_logical)
    placement = Placement(table, num_logical, num_ranks)
    for layer in range(num_layers):
        for expert in range(num_logical):
            found = [s for s in placement.logical_to_physical[layer, expert] if s >= 0]
            assert found == np.flatnonzero(table[layer] == expert).tolist()


def test_without_ranks_empties_their_slots_and_names_what_is_lost():
    placement = Placement(np.array([[0, 1, 1, 2], [2, 0, 1, 0]]), 3, 2)
    left, lost = placement.without_ranks([0])
    assert left.physical_to_logical.tolist() == [[-1, -1, 1, 2], [-1, -1, 1, 0]]
    assert lost == [(0, 0), (1, 2)]
    assert placement.without_ranks([])[1] == []


@pytest.mark.parametrize(
    ("table", "num_logical", "num_ranks", "words"),
    [
        (np.array([0, 1]), 2, 1, "shape"),
        (np.array([[0.0, 1.0]]), 2, 1, "integers"),
        (np.array([[0, 1, 1]]), 2, 2, "use 2 or 4"),
        (np.array([[0, 2]]), 2, 1, "holds expert 2"),
        (np.array([[0, -2]]), 2, 1, "holds expert -2"),
        (np.array([[0, 0]]), 2, 1, "expert 1 of row 0 .* has no slot"),
        (np.array([[0]]), 0, 1, "num_logical"),
        (np.array([[0]]), 1, 0, "num_ranks"),
    ],
)
def test_an_illegal_placement_says_the_argument_and_the_fix(table, num_logical, num_ranks, words):
    with pytest.raises(PlacementError, match=words):
        Placement(table, num_logical, num_ranks)


def test_wrong_layer_ids_and_ranks_are_refused():
    with pytest.raises(PlacementError, match="moe_layer_ids"):
        Placement(np.array([[0]]), 1, 1, moe_layer_ids=(3, 3))
    with pytest.raises(PlacementError, match="rank_ids"):
        Placement.trivial(1, 2, 2).without_ranks([5])
