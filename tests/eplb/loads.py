"""Small synthetic loads for the tests of the balancer; the families that users simulate with are in synthetic.py."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement

Loads = NDArray[np.int64]


def zipf(num_layers: int, num_experts: int, power: float, seed: int = 0) -> Loads:
    draw = np.random.default_rng(seed)
    ranked = np.arange(1, num_experts + 1) ** -power
    return np.stack([np.round(1e6 * draw.permutation(ranked)) for _ in range(num_layers)]).astype(np.int64)


def lognormal(num_layers: int, num_experts: int, sigma: float, seed: int = 0) -> Loads:
    draw = np.random.default_rng(seed)
    return np.round(1e5 * np.exp(sigma * draw.standard_normal((num_layers, num_experts)))).astype(np.int64)


def drifting(num_windows: int, num_layers: int, num_experts: int, rho: float, seed: int = 0) -> list[Loads]:
    """Lognormal loads whose logarithms follow an AR(1) process: sigma 0.6, one array per window."""
    draw = np.random.default_rng(seed)
    state = draw.standard_normal((num_layers, num_experts))
    out = []
    for _ in range(num_windows):
        out.append(np.round(1e5 * np.exp(0.6 * state)).astype(np.int64))
        state = rho * state + np.sqrt(1 - rho**2) * draw.standard_normal(state.shape)
    return out


def grouped(num_layers: int, num_experts: int, num_groups: int, seed: int = 0) -> Loads:
    """Groups share a factor (sigma 0.5); experts have their own (sigma 0.6)."""
    draw = np.random.default_rng(seed)
    group = np.repeat(draw.standard_normal((num_layers, num_groups)), num_experts // num_groups, axis=1)
    own = draw.standard_normal((num_layers, num_experts))
    return np.round(1e5 * np.exp(0.5 * group + 0.6 * own)).astype(np.int64)


def one_hot(num_layers: int, num_experts: int, share: float, seed: int = 0) -> Loads:
    """One expert of each layer takes this share of the load."""
    draw = np.random.default_rng(seed)
    load = 1e5 * np.exp(0.6 * draw.standard_normal((num_layers, num_experts)))
    hot = draw.integers(0, num_experts, num_layers)
    rows = np.arange(num_layers)
    load[rows, hot] = 0
    load[rows, hot] = share / (1 - share) * load.sum(axis=1)
    return np.round(load).astype(np.int64)


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[Loads, int, int, int]:
    """(tokens [L, E], nodes, ranks per node, slots): awkward small sizes, zeros and ties included."""
    num_nodes = draw(st.integers(1, 3))
    ranks_per_node = draw(st.integers(1, 4))
    num_ranks = num_nodes * ranks_per_node
    num_experts = draw(st.integers(1, 12))
    fewest = -(-num_experts // num_ranks)
    slots_per_rank = draw(st.integers(fewest, fewest + 2))
    num_layers = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["lognormal", "ties", "zeros", "one", "huge"]))
    shape = (num_layers, num_experts)
    tokens = {
        "lognormal": np.round(1e3 * np.exp(random.standard_normal(shape))),
        "ties": random.integers(0, 4, shape) * 100,
        "zeros": np.zeros(shape),
        "one": np.eye(num_experts)[random.integers(0, num_experts, num_layers)] * 1000,
        "huge": random.integers(2**52, 2**53, shape),
    }[kind]
    return tokens.astype(np.int64), num_nodes, ranks_per_node, slots_per_rank * num_ranks


def same_slots(one: Placement, other: Placement) -> bool:
    """Returns whether both put the same experts into the same slots of the same ranks."""
    return one.num_ranks == other.num_ranks and np.array_equal(one.physical_to_logical, other.physical_to_logical)
