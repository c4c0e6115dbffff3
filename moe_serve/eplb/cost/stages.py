"""The time of a layer in which two half-batches overlap: while one computes, rows of the other travel.

Both pass attention, dispatch, experts and combine, half a layer apart, so that a layer has four stages:

    compute   attention of a     attention of b     experts of a     experts of b
    wires     combine of b       dispatch of a      dispatch of b    combine of a

A stage lasts as long as the longer of its sides. The shared expert is computed beside a combine, which carries twice
the bytes of a dispatch (the order of DeepSeek's published profile, and of SGLang's two-batch overlap).
"""

from dataclasses import dataclass

import numpy as np

from moe_serve.eplb.cost.batch import Floats


@dataclass(frozen=True)
class Sides:
    """Seconds of one half-batch. experts, dispatch, combine: [L]; attention and shared are the same in each layer"""

    attention: float
    experts: Floats
    shared: float
    dispatch: Floats
    combine: Floats


def overlapped_seconds(sides: Sides, alone: tuple[float, float] = (0.0, 0.0)) -> Floats:
    """Returns the time of both half-batches in each layer: [L].

    alone: seconds of a dispatch, and of a combine, beside which nothing computes
    """
    dispatch, combine = sides.dispatch - alone[0], sides.combine - alone[1]
    return (
        2 * sum(alone)
        + np.maximum(sides.attention + sides.shared, combine)
        + np.maximum(sides.attention, dispatch)
        + np.maximum(sides.experts, dispatch)
        + np.maximum(sides.experts + sides.shared, combine)
    )
