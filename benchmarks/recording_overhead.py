"""What recording the load costs a step: one engine on two ranks, recording on and off in turn, every 50 steps.

    python -m benchmarks.recording_overhead [--steps 10000] [--batches 1,16] [--ranks 2] [--mode stat]

The ranks decode greedily with a fixed number of requests each; steps in which some rank prefills are left out. "Off" is
what eplb.mode off runs: no window is closed, and no layer counts, but on one rank, where the gate's compiled kernel
counts into numbers that nobody reads. The step of those kernels is recorded once for each side. A pair is a stretch
without and the next one with recording; its ratio is that of their mean step times. Windows are closed, reduced and
written in stretches with recording only, twice as often per recorded step as the setting says. --mode per_pass or
per_token: a client's recording runs as well, in the stretches with recording.
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

import numpy as np

from benchmarks.conditions import add_isa, conditions, save

STRETCH = 50  # steps
WINDOW = 1000  # steps of a load record, as by default; ends with a stretch that records
NUM_PROMPT, NUM_OUTPUT = 16, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batches", default="1,16", help="running requests of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mode", choices=["stat", "per_pass", "per_token"], default="stat")
    args = parser.parse_args()
    facts = conditions()
    rows = []
    for batch in (int(text) for text in args.batches.split(",")):
        rows.append(measure(args.ranks, batch, args.steps, args.mode))
        print(rows[-1], flush=True)
    name = "_".join(
        ["recording_overhead"]
        + ([] if args.mode == "stat" else [args.mode])
        + ([] if args.ranks == 2 else [str(args.ranks), "rank" if args.ranks == 1 else "ranks"])
    )
    notes = (
        f"Demo model, {args.ranks} rank(s) of one thread, prompts of {NUM_PROMPT} and outputs of {NUM_OUTPUT} tokens; "
        f"eplb.record_window_steps {WINDOW}, with a trace file"
        + ("" if args.mode == "stat" else f" and a client's recording of mode {args.mode}")
        + f". {STRETCH} steps without recording, then {STRETCH} with it, in turn; without: as with eplb.mode off, "
        "where on one rank the gate's compiled kernel counts into numbers that nobody reads. Interval: 95 % of 2000 "
        "bootstrap resamples of the pairs. `whole`: all steps with recording over all without, closing of windows "
        "included. `load`: the machine's load average at the end of the row."
    )
    print(save(name, "Step time with recording over step time without", rows, facts, notes))


def measure(num_ranks: int, batch: int, num_steps: int, mode: str) -> dict[str, Any]:
    """Returns a row of the table."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, folder, batch, num_steps, mode, pipes[rank][1]))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        timed: list[tuple[int, float]] = pipes[0][0].recv()
        for rank in ranks:
            rank.join(60)
    stretches = [[s for number, s in timed if number == wanted] for wanted in range(num_steps // STRETCH)]
    pairs = [
        (off, on) for off, on in zip(stretches[2::2], stretches[3::2], strict=False) if off and on
    ]  # the first warm up
    ratios = np.array([np.mean(on) / np.mean(off) for off, on in pairs])
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    off_s, on_s = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return {
        "requests per rank": batch,
        "decode steps": len(off_s) + len(on_s),
        "pairs": len(pairs),
        "step without, median": f"{1e3 * np.median(off_s):.3f} ms",
        "with / without, median of pairs": f"{np.median(ratios):.4f}",
        "interval": f"{low:.4f} … {high:.4f}",
        "whole": f"{on_s.mean() / off_s.mean():.4f}",
        "load": round(os.getloadavg()[0], 2),
    }


class Refill:
    """A mailbox that keeps a number of requests open, and asks for the end after a number of polls."""

    def __init__(self, rank: int, batch: int, num_polls: int, first: Any):
        from moe_serve.engine.protocol.messages import Submit

        self._make = Submit
        self._rank = rank
        self._batch = batch
        self._polls_left = num_polls
        self._inbox: list[Any] = [first]
        self._num_open = 0
        self._num_sent = 0

    def poll(self, timeout_s: float) -> list[Any]:
        from moe_serve.attention_dp.request import SamplingParams
        from moe_serve.engine.protocol.messages import Shutdown

        self._polls_left -= 1
        if self._polls_left < 0:
            return [Shutdown()]
        arrived, self._inbox = self._inbox, []
        while self._num_open < self._batch:
            # Outputs of different lengths, so that requests do not all end in the same step.
            draw = np.random.default_rng([self._rank, self._num_sent])
            params = SamplingParams(
                max_new_tokens=int(draw.integers(NUM_OUTPUT // 2, NUM_OUTPUT)), temperature=0, ignore_eos=True
            )
            prompt = draw.integers(3, 2048, NUM_PROMPT).tolist()
            arrived.append(self._make(f"{self._rank}-{self._num_sent}", 0, prompt, params, seed=0))
            self._num_sent += 1
            self._num_open += 1
        return arrived

    def send(self, message: Any) -> None:
        for event in getattr(message, "events", ()):
            self._num_open -= event.finish is not None

    def wake_peers(self, wake: Any) -> None:
        pass

    def front_end_silent_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


def _rank(rank: int, num_ranks: int, folder: str, batch: int, num_steps: int, mode: str, answer: Connection) -> None:
    """Sends (stretch, seconds) of each decode step, once the engine has ended."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from moe_serve.config import load_config
    from moe_serve.dispatch.base import EpGroup
    from moe_serve.engine.build import build_engine
    from moe_serve.engine.protocol.messages import RecordCommand
    from moe_serve.engine.step.exchange import make_exchange
    from moe_serve.engine.step.plan import StepPlan

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    world = dist.group.WORLD
    overrides = [
        f"parallel.num_ranks={num_ranks}", "cache.num_blocks=1024", f"eplb.record_window_steps={WINDOW}",
        f"eplb.record_path={folder}/load.jsonl", f"eplb.recorder_mode={mode}", f"eplb.recorder_dir={folder}",
    ]  # fmt: skip
    exchange = make_exchange("shm", world, True, 30.0)
    mailbox = Refill(rank, batch, num_steps, RecordCommand(1, "start"))
    group = EpGroup(rank, num_ranks, torch.device("cpu"), world)
    engine = build_engine(load_config(overrides=overrides), group, exchange, mailbox)
    engine.served.warm_up()
    switch = Switch(engine)
    timed: list[tuple[int, float]] = []
    run_step = engine.run_step

    def timed_step() -> StepPlan:
        stretch = engine.step // STRETCH
        switch.turn(on=stretch % 2 == 1)
        started_s = time.perf_counter()
        plan = run_step()
        seconds = time.perf_counter() - started_s
        if plan.phase == "decode":
            timed.append((stretch, seconds))
        return plan

    engine.run_step = timed_step  # type: ignore[method-assign]
    engine.run()
    answer.send(timed)


class Switch:
    """Turns the recording of an engine on and off, as eplb.mode does at its start.

    The recorded step of the compiled kernels holds the address of the numbers that its gate adds to. So there is one
    for each side, recorded in the first step that needs it.
    """

    def __init__(self, engine: Any):
        served = engine.served
        self._served = served
        self._layers = [layer.moe for layer in served.decoder.stack.layers if layer.moe is not None]
        self._with = self._layers[0]._parallel
        self._without = replace(self._with, recorder=None, passes=None)
        self._recorder, self._passes = served.recorder, served.passes
        self._run = served.decoder.run if served.numerics.compiled else None
        self._recordings: dict[bool, list[Any]] = {True: [], False: []}
        self._is_on = True
        self._total = 0

    def turn(self, on: bool) -> None:
        if on == self._is_on:
            return
        total = int(self._recorder._counts.sum())
        assert not on or total == self._total, "something was counted while recording was off"
        self._total, self._is_on = total, on
        if self._run is not None:
            self._recordings[not on], self._run._recorded = self._run._recorded, self._recordings[on]
        self._served.recorder = self._served.windows._recorder = self._recorder if on else None
        self._served.passes = self._passes if on else None
        for layer in self._layers:
            layer._parallel = self._with if on else self._without


if __name__ == "__main__":
    main()
