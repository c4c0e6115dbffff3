"""What a gated MLP makes of gate and up before its down projection. Torch-free: `models/spec.py` reads it."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Activation:
    """The elementwise middle of an MLP.

    silu:           silu(gate) * up
    clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up from -limit to limit
                    (gpt-oss)
    """

    kind: Literal["silu", "clamped_swiglu"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf


SILU = Activation()
