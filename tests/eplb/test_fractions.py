"""The exact split in fractions of tokens: alike in C and in Python, near that of whole tokens, and what gates price."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.cost.kernels import Batch
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import WindowClosed
from moe_serve.eplb.rebalance.rebalancer import make_rebalancer
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.run import GatedRun, make_runs
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.split import fractions
from moe_serve.eplb.split.fractions import levelled_load
from moe_serve.eplb.split.make import make_splits
from moe_serve.topology import Topology

# Expert 0 is on both ranks: shared evenly, they have 40 and 60 tokens; by the exact split both have 50.
LINKED = Placement(np.array([[0, 1, 0, 2]], dtype=np.int32), 3, 2)
TOKENS = np.array([[40, 20, 40]])


def test_a_replicated_expert_levels_its_ranks():
    assert levelled_load(TOKENS, LINKED).tolist() == [[30.0, 20.0, 10.0, 40.0]]


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


def rebalancer_of(system: str, split: str):
    """Returns the rebalancer of a live server, or that of a policy behind the gate in replay and simulate."""
    if system == "live":
        return make_rebalancer(LINKED, BalancerSettings(), SystemFacts(1, 1000, 1e-6, 1e-6, False, split=split))
    model = replace(load_model_profile("Mixtral-8x7B"), num_layers=1, num_moe_layers=1, num_logical=3)
    costs = ProfileCosts(CostModel(load_hardware("H800"), model, Topology(1, 2)))
    chosen = ReplaySettings(Topology(1, 2), 4, split=split, costs=costs, gate_cost=costs.gate(split))
    (run,) = make_runs("gate:greedy", LINKED, chosen)
    assert isinstance(run, GatedRun)
    return run._rebalancer


@pytest.mark.parametrize("split", ["even", "nearest", "exact", "time"])
@pytest.mark.parametrize("system", ["live", "replay"])
def test_the_gate_prices_and_plans_for_the_split_that_serves(system, split):
    """Priced by the even split, ranks that the exact split has level count as uneven, and experts would move."""
    exact = split in ("exact", "time")
    rebalancer = rebalancer_of(system, split)
    seconds = rebalancer.cost.layer_seconds(1e4 * TOKENS, None, LINKED)
    rows = 1e4 * np.array([[30.0, 20, 10, 40] if exact else [20.0, 20, 20, 40]])
    if system == "live":
        assert seconds == pytest.approx(rebalancer.cost.skew_s * rows.reshape(2, 2).sum(axis=1).max())
    else:
        costs = rebalancer.cost.costs
        layer = costs.moe_layer(rows, Batch("decode", 0, 0), True)
        assert seconds == pytest.approx(layer.total_s * costs.engine.step_factor)
    assert balancedness(rank_load(TOKENS, LINKED))[0] < 0.95
    for index in range(3):
        rebalancer.handle(WindowClosed(10 * index + 10, LoadRecord(10 * index, 10, "decode", 10**6 * TOKENS)))
    assert [each.kind for each in rebalancer.decisions] == ([] if exact else ["plan"])


@pytest.mark.parametrize("split", ["even", "exact"])
def test_prices_are_learned_from_loads_under_the_split_that_serves(split):
    """Steps that last as long as the mean rank, whatever the ratio of experts: the exact split had the ranks level."""
    rebalancer = make_rebalancer(LINKED, BalancerSettings(), SystemFacts(1, 1000, 1e-6, 1e-6, False, split=split))
    first = rebalancer.cost.skew_s
    for index in range(20):
        tokens = 1000 * np.array([[40, 20, 40 + index % 5]])
        record = LoadRecord(index, 1, "decode", tokens, step_time_s=1e-6 * float(tokens.sum()) / 2)
        assert rebalancer.cost.learn_window(record, LINKED)
    changed = abs(rebalancer.cost.skew_s / first - 1)
    assert changed < 0.01 if split == "exact" else changed > 0.3
