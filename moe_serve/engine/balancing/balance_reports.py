"""What the leader of the ranks tells the front end about the load, the placement and the balancer.

A `BalanceReport` is made when something has changed, and holds what has changed.

Running totals in reports: num_windows, num_plans, num_failures (plans and moves); num_rounds, num_experts_moved,
num_bytes_moved; plan_seconds, move_seconds, pause_seconds and, of each, longest_…; predicted_gain_seconds and
realised_gain_seconds of moves, over the windows in which their gain was measured.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from moe_serve.engine.protocol.messages import BalanceReport, DecisionReport, WindowReport
from moe_serve.eplb.load import LoadRecord, balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import Decision


class BalanceReports:
    """Makes the reports of one leader.

    mode:     eplb.mode;  wall_s: seconds since the epoch
    totals:   running totals by name
    has_news: something else than the placement has changed since the last report
    """

    def __init__(self, rank: int, launch_id: int, mode: str, wall_s: Callable[[], float] = time.time):
        self._rank = rank
        self._launch_id = launch_id
        self._mode = mode
        self._wall_s = wall_s
        self.totals: dict[str, float] = defaultdict(float)
        self.has_news = True
        self._window: WindowReport | None = None
        self._placement: Placement | None = None  # of the last report

    def window_closed(self, record: LoadRecord, placement: Placement) -> None:
        """Takes the newest window for the next report; one without tokens says nothing, and is not reported.

        placement: where experts are now
        """
        self.totals["num_windows"] += 1
        self.has_news = True
        if record.tokens.any():
            self._window = window_report(record, placement)

    def count_seconds(self, name: str, seconds: float) -> None:
        """Adds to a total of seconds, and keeps the longest of them."""
        self.totals[name] += seconds
        self.totals[f"longest_{name}"] = max(self.totals[f"longest_{name}"], seconds)

    def make(
        self, step: int, state: str, placement: Placement, decisions: Sequence[Decision] = (), alarm: str = ""
    ) -> BalanceReport | None:
        """Returns the report of what has changed since the last one; None: nothing. decisions: since then"""
        is_new = placement is not self._placement
        if not self.has_news and not is_new:
            return None
        self.has_news = False
        for decision in decisions:
            self._count(decision)
        window, self._window, self._placement = self._window, None, placement
        at_s = self._wall_s()
        return BalanceReport(
            rank=self._rank,
            launch_id=self._launch_id,
            step=step,
            mode=self._mode,
            state=state,
            placement_version=placement.version,
            totals=dict(self.totals),
            alarm=alarm,
            window=window,
            decisions=[
                DecisionReport(at_s, d.step, d.kind, d.reason, len(d.layer_rows), d.gain_s, d.cost_s, d.realised_s)
                for d in decisions
            ],
            placement=placement.physical_to_logical.tolist() if is_new else None,
        )

    def _count(self, decision: Decision) -> None:
        match decision.kind:
            case "failed":
                self.totals["num_failures"] += 1
            case "plan":
                self.totals["num_plans"] += 1
            case "watch":
                self.totals["predicted_gain_seconds"] += decision.gain_s
                self.totals["realised_gain_seconds"] += decision.realised_s


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
