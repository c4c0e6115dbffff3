"""The times that the rebalancer's gate asks for, and the measurements from which they are learned.

`model.PredictedCost` answers from profiles of a model and its hardware, `measured.MeasuredCost` from what the running
system has measured. Shape words: L = MoE layers, E = experts.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.migration.moves import MigrationRound
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology

Floats = NDArray[np.float64]


class GateCost(Protocol):
    """Predicts serving time. A pure function of the measurements it got; loads are means over a window's steps.

    learns: whether `learn_window` teaches it anything
    """

    learns: bool = False

    def layer_seconds(self, tokens: Floats, activations: Floats | None, placement: Placement) -> Floats:
        """Returns the seconds of a step that depend on the placement, by layer, [L].

        tokens:      [L, E] of all ranks
        activations: [L, E] share of the steps in which the expert has tokens; None = not recorded
        """
        ...

    def migration_seconds(self, plan: MigrationPlan, topology: Topology) -> float:
        """Returns the serving time that all rounds of the plan cost."""
        ...

    def other_seconds(self, tokens: Floats, activations: Floats | None, placement: Placement) -> float:
        """Returns the seconds of a step beside those of `layer_seconds`, as far as they are known."""
        return 0.0

    def learn_window(self, record: LoadRecord, placement: Placement) -> bool:
        """Takes a window that this placement served from its first step to its last; returns whether prices changed."""
        return False

    def learn_round(self, finished: MigrationRound, topology: Topology, move_s: float, pause_s: float) -> None:
        """Takes a round of moves. move_s: from its start to its activation;  pause_s: for which serving stood still"""
        return

    @property
    def off_node_weight(self) -> float:
        """What an expert that crosses from one node to another costs, as times one that stays on its node."""
        return 1.0
