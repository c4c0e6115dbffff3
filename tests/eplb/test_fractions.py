"""The exact split in fractions of tokens: alike in C and in Python, and near that of whole tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split import fractions
from moe_serve.eplb.split.fractions import levelled_load
from moe_serve.eplb.split.make import make_splits

TOKENS = np.array([[40, 20, 40]])


def test_a_replicated_expert_levels_its_ranks():
    linked = Placement(np.array([[0, 1, 0, 2]], dtype=np.int32), 3, 2)
    assert levelled_load(TOKENS, linked).tolist() == [[30.0, 20.0, 10.0, 40.0]]


def test_the_first_of_two_replicas_on_one_rank_serves_as_in_the_split_of_whole_tokens():
    twice = Placement(np.array([[0, 0, 1, -1, 0, 2]], dtype=np.int32), 3, 2)
    (layer,) = make_splits("exact", twice)
    assert levelled_load(TOKENS, twice)[0].tolist() == layer.split(TOKENS[0]).tolist() == [30, 0, 20, 0, 10, 40]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_c_and_python_have_the_same_bits_close_to_the_optimum(seed, data):
    rng = np.random.default_rng(seed)
    num_ranks, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    num_layers, num_experts = data.draw(st.integers(0, 3)), data.draw(st.integers(1, num_ranks * slots))
    rest = rng.integers(-1, num_experts, (num_layers, num_ranks * slots - num_experts))
    table = rng.permuted(np.concatenate([np.tile(np.arange(num_experts), (num_layers, 1)), rest], axis=1), axis=1)
    placement = Placement(table.astype(np.int32), num_experts, num_ranks)
    tokens = rng.lognormal(6, data.draw(st.sampled_from([0.5, 3.0])), (num_layers, num_experts)).astype(np.int64)
    tokens *= rng.random(tokens.shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    compiled = levelled_load(tokens, placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fractions, "find_library", lambda: None)
        np.testing.assert_array_equal(levelled_load(tokens, placement), compiled)
    of_expert = np.zeros((num_layers, num_experts + 1))
    np.add.at(of_expert, (np.arange(num_layers)[:, None], table), compiled)
    np.testing.assert_allclose(of_expert[:, :-1], tokens, rtol=1e-12)
    for row, layer in enumerate(make_splits("exact", placement)):
        best = layer.split(tokens[row]).reshape(num_ranks, slots).sum(axis=1).max()
        top = compiled[row].reshape(num_ranks, slots).sum(axis=1).max()
        assert best - 1 <= top <= 1.02 * best + 1
