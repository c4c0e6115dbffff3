"""What the balancer reports to the front ends. Torch-free."""

from typing import Any

import msgspec

from moe_serve.engine.protocol.message import Message


class WindowReport(msgspec.Struct, frozen=True, array_like=True):
    """The load of a closed window.

    balancedness: mean / max of rank load, of each layer, on the placement in use at its beginning
    mean_at_end:  mean over layers on the placement in use at its end: what a move within it has brought
    """

    first_step: int
    num_steps: int
    phase: str
    step_time_s: float
    balancedness: list[float]
    rank_load: list[list[float]]  # [layers][ranks] tokens, under the split in use, evenly shared
    tokens: list[list[int]]  # [layers][experts]
    mean_at_end: float


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


class BalanceReport(Message, tag="balance", frozen=True):
    """Where experts are and what the balancer does: sent by the lowest rank that takes part, at every change.

    state:     "watching", "planning", "moving", or "off"
    alarm:     why the balancer has switched itself off; "" = it has not
    window:    the newest closed window, in the report that follows its end only
    decisions: those since the last report, oldest first
    totals:    running totals by name: see engine/balancing/balance_reports.py
    placement: [layers][slots] logical experts, in the report that follows a change only
    splits:    how batches of each phase are split, and what the exact split gains: SplitChoice.describe
    """

    rank: int
    launch_id: int
    step: int
    mode: str
    state: str
    placement_version: int
    totals: dict[str, float]
    alarm: str = ""
    window: WindowReport | None = None
    decisions: list[DecisionReport] = []
    placement: list[list[int]] | None = None
    splits: dict[str, Any] = {}
