"""What timing its parts costs a step, and what a profile does: one engine, three ways in turn, 30 steps each.

    python -m benchmarks.metrics_overhead [--steps 9000] [--batches 1,16] [--ranks 1,2]

`none`: no clock is read, kernels are recorded with one part for all; `parts`: as served; `profile`: as served, while
a profile is recorded. The ranks decode greedily with a fixed number of requests each; steps in which some rank prefills
are left out. A round is a stretch of each; its ratios are those of their median step times, so that a step in which
another process took the core is not held against the way that it fell on. The notes say what counting a token costs.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.recording_overhead import NUM_OUTPUT, NUM_PROMPT, Refill

STRETCH = 30  # steps
WAYS = ("none", "parts", "profile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--batches", default="1,16", help="running requests of each rank")
    parser.add_argument("--ranks", default="1,2")
    args = parser.parse_args()
    facts = conditions()
    rows = []
    for num_ranks in map(int, args.ranks.split(",")):
        for batch in map(int, args.batches.split(",")):
            rows.append(measure(num_ranks, batch, args.steps))
            print(rows[-1], flush=True)
    notes = (
        f"Demo model, ranks of one thread, prompts of {NUM_PROMPT} and outputs of {NUM_OUTPUT} tokens; {STRETCH} steps "
        "of each way in turn. Interval: 95 % of 2000 bootstrap resamples of the rounds. `turns`: of the clock in a "
        "step. `load`: the machine's load average at the end of the row. Counting a token in the front end: "
        f"{token_ns():.0f} ns of CPU."
    )
    print(save("metrics_overhead", "Step time by what is measured, over step time without", rows, facts, notes))


def measure(num_ranks: int, batch: int, num_steps: int) -> dict[str, Any]:
    """Returns a row of the table."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, folder, batch, num_steps, pipes[rank][1]))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        timed, num_turns = pipes[0][0].recv()
        for rank in ranks:
            rank.join(60)
    stretches = [[s for number, s in timed if number == wanted] for wanted in range(num_steps // STRETCH)]
    rounds = [
        [np.median(stretch) for stretch in stretches[first : first + 3]]
        for first in range(3, len(stretches) - 2, 3)  # the first warm up
        if all(stretches[first : first + 3])
    ]
    times = np.array(rounds)
    row = {"ranks": num_ranks, "requests per rank": batch, "rounds": len(rounds), "turns": f"{num_turns:.0f}"}
    row["step without, median"] = f"{1e3 * np.median(times[:, 0]):.3f} ms"
    draw = np.random.default_rng(0)
    for way in (1, 2):
        ratios = times[:, way] / times[:, 0]
        low, high = np.quantile(np.median(draw.choice(ratios, (2000, len(ratios))), axis=1), [0.025, 0.975])
        row[f"{WAYS[way]} / none"] = f"{np.median(ratios):.4f} ({low:.4f} … {high:.4f})"
    return row | {"load": round(os.getloadavg()[0], 2)}


def token_ns(num_tokens: int = 200_000) -> float:
    """Returns the CPU time of counting one token of a request in the front end, the best of five runs."""
    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec
    from moe_serve.server.requests.request_stats import RequestStats

    request = OpenRequest("0-0", RequestSpec([5], SamplingParams(), 0), None, [], Changes())
    stats, best_s = RequestStats(), float("inf")
    for _ in range(5):
        began_s = time.process_time()
        for number in range(num_tokens):
            stats.count_tokens(request, 1, number * 0.011)
        best_s = min(best_s, time.process_time() - began_s)
    return 1e9 * best_s / num_tokens


def _rank(rank: int, num_ranks: int, folder: str, batch: int, num_steps: int, answer: Connection) -> None:
    """Sends (stretch, seconds) of each decode step, and the clock's turns in one, once the engine has ended."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from moe_serve.config import load_config
    from moe_serve.dispatch.base import EpGroup
    from moe_serve.engine.build import build_engine
    from moe_serve.engine.protocol.messages import Profile, RecordCommand
    from moe_serve.engine.step.exchange import make_exchange
    from moe_serve.engine.step.plan import StepPlan

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    world = dist.group.WORLD
    overrides = [f"parallel.num_ranks={num_ranks}", "cache.num_blocks=1024", f"eplb.recorder_dir={folder}"]
    exchange = make_exchange("shm", world, True, 30.0)
    mailbox = Refill(rank, batch, num_steps, RecordCommand(1, "stop"))
    group = EpGroup(rank, num_ranks, torch.device("cpu"), world)
    engine = build_engine(load_config(overrides=overrides), group, exchange, mailbox)
    assert engine.served.numerics.compiled, "the clock inside C calls is what this measures"
    engine.served.warm_up()
    switch = Switch(engine)
    timed: list[tuple[int, float]] = []
    turns: list[int] = []
    run_step = engine.run_step

    def timed_step() -> StepPlan:
        stretch = engine.step // STRETCH
        way = stretch % 3
        if engine.step % STRETCH == 0 or engine.step == 0:
            switch.turn(on=way > 0)
            if way == 2:
                engine.profiler.command(Profile(0, "start", 60, STRETCH, 1000 * STRETCH))
            elif engine.profiler.is_on:
                answer_of = engine.profiler.command(Profile(0, "stop"))
                turns.append(len(answer_of.facts["turns"]) // 16)
        started_s = time.perf_counter()
        plan = run_step()
        seconds = time.perf_counter() - started_s
        if plan.phase == "decode":
            timed.append((stretch, seconds))
        return plan

    engine.run_step = timed_step  # type: ignore[method-assign]
    engine.run()
    answer.send((timed, float(np.median(turns)) / STRETCH))


class Switch:
    """Turns the clock of an engine on and off. Kernels are recorded once with their parts, and once with one part."""

    def __init__(self, engine: Any):
        from moe_serve.kernels.part_clock import PartClock

        class StillClock(PartClock):
            def turn(self, part: int) -> int:
                return 0

        class NoTimes:
            def begin(self) -> int:
                return 0

            def end(self, phase: str) -> int:
                return 0

            def report(self) -> dict[str, Any]:
                return {}

        self._engine, self._still = engine, StillClock()
        self._still._words[0] = 0  # the part that all its kernels have: C sees no change
        self._layers = [layer.moe for layer in engine.served.decoder.stack.layers if layer.moe is not None]
        self._with = self._layers[0]._parallel
        self._parallel = {True: self._with, False: replace(self._with, clock=self._still)}
        if (fused := self._parallel[False].fused) is not None:
            fused._words[15:17] = 0, 0  # its parts: C sees no change
        self._clocks = {True: engine.served.clock, False: self._still}
        self._times = {True: engine.times, False: NoTimes()}
        self._run = engine.served.decoder.run
        self._recordings: dict[bool, list[Any]] = {True: [], False: []}
        self._is_on = True

    def turn(self, on: bool) -> None:
        from moe_serve.kernels.cpu.operations import Recorder

        if on == self._is_on:
            return
        self._is_on, run = on, self._run
        self._recordings[not on], run._recorded = run._recorded, self._recordings[on]
        run._clock = self._engine.served.clock = self._clocks[on]
        self._engine.times = self._times[on]
        for layer in self._layers:
            layer._parallel = self._parallel[on]
        if not on and not run._recorded:
            one_part = property(lambda recorder: 0, lambda recorder, part: None)
            with patch.object(Recorder, "part", one_part, create=True):
                run._recorded = [run.record(64, self._engine.served.cache)]


if __name__ == "__main__":
    main()
