"""The rows that one all-to-all sends over links and NICs, and the time of the slowest of them.

Low latency sends one row per (token, expert). Normal sends one per (token, node) over the NICs, where any rank of the
node may receive it for the others, and one per (token, rank) over the links, also for rows that came over a NIC.

Shape words: R = ranks, N = nodes.
"""

from dataclasses import dataclass
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.profile_files import HardwareProfile
from moe_serve.topology import Topology

Floats = NDArray[np.float64]
Mode = Literal["low_latency", "normal"]


@dataclass(frozen=True)
class Sharing:
    """Rows sent per route where one row serves several experts of a token: per node, and per rank."""

    node: float
    rank: float


@dataclass(frozen=True, eq=False)
class BusiestRows:
    """Rows on the busiest link of a rank, NIC of a rank, and node's NICs together; [...] each, in or out."""

    link: Floats
    nic: Floats
    node: Floats


def busiest_rows(rank_rows: Floats, topology: Topology, sharing: Sharing | None = None) -> BusiestRows:
    """Returns the most rows that any link or NIC carries, where every rank sends an equal part to each destination.

    rank_rows: [..., R] routes that end at each rank, a part of them from the rank itself
    sharing:   None = one row per route (low latency)
    """
    num_nodes, per_node = topology.num_nodes, topology.ranks_per_node
    split = (*rank_rows.shape[:-1], num_nodes, per_node)
    near_in, self_in = rank_rows / num_nodes, rank_rows / topology.num_ranks
    near_out = np.repeat(rank_rows.reshape(split).sum(axis=-1) / topology.num_ranks, per_node, axis=-1)
    out = np.broadcast_to(rank_rows.mean(axis=-1, keepdims=True), rank_rows.shape)
    far_in, far_out = rank_rows - near_in, out - near_out
    node = np.maximum(far_in.reshape(split).sum(axis=-1), far_out.reshape(split).sum(axis=-1)).max(axis=-1)
    if sharing is None:
        link = np.maximum(near_in - self_in, near_out - self_in).max(axis=-1)
        return BusiestRows(link, np.maximum(far_in, far_out).max(axis=-1), node)
    node = node * sharing.node
    return BusiestRows((rank_rows - self_in).max(axis=-1) * sharing.rank, node / per_node, node)


def carry_seconds(rows: BusiestRows, row_bytes: float, hardware: HardwareProfile, mode: Mode) -> Floats:
    """Returns the time of the slowest link or NIC: [...]."""
    share = hardware.nic_efficiency_low_latency if mode == "low_latency" else hardware.nic_efficiency_normal
    link = rows.link / (hardware.link_bytes_per_s * hardware.link_efficiency)
    nic = rows.nic / (hardware.nic_bytes_per_s * share)
    node = rows.node / (hardware.node_nic_bytes_per_s * share)
    return np.asarray(row_bytes * np.maximum(link, np.maximum(nic, node)))


def expected_places(num_places: int, num_logical: int, topk: int, num_groups: int, topk_groups: int) -> float:
    """Returns on how many nodes (or ranks), called places here, the experts of a token are on average.

    Tokens pick topk_groups of num_groups groups, then topk experts inside them, uniformly. Places hold whole groups, or
    equal parts of one; otherwise experts are assumed to be spread at random.
    """
    per_place = num_logical / num_places
    per_group = num_logical // num_groups
    groups_here, rest = divmod(num_groups, num_places)
    if num_groups > 1 and groups_here and not rest:  # j of the place's groups are among the picked ones
        ways = comb(num_groups, topk_groups)
        return num_places * sum(
            comb(groups_here, j)
            * comb(num_groups - groups_here, topk_groups - j)
            / ways
            * (1 - _miss(topk_groups * per_group, j * per_group, topk))
            for j in range(min(groups_here, topk_groups) + 1)
        )
    if num_groups > 1 and num_places % num_groups == 0:
        return num_places * topk_groups / num_groups * (1 - _miss(topk_groups * per_group, per_place, topk))
    return num_places * (1 - _miss(num_logical, per_place, topk))


def _miss(total: int, here: float, picks: int) -> float:
    """Returns the chance that none of `picks` of `total` experts is one of `here`."""
    chance = 1.0
    for taken in range(picks):
        chance *= max(0.0, 1 - here / (total - taken)) if total > taken else 0.0
    return chance
