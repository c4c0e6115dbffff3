"""A rebalancer's question to a policy, about some layers of its placement, and the answer as a whole placement.

Shape words: L = MoE layers, E = experts, P = slots.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]


def request_for(
    current: Placement,
    rows: NDArray[np.int64],
    load: tuple[Floats, Floats | None, Floats | None],
    topology: Topology,
    settings: RebalanceSettings,
) -> PlanRequest:
    """Returns the request for these rows of the placement. load: of all layers, as from `Gate.planning_load`."""
    tokens, by_source, activations = load
    part = replace(
        current,
        physical_to_logical=current.physical_to_logical[rows],
        moe_layer_ids=tuple(current.moe_layer_ids[row] for row in rows),
    )
    lost = np.setdiff1d(np.arange(current.num_ranks), current.live_ranks)
    rules = replace(settings.rules, min_replicas=_replicas_that_fit(current, settings.min_replicas))
    return rules.request(
        tokens[rows],
        topology,
        current.num_slots,
        current=part,
        by_source=None if by_source is None else by_source[rows],
        activations=None if activations is None else activations[rows],
        excluded_ranks=tuple(lost.tolist()),
    )


def _replicas_that_fit(placement: Placement, wanted: int) -> int:
    """Returns on how many ranks each expert can be, at most as many as wanted."""
    num_live = len(placement.live_ranks)
    return max(1, min(wanted, num_live, num_live * placement.slots_per_rank // placement.num_logical))


def with_rows(current: Placement, part: Placement, rows: tuple[int, ...]) -> Placement:
    """Returns the placement with another one's layers in these rows. Raises PlacementError where they do not fit."""
    have = (part.num_layers, part.num_logical, part.num_slots)
    need = (len(rows), current.num_logical, current.num_slots)
    if have != need:
        raise PlacementError(f"the plan has (layers, experts, slots) = {have}, the request {need}")
    table = current.physical_to_logical.copy()
    table[list(rows)] = part.physical_to_logical
    return replace(current, physical_to_logical=table)


def check_fit(record: LoadRecord, placement: Placement) -> None:
    """Raises PlacementError where the record is of another model than the placement."""
    shape = (placement.num_layers, placement.num_logical)
    if record.tokens.shape != shape:
        raise PlacementError(
            f"the record of step {record.first_step} has shape {record.tokens.shape}, the placement {shape}; feed "
            "records of the model that is served"
        )


def placed_as(current: Placement, table: Sequence[Sequence[int]]) -> Placement:
    """Returns the placement with these rows: [layers][slots] logical experts, -1 = empty.

    Raises PlacementError, saying why, where it does not fit: another shape, an expert without a slot, a slot of a rank
    that takes no part.
    """
    have = (len(table), sorted({len(row) for row in table}))
    need = (current.num_layers, [current.num_slots])
    if have != need:
        raise PlacementError(
            f"the placement has {have[0]} layers of {have[1]} slots, the one in use {need[0]} of {need[1]}; give "
            "[layers][slots] of logical experts, as GET /eplb/placement shows them"
        )
    # The placement in use may be one of a group without lost ranks, which lets experts be lost; a new one must not.
    wanted = replace(current, physical_to_logical=np.array(table, dtype=np.int64), allow_lost=False)
    lost = np.setdiff1d(wanted.live_ranks, current.live_ranks)
    if len(lost):
        raise PlacementError(
            f"ranks {lost.tolist()} take no part now, and their slots must stay empty (-1); the others are ranks "
            f"{current.live_ranks.tolist()}"
        )
    return wanted
