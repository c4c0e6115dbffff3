"""Parts of the report that the balancer sends to the front end (`messages.BalanceReport`). Torch-free."""

import msgspec


class WindowReport(msgspec.Struct, frozen=True, array_like=True):
    """The load of a closed window. balancedness: mean / max of rank load, of each layer"""

    first_step: int
    num_steps: int
    phase: str
    step_time_s: float
    balancedness: list[float]
    rank_load: list[list[float]]  # [layers][ranks] tokens, under the split in use, evenly shared
    tokens: list[list[int]]  # [layers][experts]


class DecisionReport(msgspec.Struct, frozen=True, array_like=True):
    """What the balancer decided, and why. at_s: seconds since the epoch (wall clock);  kind: see rebalance/events.py"""

    at_s: float
    step: int
    kind: str
    reason: str
    num_layers: int
    gain_s: float  # predicted, over the horizon; of "watch": what the last move had promised
    cost_s: float  # predicted
    realised_s: float = 0.0  # of "watch": what the last move has gained
