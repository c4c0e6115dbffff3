"""What a rebalancer hears and what it asks for. Plain data: a trace file keeps it, replay and simulator rebuild it.

Events go in, actions come out; every one carries the engine step it belongs to. In time order a rebalance is

    WindowClosed -> RequestPlan -> PlanReady -> StartRound -> RoundActivated -> StartRound -> ... -> RoundActivated

where RequestPlan and StartRound are actions of the rebalancer, and the rest are events from whoever drives it.
"""

from dataclasses import dataclass

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.migration.moves import MigrationRound
from moe_serve.eplb.policies.policy import Plan, PlanRequest


@dataclass(frozen=True)
class WindowClosed:
    """A window of load is complete. step: the first step after the window, first_step + num_steps of the record."""

    step: int
    record: LoadRecord


@dataclass(frozen=True)
class PlanReady:
    """The planner has answered. request_id: of the RequestPlan this answers; an answer to an older one is dropped."""

    step: int
    request_id: int
    plan: Plan


@dataclass(frozen=True)
class PlanFailed:
    """The planner died, ran out of time, or gave no legal plan. reason: for the decision log."""

    step: int
    request_id: int
    reason: str


@dataclass(frozen=True)
class RoundActivated:
    """A round is live on all ranks from this step on. version: of the StartRound that it ends."""

    step: int
    version: int


@dataclass(frozen=True)
class MigrationFailed:
    """The running round was given up on all ranks; the placement before it stays in use. reason: for the log."""

    step: int
    reason: str


Event = WindowClosed | PlanReady | PlanFailed | RoundActivated | MigrationFailed


@dataclass(frozen=True)
class RequestPlan:
    """Ask the planner; answer with PlanReady or PlanFailed of the same request_id, in any later step.

    layer_rows: rows of the full placement that the request is about; `request.tokens`, `request.current` and the
                plan hold only these rows, in this order
    """

    step: int
    request_id: int
    layer_rows: tuple[int, ...]
    request: PlanRequest


@dataclass(frozen=True)
class StartRound:
    """Bring these experts into staging, then activate them on all ranks at one step boundary: RoundActivated.

    version:    of the placement once the round is active
    num_bytes:  the most that one rank receives or sends in this round
    num_steps:  spread the transfer over at least this many steps, which keeps it inside the byte budget of a step:
                RoundActivated.step >= step + num_steps
    is_last:    no further round of this migration follows
    """

    step: int
    round: MigrationRound
    version: int
    num_bytes: int
    num_steps: int
    is_last: bool


Action = RequestPlan | StartRound
