"""What is around a leader's balancer, without ranks: an engine that turns, and a planner that plans at once."""

from dataclasses import dataclass, field

import numpy as np

from moe_serve.engine.balancing.balancer import Balancer, BalanceReports
from moe_serve.eplb.load import LoadRecord, rank_load
from moe_serve.eplb.migration.plan import migration_to
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planner_process import PlanAnswer, PlanProblem
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts

STEPS = 20
START = Placement.trivial(3, 8, 4, 4)
SKEWED = np.array([[50, 50, 1, 1, 1, 1, 1, 1], [10] * 8, [1, 1, 1, 1, 1, 1, 80, 80]])
FACTS = SystemFacts(num_nodes=1, bytes_per_expert=1000, token_s=1e-5, expert_s=1e-5, survives_loss=False, split="even")


@dataclass
class PlannerHere:
    """Plans at the poll after `delay` others; `failure`: gives no plan but this reason."""

    policy: str = "greedy"
    delay: int = 0
    failure: str = ""
    asked: list = field(default_factory=list)
    polls: int = 0
    started: int = 0
    closed: bool = False
    has_more_to_send: bool = False

    def start(self):
        self.started += 1

    def submit(self, request_id, request, limits, relabel):
        self.asked, self.polls = [(request_id, request, limits, relabel)], 0

    def poll(self):
        self.polls += 1
        if not self.asked or self.polls <= self.delay:
            return None
        ((number, request, *rules),) = self.asked
        self.asked = []
        if self.failure:
            return PlanProblem(number, self.failure)
        plan = make_policy(self.policy).plan(request)
        return PlanAnswer(number, plan, migration_to(request, plan, *rules))

    def close(self):
        self.closed = True


class Engine:
    """What an engine does with a balancer: steps, windows of load, and rounds that are live after three steps.

    The time of a step follows the busiest rank of each layer, as in a system whose ranks have cores of their own.
    """

    def __init__(self, planner=None, placement=START, facts=FACTS, on_event=None, **choices):
        self.clock = 0.0
        self.events, self.reports, self.rounds = [], [], []
        self.planner = planner or PlannerHere()
        settings = BalancerSettings(**({"horizon_windows": 20} | choices))
        self.load_reports = BalanceReports(2, 5, "dynamic", lambda: 1e9)
        note = on_event or (lambda name, step, **fields: self.events.append((name, step, fields)))
        self.balancer = Balancer(
            placement,
            settings,
            facts,
            self.planner,
            self.load_reports,
            note,
            lambda: self.clock,
        )
        self.step = 0
        self.running = None

    def turn(self):
        """One turn of the engine's loop."""
        balancer = self.balancer
        if self.running is not None and self.step >= self.running[1]:
            start, self.running = self.running[0], None
            self.rounds.append(start)
            balancer.activated(self.step, start.version, 1000 * start.round.num_transfers, 0.03, 0.001)
        start = balancer.next_round()
        if self.running is None and start is not None:
            assert balancer.has_work
            balancer.round_sent(start.version)
            self.running = (start, self.step + 3)
        self.step += 1
        self.clock += 0.01
        balancer.poll(self.step)
        report = balancer.report(self.step)
        if report is not None:
            self.reports.append(report)

    def record(self, load):
        tokens = np.asarray(load) * STEPS
        seconds = 0.002 + 1e-5 * rank_load(np.asarray(load), self.balancer.placement).max(axis=1).sum()
        return LoadRecord(
            self.step, STEPS, "decode", tokens, step_time_s=float(seconds), placement=self.balancer.placement
        )

    def window(self, load=SKEWED):
        record = self.record(load)
        for _ in range(STEPS):
            self.turn()
        self.load_reports.window_closed(record, self.balancer.placement)
        self.balancer.window_closed(record, self.step)

    def decisions(self):
        return [decision.kind for report in self.reports for decision in report.decisions]

    def names(self):
        return [name for name, _, _ in self.events]
