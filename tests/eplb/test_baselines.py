"""DeepSeek's EPLB against a slow reference written from the description of the algorithm, and against the original
eplb.py where DEEPSEEK_EPLB names its path (it needs torch)."""

import importlib.util
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.policies.baselines import rebalance
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.topology import Topology
from tests.eplb.loads import same_slots

# The example of DeepSeek's README: 12 experts in 4 groups, 16 slots, 2 nodes of 4 GPUs.
README_LOAD = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
README_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def pack_slowly(load, num_packs):
    """Heaviest item first into the lightest pack with room -> list of packs, each a list of items."""
    packs = [[] for _ in range(num_packs)]
    room = len(load) // num_packs
    if room == 1:
        return [[i] for i in range(num_packs)]
    total = [np.float32(0)] * num_packs
    for item in sorted(range(len(load)), key=lambda i: -load[i]):
        pack = min((p for p in range(num_packs) if len(packs[p]) < room), key=lambda p: total[p])
        packs[pack].append(item)
        total[pack] += load[item]
    return packs


def rebalance_slowly(load, num_slots, num_groups, num_nodes, num_ranks):
    load = load.astype(np.float32)
    size = len(load) // num_groups
    groups = pack_slowly([load[g * size : (g + 1) * size].sum() for g in range(num_groups)], num_nodes)
    slots = []
    for node_groups in groups:
        experts = [g * size + i for g in node_groups for i in range(size)]
        count = dict.fromkeys(experts, 1)
        replicas = list(experts)
        while len(replicas) < num_slots // num_nodes:
            heaviest = max(experts, key=lambda e: load[e] / np.float32(count[e]))
            count[heaviest] += 1
            replicas.append(heaviest)
        each = [load[e] / np.float32(count[e]) for e in replicas]
        for rank in pack_slowly(each, num_ranks // num_nodes):
            slots += [replicas[i] for i in rank]
    return slots


def tie_free(seed, num_layers, num_experts):
    draw = np.random.default_rng(seed)
    return draw.permutation(np.arange(1, 40 * num_experts * num_layers + 1))[: num_layers * num_experts].reshape(
        num_layers, num_experts
    ) * 977 + draw.integers(0, 976, (num_layers, num_experts))


def has_ties(load, slots):
    """Whether two replicas of different experts can have the same load in float32."""
    most = slots - load.shape[1] + 1
    for row in load.astype(np.float32):
        each = np.concatenate([row / np.float32(c) for c in range(1, most + 1)])
        if len(np.unique(each)) < len(each):
            return True
    return False


def test_the_readme_example_is_reproduced():
    plan = make_policy("deepseek").plan(PlanRequest(README_LOAD, Topology(2, 4), 16, num_groups=4))
    assert plan.placement.physical_to_logical.tolist() == README_SLOTS
    assert rebalance_slowly(README_LOAD[0], 16, 4, 2, 8) == README_SLOTS[0]


@given(st.integers(0, 2**31), st.sampled_from([(1, 1, 4), (1, 1, 8), (4, 2, 4), (4, 4, 8), (8, 2, 8), (16, 4, 16)]))
@settings(max_examples=120, deadline=None)
def test_output_equals_the_slow_reference_on_inputs_without_ties(seed, shape):
    groups, nodes, ranks = shape
    load = tie_free(seed, 3, 16)
    slots = 16 + ranks
    if has_ties(load, slots):
        return
    out = rebalance(load, slots, groups, nodes, ranks)
    for layer in range(3):
        assert out[layer].tolist() == rebalance_slowly(load[layer], slots, groups, nodes, ranks)


def test_groups_that_do_not_divide_over_nodes_mean_the_global_method():
    load = tie_free(1, 2, 24)
    by_groups = make_policy("deepseek").plan(PlanRequest(load, Topology(2, 4), 32, num_groups=3))
    without = make_policy("deepseek").plan(PlanRequest(load, Topology(2, 4), 32))
    assert same_slots(by_groups.placement, without.placement)


def test_hard_hierarchy_keeps_every_group_on_one_node():
    load = tie_free(2, 4, 32)
    plan = make_policy("deepseek").plan(PlanRequest(load, Topology(4, 2), 48, num_groups=8, off_home=0.0))
    nodes = plan.placement.physical_to_logical.reshape(4, 4, 12) // 4  # [layer, node, slot] -> group
    for layer in nodes:
        homes = [{int(g) for g in node} for node in layer]
        assert sum(len(h) for h in homes) == 8
    assert plan.off_home.max() == 0


@pytest.mark.skipif("DEEPSEEK_EPLB" not in os.environ, reason="set DEEPSEEK_EPLB to the path of DeepSeek's eplb.py")
@pytest.mark.parametrize("shape", [(288, 8, 4, 32), (288, 1, 4, 32), (288, 1, 18, 144), (288, 1, 9, 72)])
def test_output_equals_the_original(shape):
    import torch

    spec = importlib.util.spec_from_file_location("deepseek_eplb", os.environ["DEEPSEEK_EPLB"])
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    slots, groups, nodes, ranks = shape
    compared = 0
    for seed in range(6):
        load = tie_free(seed, 2, 256)[:, :256]
        plan = make_policy("deepseek").plan(
            PlanRequest(load, Topology(nodes, ranks // nodes), slots, num_groups=groups)
        )
        expected = original.rebalance_experts(torch.tensor(load), slots, groups, nodes, ranks)[0].numpy()
        for row, want, tokens in zip(plan.placement.physical_to_logical, expected, load, strict=True):
            # Equal loads of replicas are ties too; layers with one may differ.
            count = np.bincount(want, minlength=256)
            each = (tokens / count).astype(np.float32)
            if len(np.unique(each)) == 256:
                assert row.tolist() == want.tolist()
                compared += 1
    assert compared >= 6
