"""What one rank runs in one step, and the seconds that parts of it take."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.links import Mode

Floats = NDArray[np.float64]
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Batch:
    """What one rank runs in one step.

    phase:           "decode" (every token is a request's next one) or "prefill" (tokens are prompt chunks)
    tokens_per_rank: new tokens; those of a prompt that the cache holds are not among them
    context:         decode: tokens in the cache per request; prefill: length of a prompt
    two_batch:       overlap two half-batches
    cache_hit:       prefill: share of each prompt that the cache holds
    """

    phase: Phase
    tokens_per_rank: float
    context: float
    two_batch: bool = False
    cache_hit: float = 0.0

    @property
    def mode(self) -> Mode:
        """The dispatch kernels that such a batch uses."""
        return "low_latency" if self.phase == "decode" else "normal"


@dataclass(frozen=True, eq=False)
class LayerTime:
    """Seconds of the MoE part of each layer, [L]; the busiest rank sets each."""

    dispatch_s: Floats
    ffn_s: Floats
    combine_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.dispatch_s + self.ffn_s + self.combine_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `total_s` includes overlap and the engine's factor; the parts are plain sums over layers."""

    total_s: float
    attention_s: float
    dispatch_s: float
    ffn_s: float
    combine_s: float
    shared_s: float
    other_s: float
