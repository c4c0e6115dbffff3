"""Why a plan is not moved to, and what would help where no move and no split can. Shape words: L = MoE layers."""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.rebalance.gate import Gate
from moe_serve.eplb.split_limit import where_no_split_helps

Floats = NDArray[np.float64]


def keep_decision(
    step: int, target: Placement, gains_s: Floats, costs_s: Floats, gate: Gate, margin: float
) -> Decision:
    """Returns the decision to stay where the gate has chosen no layer of `target`.

    gains_s, costs_s: [L] as for `Gate.choose_layers`;  margin: gain_margin of the settings
    """
    worth = gains_s * gate.reach
    pays = bool((worth[costs_s > 0] >= margin * costs_s[costs_s > 0]).any())
    reason = "worth it, but the regret bound does not cover the risk" if pays else "no layer is worth its move"
    no_split = where_no_split_helps(gate.planning_load()[0], target)
    if no_split is not None:
        reason += f". As planned: {no_split}"
    return Decision(step, "keep", reason, (), float(worth[worth > 0].sum()), float(costs_s.sum()))
