"""What a searched split costs and gains on real steps: the engine on CPU ranks, small decode batches, replicas.

    python -m benchmarks.exact_split_steps [--split exact|time] [--steps 6000]
        [--models demo,bench] [--ranks 2,4]

Every rank keeps some short requests running, so batches are small and the load of experts is noise. Blocks of eight
steps are split exactly (or by time), evenly, and as the server itself chooses, in turns, within one run; blocks that
stand together are compared.
"""

import argparse
import itertools
import math
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torch import Tensor

from benchmarks.bench_model import write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.balancing.split_choice import BLOCK_STEPS, Gain, SplitChoice, size_class
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Message, Submit, Tokens
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.engine.step.plan import PHASES, RankState, StepPlan
from moe_serve.ep.replica_map import LayerReplicas
from moe_serve.eplb.split.make import SEARCHED_SPLITS
from tests.engine.queue_mailbox import QueueMailbox
from tests.ranks import run_ranks

EXACT, EVEN, CHOSEN = "exact", "even", "chosen"
ORDERS = tuple(itertools.permutations((EXACT, EVEN, CHOSEN)))  # a drift of the machine hits all alike
NUM_EXPERTS = 32  # of both models
RUNNING = 8  # requests of each rank
WARM_UP_STEPS = 100
ALL_EVEN = 2 ** len(PHASES) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--split", choices=SEARCHED_SPLITS, default="exact")
    parser.add_argument("--steps", type=int, default=6000, help="of each run")
    parser.add_argument("--models", default="demo,bench")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model, ranks in itertools.product(args.models.split(","), args.ranks.split(",")):
            path = bench_model(Path(folder)) if model == "bench" else model
            for redundant, words in ((2, "2 more slots"), (NUM_EXPERTS, "every expert twice")):
                run = run_ranks(int(ranks), measure, path, args.split, redundant, args.steps, timeout_s=3600)[0]
                head = {"model": model, "ranks": int(ranks), "replicas": words}
                found = [head | row for phase in PHASES if (row := run.row(phase)) is not None]
                print(*found, sep="\n", flush=True)
                rows += found
    if not rows:
        raise SystemExit(f"no phase has two comparable groups of blocks in {args.steps} steps; give more --steps")
    print(
        save(
            f"{args.split}_split_steps",
            f"The {args.split} split on real steps",
            rows,
            facts,
            notes(args.steps, args.note),
        )
    )


def bench_model(folder: Path) -> str:
    """Returns the folder of the bench model; written by another process, so that ranks are forked from a clean one."""
    if not (folder / "config.json").exists():
        writer = get_context("spawn").Process(target=write_bench_model, args=(folder,))
        writer.start()
        writer.join()
    return str(folder)


def notes(num_steps: int, note: str) -> str:
    return (
        f"{num_steps} steps a run, {RUNNING} requests on each rank, prompts of 4 to 24 ids and 8 to 64 new tokens; one "
        "thread a rank, shared memory. Gains: time saved against the even split, medians over groups of neighbouring "
        "blocks, with the interval that holds the true median with 99 %; steps are compared with steps of like size. "
        "Chosen: the blocks in which `SplitChoice` decided, its trials included, and the split that it ended with. "
        "Max / mean: rows of the most loaded rank over those of the average one, mean over layers and steps. Time of "
        "a split: of one layer on rank 0, counting of ids not included. "
        f"Load average at the end: {os.getloadavg()[0]:.2f}. {note}"
    )


