"""Engines whose experts move all the time: as a leader decides, or a whole round in every step."""

from collections.abc import Callable

import numpy as np
import torch

from moe_serve.engine.balancing.balancer import Balancer, BalanceReports
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import BalanceReport
from moe_serve.engine.step.plan import StepPlan
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.migration.plan import MigrationPlan, plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import StartRound
from moe_serve.topology import Topology

DYNAMIC = ["eplb.mode=dynamic"]


def shuffled(placement: Placement, draw: np.random.Generator) -> Placement:
    """Returns a legal placement of the same shape with experts in random slots; a rank may hold one twice."""
    lost = ~(placement.physical_to_logical >= 0).reshape(placement.num_layers, placement.num_ranks, -1).any(axis=(0, 2))
    live = np.flatnonzero(np.repeat(~lost, placement.slots_per_rank))
    table = np.full_like(placement.physical_to_logical, -1)
    for row in table:
        spare = draw.integers(-1, placement.num_logical, len(live) - placement.num_logical)
        row[live] = draw.permutation([*range(placement.num_logical), *spare.tolist()])
    return Placement(table, placement.num_logical, placement.num_ranks, placement.moe_layer_ids, placement.version)


class RestlessBalancer:
    """Moves to one random placement after the other, without asking what it is good for.

    num_rounds: how many rounds it begins with each group of ranks; then the engine may sleep
    """

    def __init__(self, placement: Placement, num_rounds: int, seed: int = 0):
        self.placement = placement
        self.activated_versions: list[int] = []
        self.cancellations: list[str] = []
        self.groups: list[Placement] = []
        self.records: list[LoadRecord] = []
        self._draw = np.random.default_rng(seed)
        self._num_rounds = self._left = num_rounds
        self._plan: MigrationPlan | None = None
        self._number = 0

    @property
    def has_work(self) -> bool:
        return self.next_round() is not None

    def next_round(self) -> StartRound | None:
        if self._left <= 0:
            return None
        while self._plan is None or self._number == len(self._plan.rounds):
            topology = Topology(1, self.placement.num_ranks)
            self._plan = plan_migration(self.placement, shuffled(self.placement, self._draw), topology)
            self._number = 0
        this = self._plan.rounds[self._number]
        return StartRound(0, this, self.placement.version + 1)

    def activated(self, step: int, version: int, num_bytes: int, move_s: float, pause_s: float) -> None:
        from moe_serve.eplb.migration.moves import apply_round

        assert self._plan is not None
        self.placement = apply_round(self.placement, self._plan.rounds[self._number])
        assert version == self.placement.version
        self._number += 1
        self._left -= 1
        self.activated_versions.append(version)

    def cancelled(self, step: int, reason: str) -> None:
        self.cancellations.append(reason)
        self._plan = None

    def group_changed(self, step: int, placement: Placement) -> None:
        self.groups.append(placement)
        self.placement, self._plan, self._left = placement, None, self._num_rounds

    def window_closed(self, record: LoadRecord, step: int) -> None:
        self.records.append(record)

    def poll(self, step: int) -> None:
        pass

    def round_sent(self, version: int) -> None:
        pass

    def rebalance_now(self, step: int) -> str:
        return "it never rests"

    def set_placement(self, step: int, table: list[list[int]]) -> str:
        return "it does what it wants"

    def report(self, step: int) -> BalanceReport | None:
        return None

    def close(self) -> None:
        pass


def lead_restlessly(engine: Engine, num_rounds: int = 60, seed: int = 0) -> RestlessBalancer | None:
    """Gives an engine's leading rank a leader that moves all the time; returns it."""
    balancing = engine.balancing

    def make(step: int, reports: BalanceReports) -> RestlessBalancer:
        return RestlessBalancer(engine.served.placement, num_rounds, seed)

    balancing.make_balancer = make  # type: ignore[assignment]
    if not balancing.leads:
        return None
    assert balancing.balancer is not None
    balancing.balancer.close()
    balancing.balancer = leader = RestlessBalancer(engine.served.placement, num_rounds, seed)  # type: ignore[assignment]
    return leader


def real_balancer(engine: Engine) -> Balancer:
    """Returns what decides on the leading rank of an engine in mode dynamic."""
    balancer = engine.balancing.balancer
    assert balancer is not None, engine.balancing.alarm
    return balancer


def move_in_every_step(engine: Engine, seed: int = 0) -> Callable[[], int]:
    """Lets all ranks run a whole round before each step, in lockstep; returns how many have been activated here.

    All ranks draw the same placements, so nothing needs to be told.
    """
    draw = np.random.default_rng(seed)
    mover, run_step = engine.balancing.mover, engine.run_step
    assert mover is not None
    rounds: list[object] = []
    done = 0

    def move_and_run() -> StepPlan:
        nonlocal done
        placement = engine.served.placement
        if not rounds:
            wanted = shuffled(placement, draw)
            rounds.extend(plan_migration(placement, wanted, Topology(1, placement.num_ranks)).rounds)
        if rounds:
            this = rounds.pop(0)
            version = placement.version + 1
            mover.start(this, version)  # type: ignore[arg-type]
            staged = torch.zeros(1, dtype=torch.int64)
            while not (engine.served.all_to_all.exchange_counts(staged).wait() == version).all():
                assert mover.fault is None
                mover.advance(0.0)
                staged[0] = mover.staged
            mover.activate(version)
            engine.recovery.activate_round(this)  # type: ignore[arg-type]
            done += 1
        return run_step()

    engine.run_step = move_and_run  # type: ignore[method-assign]
    return lambda: done
