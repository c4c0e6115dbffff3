"""Random layers and batches for the tests of splits."""

from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from moe_serve.eplb.split.exact import confined_load
from moe_serve.eplb.split.layer import LayerSlots
from moe_serve.eplb.split.make import BatchSplit
from moe_serve.topology import Topology


def random_case(rng, max_ranks=6, max_tokens=40):
    """One layer and a batch: every expert has a slot, some have several, some slots are empty or duplicates."""
    num_ranks = int(rng.integers(1, max_ranks + 1))
    slots_per_rank = int(rng.integers(1, 5))
    num_slots = num_ranks * slots_per_rank
    num_logical = int(rng.integers(1, num_slots + 1))
    row = np.concatenate([np.arange(num_logical), rng.integers(-1, num_logical, num_slots - num_logical)])
    counts = rng.integers(0, max_tokens, num_logical) * (rng.random(num_logical) < 0.8)
    return rng.permutation(row), counts, num_ranks


def layer_of(row, num_ranks, num_logical=None, num_nodes=1, layer_row=0):
    return LayerSlots.of(row, Topology(num_nodes, num_ranks // num_nodes), num_logical, layer_row)


def split_batch(counts, row, num_ranks, topology=None):
    return BatchSplit(row, num_ranks, np.shape(counts)[-1], topology).split(counts)


def by_source_of(totals, num_ranks, seed):
    """Returns counts [R, E] with these totals."""
    return np.random.default_rng(seed).multinomial(totals, np.full(num_ranks, 1 / num_ranks)).T


def rank_loads(slot_tokens, num_ranks):
    return slot_tokens.reshape(num_ranks, -1).sum(axis=1)


@st.composite
def cases(draw):
    return random_case(
        np.random.default_rng(draw(st.integers(0, 2**32))), max_tokens=draw(st.sampled_from([2, 9, 1000]))
    )


def best_by_subsets(graph, counts):
    """max over sets of ranks of ceil(confined / size): the definition, by enumeration."""
    ranks = range(graph.num_ranks)
    return max(
        -(-confined_load(graph, counts, chosen) // size)
        for size in range(1, graph.num_ranks + 1)
        for chosen in combinations(ranks, size)
    )
