"""Predicted times for replays and simulations, from a model profile and a hardware profile."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.model import Batch, CostModel, PredictedCost
from moe_serve.eplb.load import LoadTrace, slot_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.arrivals import Arrivals
from moe_serve.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ProfileCosts:
    """What a replay asks the cost model.

    phase:   of windows that do not say it ("mixed")
    context: decode: tokens in the cache per request; prefill: length of a prompt
    """

    model: CostModel
    phase: Literal["prefill", "decode"] = "decode"
    context: float = 4096.0

    @property
    def expert_bytes(self) -> int:
        return self.model.model.expert_bytes

    def check(self, trace: LoadTrace) -> None:
        """Raises ConfigError when the trace is of another model."""
        profile = self.model.model
        have = (len(trace.moe_layer_ids), trace.num_logical, trace.topk or profile.topk)
        want = (profile.num_moe_layers, profile.num_logical, profile.topk)
        if have != want:
            raise ConfigError(
                f"the trace has {have[0]} MoE layers x {have[1]} experts, top {have[2]}, the profile {profile.name} "
                f"{want[0]} x {want[1]}, top {want[2]}; name the profile of the traced model, or leave --model out"
            )

    def step_seconds(
        self, tokens: Floats, placement: Placement | None, num_slots: int, tokens_per_step: float, phase: str
    ) -> float:
        """Returns the time of one step in seconds.

        tokens:          [L, E] routed in it, as means over a window's steps
        placement:       None = every slot has the same load
        tokens_per_step: of all ranks
        """
        if placement is None:
            rows = np.repeat(tokens.sum(axis=1, keepdims=True) / num_slots, num_slots, axis=1)
        else:
            rows = slot_load(tokens, placement)
        kind = self._phase(phase)
        batch = Batch(kind, tokens_per_step / self.model.topology.num_ranks, self.context)
        return self.model.step(batch, rows, is_mean=True).total_s

    def stall_seconds(self, arrivals: Arrivals) -> float:
        """Returns how long serving stops when these experts move at once: the time of the rank that receives most."""
        busiest = {(int(near), int(far)) for near, far in zip(arrivals.from_node, arrivals.off_node, strict=True)}
        return max(self.model.transfer_seconds(near, far) for near, far in busiest)

    def gate(self) -> PredictedCost:
        """Returns the same cost model for the rebalancer's gate."""
        return PredictedCost(self.model, Batch(self.phase, 1, self.context).mode)

    def words(self) -> str:
        """Returns one line for reports."""
        model, hardware = self.model.model, self.model.hardware
        return f"{model.name} on {hardware.name}, {self.phase} unless the trace says it, context {self.context:,.0f}"

    def _phase(self, phase: str) -> Literal["prefill", "decode"]:
        if phase == "prefill":
            return "prefill"
        return "decode" if phase == "decode" else self.phase
