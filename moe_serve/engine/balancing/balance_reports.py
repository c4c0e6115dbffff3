"""What the leader of the ranks tells the front end about the load, the placement and the balancer.

A `BalanceReport` is made when something has changed, and holds what has changed. Torch-free.
"""

import time
from collections.abc import Callable, Sequence

from moe_serve.engine.protocol.balance_messages import BalanceReport, DecisionReport, WindowReport
from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import Decision


class BalanceReports:
    """Makes the reports of one leader.

    mode: eplb.mode;  wall_s: seconds since the epoch
    """

    def __init__(self, rank: int, launch_id: int, mode: str, wall_s: Callable[[], float] = time.time):
        self._rank = rank
        self._launch_id = launch_id
        self._mode = mode
        self._wall_s = wall_s
        self._window: WindowReport | None = None
        self._placement: Placement | None = None  # of the last report

    def window_closed(self, record: LoadRecord, placement: Placement) -> None:
        """Takes the newest window for the next report; one without tokens says nothing, and is not reported.

        placement: where experts are now
        """
        if record.tokens.any():
            self._window = window_report(record, placement)

    def make(
        self,
        step: int,
        state: str,
        placement: Placement,
        totals: dict[str, float],
        decisions: Sequence[Decision] = (),
        alarm: str = "",
    ) -> BalanceReport:
        """Returns the report of what has changed since the last one."""
        is_new = placement is not self._placement
        window, self._window, self._placement = self._window, None, placement
        at_s = self._wall_s()
        return BalanceReport(
            rank=self._rank,
            launch_id=self._launch_id,
            step=step,
            mode=self._mode,
            state=state,
            placement_version=placement.version,
            totals=dict(totals),
            alarm=alarm,
            window=window,
            decisions=[
                DecisionReport(at_s, d.step, d.kind, d.reason, len(d.layer_rows), d.gain_s, d.cost_s, d.realised_s)
                for d in decisions
            ],
            placement=placement.physical_to_logical.tolist() if is_new else None,
        )


def window_report(record: LoadRecord, placement: Placement) -> WindowReport:
    """Returns the load of a window, shared evenly over replicas.

    placement: at its end; also at its beginning, unless the record knows that one
    """
    first = record.placement or placement
    load, load_at_end = rank_load(record.tokens, first), rank_load(record.tokens, placement)
    return WindowReport(
        first_step=record.first_step,
        num_steps=record.num_steps,
        phase=record.phase,
        step_time_s=record.step_time_s or 0.0,
        balancedness=balancedness(load, first.live_ranks).tolist(),
        rank_load=load.tolist(),
        tokens=record.tokens.tolist(),
        mean_at_end=float(balancedness(load_at_end, placement.live_ranks).mean()),
    )
