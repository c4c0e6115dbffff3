"""Placement under a node hierarchy, from hard (an expert never leaves its home node) to soft.

Three steps. Experts, or groups of them, get home nodes. Nodes get replicas: at least one of each of their own experts,
and in the slots left further ones, also of other nodes' experts while the load that those serve stays within the budget
`off_home`. Then every node packs its replicas onto its ranks.

Shape words: L = layers, E = experts, N = nodes, G = groups.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.edits import sum_in_order
from moe_serve.eplb.policies.packing import (
    list_replicas,
    pack_in_rounds,
    pack_longest_first,
    repair_duplicates,
    replica_load,
    swap_until_even,
)
from moe_serve.eplb.policies.problem import Problem, replicas_per_node
from moe_serve.errors import PlacementError

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]
Counts = NDArray[np.int64]
STEEPNESS = 40.0  # of the smooth maximum, per mean rank load
SHARE_NOISE = 2e-9  # of the load: a plan that uses its whole budget is not over it


def plan_by_node(problem: Problem, sweeps: int) -> tuple[Ids, Counts, bool]:
    """Returns the table [L, R, K], the home node of each expert [L, E], and whether the deadline cut it short.

    sweeps: effort of the swap refinement inside nodes; 0 = none. With it, several budgets up to `off_home` are tried,
    because load off home that an even split cannot use well is better served at home.
    """
    homes = choose_homes(problem, problem.request.num_groups)
    off_home = problem.request.off_home
    fractions = (1.0,) if sweeps == 0 or off_home == 0 else (1.0, 0.85, 0.6, 0.3)
    best: Ids | None = None
    best_top = np.full(len(problem.weight), np.inf)
    truncated = False
    for fraction in fractions:
        replicas = replicas_by_node(problem, homes, off_home * fraction)
        table, top, cut = _pack_nodes(problem, replicas, sweeps)
        truncated |= cut
        if best is None:
            best, best_top = table, top
        else:
            better = top < best_top * (1 - 1e-6)
            best[better], best_top = table[better], np.minimum(top, best_top)
        if truncated or (best_top <= problem.weight.sum(axis=1) / problem.num_ranks * 1.002).all():
            break
    assert best is not None
    return best, homes, truncated


def choose_homes(problem: Problem, num_groups: int | None) -> Counts:
    """Returns the home node of each expert, [L, E] int64; it has room for min_replicas of each.

    Whole groups, heaviest first, go to the node with the least load per rank; nodes take groups in proportion to their
    ranks. Where groups do not fit, single experts do the same. Raises PlacementError as `home_units`.
    """
    weight, ranks_of = problem.weight, np.bincount(problem.node_of)
    num_layers, num_experts = weight.shape
    units, room = home_units(problem, num_groups)
    size = num_experts // units
    capacity = np.minimum(-(-units * ranks_of // ranks_of.sum()), room)
    by_unit = weight.reshape(num_layers, units, size).sum(axis=2)
    return np.repeat(_spread(by_unit, capacity, ranks_of), size, axis=1)


def home_units(problem: Problem, num_groups: int | None) -> tuple[int, Counts]:
    """Returns how many equal parts of the experts have a home each, and how many of them each node has slots for, [N].

    The parts are the router's groups where all of these fit whole onto nodes, in proportion to the nodes' ranks; else
    single experts.
    Raises PlacementError where single experts do not fit either, which can be with min_replicas above 1 only.
    """
    ranks_of, least, num_experts = np.bincount(problem.node_of), problem.min_replicas, problem.weight.shape[1]
    room = np.where(ranks_of < least, 0, ranks_of * problem.slots_per_rank // least)
    for units in dict.fromkeys((num_groups or num_experts, num_experts)):
        fits: Counts = room // (num_experts // units)
        if np.minimum(-(-units * ranks_of // ranks_of.sum()), fits).sum() >= units:
            return units, fits
    raise PlacementError(
        f"min_replicas is {least} and off_home {problem.request.off_home:g}: the nodes that take part have "
        f"{', '.join(map(str, ranks_of))} ranks of {problem.slots_per_rank} slots and cannot be home to {least} "
        f"replicas of each of {num_experts} experts; use more slots, or off_home 1"
    )


def read_homes(problem: Problem, table: Ids) -> Counts:
    """Returns the home nodes that a table [L, R, K] shows, [L, E]: of each group, or single expert, the node with most
    of its experts, then with most of its replicas, as far as the node has slots for it."""
    num_layers, num_experts = problem.weight.shape
    units, room = home_units(problem, problem.request.num_groups)
    replicas = replicas_per_node(problem, table).reshape(num_layers, problem.num_nodes, units, -1)
    score = (replicas > 0).sum(axis=3) * (problem.num_slots + 1) + replicas.sum(axis=3)  # [L, N, U]
    homes: Counts = score.argmax(axis=1)
    filled = (homes[:, None] == np.arange(problem.num_nodes)[:, None]).sum(axis=2)
    for layer in np.flatnonzero((filled > room).any(axis=1)):
        left = room.copy()
        for unit in np.argsort(-score[layer].max(axis=0), kind="stable"):
            node = np.where(left > 0, score[layer, :, unit], -1).argmax()
            homes[layer, unit], left[node] = node, left[node] - 1
    return np.repeat(homes, num_experts // units, axis=1)


def has_single_homes(problem: Problem) -> bool:
    """Returns whether experts have homes one by one: without router groups, and where these do not fit onto nodes."""
    return bool(home_units(problem, problem.request.num_groups)[0] == problem.weight.shape[1])


def num_homeless(problem: Problem, table: Ids, homes: Counts) -> Counts:
    """Returns how many experts of each layer have fewer than min_replicas replicas on their home node, [L]."""
    at_home = np.take_along_axis(replicas_per_node(problem, table), homes[:, None], axis=1)[:, 0]
    missing: Counts = (at_home < problem.min_replicas).sum(axis=1)
    return missing


def share_off_home(problem: Problem, table: Ids, homes: Counts) -> tuple[Floats, Counts]:
    """Returns the share of the weight that replicas off home carry, [L], and the number of these replicas, [L]."""
    replicas = replicas_per_node(problem, table)
    at_home = np.take_along_axis(replicas, homes[:, None], axis=1)[:, 0]
    count = replicas.sum(axis=1)
    away = sum_in_order(problem.weight * (1 - at_home / np.maximum(count, 1)), axis=1)
    total = sum_in_order(problem.weight, axis=1)
    return away / np.where(total > 0, total, 1.0), (count - at_home).sum(axis=1)


def is_over_budget(problem: Problem, table: Ids, homes: Counts) -> NDArray[np.bool_]:
    """Returns whether replicas off home carry more than the budget, [L]; with a budget of 0, whether there are any."""
    share, num_guests = share_off_home(problem, table, homes)
    over: NDArray[np.bool_] = share > problem.request.off_home + SHARE_NOISE
    return over | ((num_guests > 0) & (problem.request.off_home == 0))


def _spread(load: Floats, capacity: Counts, ranks_of: Counts) -> Counts:
    """Returns the node of each item, heaviest first to the least loaded node with room: load [L, G] -> [L, G]."""
    num_layers, num_items = load.shape
    order = np.argsort(-load, axis=1, kind="stable")
    node_load = np.zeros((num_layers, len(capacity)))
    left = np.tile(capacity, (num_layers, 1))
    where = np.empty((num_layers, num_items), dtype=np.int64)
    rows = np.arange(num_layers)
    for i in range(num_items):
        node = np.where(left > 0, node_load / ranks_of, np.inf).argmin(axis=1)
        item = order[:, i]
        where[rows, item] = node
        node_load[rows, node] += load[rows, item]
        left[rows, node] -= 1
    return where


def replicas_by_node(problem: Problem, homes: Counts, budget: float) -> Counts:
    """Returns how many replicas of each expert each node holds, [L, N, E] int64.

    Every expert has min_replicas on its home node. Free slots go one at a time to the (node, expert) that lowers a
    smooth maximum over ranks most, where a rank is modelled as an average slice of its node, and as a heavy replica
    beside light ones. Replicas off home are allowed while they serve a share of the load within `budget`.
    """
    weight, ranks_of, slots_per_rank = problem.weight, np.bincount(problem.node_of), problem.slots_per_rank
    num_layers, num_experts = weight.shape
    num_nodes, least = len(ranks_of), problem.min_replicas
    rows = np.arange(num_layers)
    at_home_node = homes[:, None, :] == np.arange(num_nodes)[None, :, None]
    replicas: Counts = least * at_home_node.astype(np.int64)
    total = weight.sum(axis=1)
    mean = np.where(total > 0, total, 1.0) / ranks_of.sum()
    unit = weight / mean[:, None]  # loads in mean rank loads from here on
    company = (slots_per_rank - 1) * np.sort(unit, axis=1)[:, : max(1, num_experts // 2)].mean(axis=1)
    count = np.full(weight.shape, float(least))
    away = np.zeros(num_layers)  # load served off home
    allowed = budget * ranks_of.sum() + 1e-9
    free = ranks_of * slots_per_rank - replicas.sum(axis=2)
    home_replicas = count.copy()
    for _ in range(int(free.sum(axis=1).max(initial=0))):
        each = unit / count
        next_each = unit / (count + 1)
        node_load = (replicas * each[:, None, :]).sum(axis=2) / ranks_of
        peak = np.maximum(node_load.max(axis=1), (each.max(axis=1) + company))[:, None]
        slope = np.exp(STEEPNESS * (node_load - peak))  # [L, N]: how much load on a node hurts
        drop = each - next_each
        relieved = np.einsum("ln,lne->le", slope, replicas) * drop
        heavy = count * np.exp(STEEPNESS * (each + company[:, None] - peak)) - (count + 1) * np.exp(
            STEEPNESS * (next_each + company[:, None] - peak)
        )
        gain = (relieved + heavy / STEEPNESS)[:, None, :] - slope[:, :, None] * next_each[:, None, :]
        # Where nothing helps, prefer the expert with the heaviest replicas, at home.
        gain += 1e-9 * next_each[:, None, :] + 1e-12 * (1.0 / count)[:, None, :]
        legal = (free > 0)[:, :, None] & (replicas < ranks_of[None, :, None])
        new_away = away[:, None] + unit * ((count - home_replicas + 1) / (count + 1) - (count - home_replicas) / count)
        legal &= at_home_node | ((new_away <= allowed) & (budget > 0))[:, None, :]
        gain = np.where(legal, gain, -np.inf).reshape(num_layers, -1)
        best = gain.argmax(axis=1)
        x = rows[np.isfinite(gain[rows, best])]
        if len(x) == 0:
            break
        node, expert = best[x] // num_experts, best[x] % num_experts
        local = at_home_node[x, node, expert]
        replicas[x, node, expert] += 1
        free[x, node] -= 1
        count[x, expert] += 1
        home_replicas[x, expert] += local
        away = (unit * (1.0 - home_replicas / count)).sum(axis=1)
    return replicas


def _pack_nodes(problem: Problem, replicas: Counts, sweeps: int) -> tuple[Ids, Floats, bool]:
    """Returns the table [L, R, K], its heaviest rank load [L], and whether the deadline passed."""
    num_layers, _, num_experts = replicas.shape
    ranks_of = np.bincount(problem.node_of)
    first_rank = np.cumsum(ranks_of) - ranks_of
    slots = problem.slots_per_rank
    count = replicas.sum(axis=1)
    table = np.empty((num_layers, problem.num_ranks, slots), dtype=np.int32)
    top = np.zeros(num_layers)
    cut = False
    for size in np.unique(ranks_of):
        nodes = np.flatnonzero(ranks_of == size)
        ids = list_replicas(replicas[:, nodes].reshape(-1, num_experts), int(size) * slots)
        load = replica_load(
            np.repeat(problem.weight, len(nodes), axis=0),
            np.repeat(count, len(nodes), axis=0),
            ids,
            None if problem.fixed is None else np.repeat(problem.fixed, len(nodes), axis=0),
        )
        packed, packed_load = (pack_longest_first if sweeps else pack_in_rounds)(ids, load, int(size))
        repair_duplicates(packed, packed_load)
        if sweeps:
            cut |= swap_until_even(packed, packed_load, sweeps, deadline=problem.deadline)
        by_layer = packed.reshape(num_layers, len(nodes), int(size), slots)
        for i, node in enumerate(nodes):
            table[:, first_rank[node] : first_rank[node] + size] = by_layer[:, i]
        top = np.maximum(top, packed_load.sum(axis=2).reshape(num_layers, -1).max(axis=1))
    return table, top, cut
