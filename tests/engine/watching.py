"""Watches real engines whose experts move: what each rank's slots received in every step, and what was decided.

Every rank writes a file when its engine ends; `Watched.read` puts them together.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.engine.balancing.split_choice import SplitChoice
from moe_serve.engine.engine import Engine
from moe_serve.engine.step.plan import PHASES, StepPlan
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import Decision
from tests.ep.received import count_received

Ints = NDArray[np.int64]
STEPS_OF_A_PLAN = 4
LONGEST_PLAN_S = 60.0


class RestlessSplit(SplitChoice):
    """Draws anew, at each step, the phases that are split evenly, as a trial of the exact split would."""

    def __init__(self) -> None:
        super().__init__("exact", has_replicas=True)
        self._draw = np.random.default_rng(0)

    def observe(self, plan: StepPlan, step_s: float) -> None:
        self.even_phases = int(self._draw.integers(2 ** len(PHASES)))


@dataclass(frozen=True)
class Watched:
    """What was seen of all ranks.

    rows:       step -> [layers, slots], rows that each slot received;  placements: step -> the one that served it
    decisions:  of the leader, oldest first
    even_steps: those that were split evenly by the leader's choice
    """

    rows: dict[int, Ints]
    placements: dict[int, Placement]
    decisions: tuple[Decision, ...]
    final: Placement
    even_steps: frozenset[int]

    @classmethod
    def read(cls, folder: Path, like: Placement) -> "Watched":
        """Returns what the ranks have written. like: a placement of the same shape"""
        parts = [json.loads((folder / f"{rank}.json").read_bytes()) for rank in range(like.num_ranks)]
        first = parts[0]

        def placement(table: Any, version: int) -> Placement:
            return Placement(np.array(table, np.int32), like.num_logical, like.num_ranks, like.moe_layer_ids, version)

        tables = [placement(*each) for each in first["tables"]]
        rows = {
            int(step): np.concatenate([np.array(part["rows"][step]) for part in parts], axis=1)
            for step in first["rows"]
        }
        return cls(
            rows,
            {int(step): tables[index] for step, index in first["placements"].items()},
            tuple(Decision(**each | {"layer_rows": tuple(each["layer_rows"])}) for each in first["decisions"]),
            tables[-1],
            frozenset(first["even_steps"]),
        )


def watch(folder: Path, engine: Engine) -> None:
    """Writes what this rank's engine does into a folder when it ends.

    A plan is waited for after a few steps: the planner has the lowest priority, and a busy machine takes its time.
    """
    served, seen = engine.served, {"rows": {}, "placements": {}, "even_steps": []}  # type: ignore[var-annotated]
    forward, tables = served.forward, [served.placement]

    def watched(*args: Any) -> Tensor:
        if engine.balancing.leads:
            _wait_for_plan(engine)
        with count_received() as received:
            logits: Tensor = forward(*args)
        if served.placement is not tables[-1]:
            tables.append(served.placement)
        seen["rows"][engine.step] = received.slot_rows.tolist()
        seen["placements"][engine.step] = len(tables) - 1
        return logits

    begin = served.begin_step

    def begin_step(max_tokens: int, evenly: bool) -> None:
        if evenly:
            seen["even_steps"].append(engine.step)
        begin(max_tokens, evenly)

    close = engine.balancing.close

    def write_and_close() -> None:  # after the last step, in which a plan may still arrive
        balancer = engine.balancing.balancer
        tables.append(served.placement)
        seen["tables"] = [(each.physical_to_logical.tolist(), each.version) for each in tables]
        seen["decisions"] = [] if balancer is None else list(balancer.rebalancer.decisions)
        (folder / f"{engine.rank}.json").write_bytes(msgspec.json.encode(seen))
        close()

    served.forward = watched  # type: ignore[method-assign]
    served.begin_step = begin_step  # type: ignore[method-assign]
    engine.balancing.close = write_and_close  # type: ignore[method-assign]


def _wait_for_plan(engine: Engine) -> None:
    balancer, deadline_s = engine.balancing.balancer, time.monotonic() + LONGEST_PLAN_S
    assert balancer is not None, engine.balancing.alarm
    decisions = balancer.rebalancer.decisions
    if not decisions or engine.step < decisions[-1].step + STEPS_OF_A_PLAN:
        return
    while balancer.rebalancer.state == "planning" and time.monotonic() < deadline_s:
        time.sleep(0.01)
        balancer.poll(engine.step + 1)
