"""Lowers the number of tokens that cross nodes, for the objectives off_node and step_time; needs load by source rank.

Under an even split a replica of expert e on node n gets its share of every source's tokens for e; those from n stay on
the node. So it matters how many tokens of e come from the nodes that hold its replicas. First whole nodes trade their
contents, which changes no rank's load; then replicas of similar load on different nodes are swapped.

Shape words: L = layers, E = experts, N = nodes, R = ranks, K = slots per rank.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.packing import replica_load, replicas_in
from moe_serve.eplb.policies.problem import Problem, replicas_per_node
from moe_serve.eplb.relabel import cheapest_columns

Floats = NDArray[np.float64]
Ids = NDArray[np.int32]
WHOLE = 2.0**40  # shares as whole numbers


def improve_locality(problem: Problem, table: Ids, sweeps: int) -> Ids:
    """Returns a table [L, R, K] with fewer tokens between nodes; the same one unless the objective asks for it.

    A swap may raise the heaviest rank as far as the weights of the objective allow: by the mean rank load times
    (weight of off_node x the share of tokens saved). With off_node alone the maximum never rises.
    """
    price = price_of_locality(problem)
    if price == 0:
        return table
    local = tokens_by_node(problem)
    table = _trade_nodes(problem, table, local)
    _swap_between_nodes(problem, table, local, price, sweeps)
    return table


def price_of_locality(problem: Problem) -> float:
    """Returns how much of a mean rank load an off-node share of 1 costs; infinity is off_node alone.

    0 where the objective does not ask for it, on one node, and where the sources of tokens are not known.
    """
    if problem.num_nodes == 1 or problem.request.by_source is None:
        return 0.0
    weights = problem.request.objective_weights
    price = float(weights.get("off_node", 0.0))
    cost = problem.request.cost
    if cost is not None and weights.get("step_time") and cost.token_s > 0:
        price += weights["step_time"] * cost.off_node_token_s / cost.token_s
    balanced = sum(value for name, value in weights.items() if name != "off_node")
    return 0.0 if price == 0 else price / balanced if balanced else np.inf


def tokens_by_node(problem: Problem) -> Floats:
    """Returns the share of each layer's tokens that go from each node to each expert, [L, N, E]."""
    assert problem.request.by_source is not None
    by_rank = problem.request.by_source[:, problem.ranks].astype(np.float64)
    by_node = np.stack([by_rank[:, problem.node_of == n].sum(axis=1) for n in range(problem.num_nodes)], axis=1)
    total = problem.request.by_source.sum(axis=(1, 2), dtype=np.float64)
    share: Floats = by_node / np.where(total > 0, total, 1.0)[:, None, None]
    return share


def off_node_share(problem: Problem, table: Ids) -> Floats:
    """Returns the share of each layer's tokens that leave their node under an even split, [L]."""
    replicas = replicas_per_node(problem, table)
    local = tokens_by_node(problem)
    share: Floats = local.sum(axis=(1, 2)) - (local * replicas / replicas.sum(axis=1)[:, None]).sum(axis=(1, 2))
    return share


def _trade_nodes(problem: Problem, table: Ids, local: Floats) -> Ids:
    """Gives the contents of nodes with equally many ranks to the nodes that send them most."""
    num_layers, num_experts = problem.weight.shape
    sizes = np.bincount(problem.node_of)
    if len(set(sizes.tolist())) > 1:
        return table
    counts = np.maximum(replicas_in(table, num_experts), 1)
    by_node = table.reshape(num_layers, problem.num_nodes, sizes[0], -1)
    here = np.stack([replicas_in(by_node[:, n], num_experts) for n in range(problem.num_nodes)], axis=1)
    kept = np.einsum("lae,lbe->lab", here / counts[:, None], local)  # contents a on node b
    out = np.empty_like(by_node)
    for layer in range(num_layers):
        out[layer, cheapest_columns(np.rint(-WHOLE * kept[layer]).astype(np.int64))] = by_node[layer]
    return out.reshape(table.shape)


def _swap_between_nodes(problem: Problem, table: Ids, local: Floats, price: float, sweeps: int) -> None:
    """Swaps replicas between ranks of different nodes, paired at random, in place."""
    num_layers, num_experts = problem.weight.shape
    num_ranks, slots = table.shape[1:]
    counts = np.maximum(replicas_in(table, num_experts), 1)
    load = replica_load(problem.weight, counts, table, problem.fixed)
    mean = np.maximum(load.sum(axis=(1, 2)) / num_ranks, 1e-300)
    kept = np.concatenate([local / counts[:, None], np.zeros((num_layers, problem.num_nodes, 1))], axis=2)
    draw = np.random.default_rng(problem.request.seed)
    rows = np.arange(num_layers)[:, None]
    for _ in range(sweeps):
        order = draw.permuted(np.tile(np.arange(num_ranks), (num_layers, 1)), axis=1)
        half = num_ranks // 2
        a, b = order[:, :half], order[:, half : 2 * half]
        total = load.sum(axis=2)
        top = total.max(axis=1)[:, None, None, None]
        ids_a, ids_b, load_a, load_b = table[rows, a], table[rows, b], load[rows, a], load[rows, b]
        node_a, node_b = problem.node_of[a][:, :, None], problem.node_of[b][:, :, None]
        third = rows[:, :, None]
        gain_a = (
            kept[third, node_b, ids_a] - kept[third, node_a, ids_a]
        )  # tokens that stay local when a's replicas move to b's node
        gain_b = kept[third, node_a, ids_b] - kept[third, node_b, ids_b]
        gain = gain_a[:, :, :, None] + gain_b[:, :, None, :]
        shift = load_a[:, :, :, None] - load_b[:, :, None, :]
        higher = np.maximum(total[rows, a][:, :, None, None] - shift, total[rows, b][:, :, None, None] + shift)
        rise = np.maximum(higher - top, 0.0) / mean[:, None, None, None]
        if np.isinf(price):
            gain[rise > 1e-12] = -np.inf
        else:
            gain -= rise / price
        same = (ids_a[:, :, :, None] == ids_b[:, :, None, :]) & (ids_a >= 0)[:, :, :, None]
        gain[same.any(axis=3)] = -np.inf
        gain.transpose(0, 1, 3, 2)[same.any(axis=2)] = -np.inf
        flat = gain.reshape(num_layers, half, -1)
        best = flat.argmax(axis=2)
        value = np.take_along_axis(flat, best[:, :, None], axis=2)[:, :, 0]
        # Only the best swap of a layer may raise the maximum, so that such swaps cannot add up.
        which = value > 1e-12
        if not np.isinf(price):
            raises = np.take_along_axis(rise.reshape(num_layers, half, -1), best[:, :, None], axis=2)[:, :, 0] > 0
            first = np.where(which, value, -np.inf).argmax(axis=1)
            which &= ~raises | (np.arange(half) == first[:, None])
        x, p = np.nonzero(which)
        for array in (table, load):
            kept_a = array[x, a[x, p], best[x, p] // slots]
            array[x, a[x, p], best[x, p] // slots] = array[x, b[x, p], best[x, p] % slots]
            array[x, b[x, p], best[x, p] % slots] = kept_a