@dataclass
class Run:
    """What rank 0 saw. times: (block, mode, size, seconds) of the steps of a phase; split_us, balance: by mode

    split: what the mode "exact" stands for
    """

    split: str
    times: dict[str, list[tuple[int, str, int, float]]] = field(default_factory=lambda: defaultdict(list))
    max_tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    split_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    balance: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    chosen: dict[str, Any] = field(default_factory=dict)

    def row(self, phase: str) -> dict[str, Any] | None:
        """Returns the row of a phase; None where too few steps can be compared."""
        groups = self._groups(phase)
        if len(groups) < 2:
            return None
        exact = Gain.of([group[EVEN] - group[EXACT] for group in groups])
        chosen = Gain.of([group[EVEN] - group[CHOSEN] for group in groups])
        even_s = median(step_s for _, mode, _, step_s in self.times[phase] if mode == EVEN)
        return {
            "phase": phase,
            "rows of a rank": int(median(self.max_tokens[phase])),
            "even step ms": round(1e3 * even_s, 2),
            f"gain of {self.split}": _words(exact),
            "gain of chosen": _words(chosen),
            "chosen": self.chosen["phases"][phase]["split"],
            "groups": len(groups),
            f"max / mean even, {self.split}": f"{fmean(self.balance[EVEN]):.3f}, {fmean(self.balance[EXACT]):.3f}",
            f"split us even, {self.split}": f"{median(self.split_us[EVEN]):.1f}, {median(self.split_us[EXACT]):.1f}",
        }

    def _groups(self, phase: str) -> list[dict[str, float]]:
        """Returns, for each three neighbouring blocks, the median log(time / usual time of the size) of each mode."""
        by_size = defaultdict(list)
        for _, _, size, step_s in self.times[phase]:
            by_size[size].append(step_s)
        usual = {size: median(times) for size, times in by_size.items() if len(times) >= BLOCK_STEPS}
        groups: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for block, mode, size, step_s in self.times[phase]:
            if size in usual:
                groups[block // 3][mode].append(math.log(step_s / usual[size]))
        whole = [group for group in groups.values() if len(group) == 3 and min(map(len, group.values())) >= 3]
        return [{mode: median(values) for mode, values in group.items()} for group in whole]


def _words(gain: Gain) -> str:
    return f"{gain.median:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"


class SteadyMailbox(QueueMailbox):
    """Begins a request whenever fewer than RUNNING run."""

    def __init__(self, rank: int, vocab: int):
        super().__init__(end_when_idle=False)
        self._draw, self._vocab, self._name = random.Random(rank), vocab, rank * 1_000_000
        self._running = 0

    def poll(self, timeout_s: float) -> list[Inbound]:
        new: list[Inbound] = []
        while self._running < RUNNING:
            self._running += 1
            self._name += 1
            draw = self._draw
            prompt = [draw.randrange(3, self._vocab) for _ in range(draw.randint(4, 24))]
            params = SamplingParams(max_new_tokens=draw.randint(8, 64), temperature=0, ignore_eos=True)
            new.append(Submit(str(self._name), 0, prompt, params, seed=0))
        return new

    def send(self, message: Message) -> None:
        if isinstance(message, Tokens):
            self._running -= sum(bool(event.finish) for event in message.events)


def measure(rank: int, group: EpGroup, model: str, split: str, redundant: int, num_steps: int) -> Run:
    """Returns what this rank saw of a run."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= group.num_ranks:  # the pool's processes end with this run
        os.sched_setaffinity(0, {cores[rank]})
    config = load_config(
        overrides=[
            f"model.path={model}", f"parallel.num_ranks={group.num_ranks}", "dispatch.backend=low_latency",
            f"eplb.num_redundant_experts={redundant}", f"eplb.split={split}", "cache.memory_gib=0.1",
        ]
    )  # fmt: skip
    exchange = make_exchange("shm", group.process_group, True, 120.0)
    engine = build_engine(config, group, exchange, SteadyMailbox(rank, 2048))
    run, choice = Run(split), SplitChoice(split, has_replicas=True)
    _follow_schedule(engine, run, choice, num_steps)
    with _watched_splits(run, lambda: engine.step):
        engine.run()
    exchange.close()
    run.chosen = choice.describe()
    return run


def _mode(step: int) -> str:
    block = step // BLOCK_STEPS
    return ORDERS[block // 3 % len(ORDERS)][block % 3]


def _follow_schedule(engine: Engine, run: Run, choice: SplitChoice, num_steps: int) -> None:
    """Makes the leader ask for the split of each step, and every rank note its time. Ends after num_steps."""
    gather, run_step = engine.exchange.gather, engine.run_step

    def say(state: RankState, step: int) -> Sequence[RankState]:
        bits = {EXACT: 0, EVEN: ALL_EVEN, CHOSEN: choice.even_phases}[_mode(step)]
        return gather(state._replace(even_phases=bits), step)

    def timed() -> StepPlan:
        started_s = time.perf_counter()
        plan = run_step()
        step_s = time.perf_counter() - started_s
        if plan.runs_forward:
            mode = _mode(plan.step)
            if mode == CHOSEN:
                choice.observe(plan, step_s)
            if plan.step >= WARM_UP_STEPS and not plan.close_window:
                block = plan.step // BLOCK_STEPS
                run.times[plan.phase].append((block, mode, size_class(plan.max_tokens), step_s))
                run.max_tokens[plan.phase].append(plan.max_tokens)
        if plan.step + 1 >= num_steps:
            engine.request_stop()
        return plan

    engine.exchange.gather = say  # type: ignore[method-assign]
    engine.run_step = timed  # type: ignore[method-assign]


@contextmanager
def _watched_splits(run: Run, step_of: Callable[[], int]) -> Iterator[None]:
    """Notes the time of every split, and how far the ranks are from balance in the first step of each block."""
    serving = LayerReplicas.split

    def split(self: LayerReplicas, topk_ids: Tensor, counts: Tensor, rank: int) -> Sequence[Tensor]:
        started_s = time.perf_counter()
        result = serving(self, topk_ids, counts, rank)
        used_s = time.perf_counter() - started_s
        step = step_of()
        mode = _mode(step)
        if mode != CHOSEN and step >= WARM_UP_STEPS:
            run.split_us[mode].append(1e6 * used_s)
            if step % BLOCK_STEPS == 0 and (rows := result[1].sum(0).view(len(counts), -1).sum(1)).any():
                run.balance[mode].append(float(rows.max() / rows.double().mean()))
        return result

    LayerReplicas.split = split  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        LayerReplicas.split = serving  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
