"""Two ranks on one machine against one rank with two threads: tokens per second, and how long rank 0 waits.

    python -m benchmarks.expert_parallel [--rounds 3] [--batches 1 16] [--backends low_latency] [--threads 1 2]

Runs the engines without HTTP; requests are spread over the ranks. Waiting is that of rank 0 for rank 1 inside of steps,
and the step exchange.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.bench_model import NUM_OUTPUT, draw_prompts, write_bench_model
from benchmarks.conditions import add_isa, conditions, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--backends", nargs="+", default=["low_latency"], help="transports of the two ranks")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of each of the two ranks")
    args = parser.parse_args()
    facts = conditions("moe-serve")
    one = Case(1, 2, "auto")
    cases = [one, *(Case(2, threads, name) for name in args.backends for threads in args.threads)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        _in_process(write_bench_model, path)  # torch must not start threads before the ranks are forked
        for batch in args.batches:
            runs: dict[Case, list[dict[str, float]]] = defaultdict(list)
            for number in range(args.rounds):
                for case in cases:
                    runs[case].append(_run_ranks(path, case, batch, seed=number))
                    print(batch, case, runs[case][-1], flush=True)
            rows += [_row(batch, case, runs[case], runs[one]) for case in cases]
    text = save(
        "expert_parallel",
        "Two ranks against one",
        rows,
        facts,
        "Bench model, 64 prompt + 64 output tokens a request, float32; ranks × threads of each. Interleaved rounds: "
        "medians, and the median of the ratios within rounds. Waiting and step exchange are parts of the wall time of "
        f"rank 0. Load average at the end: {os.getloadavg()[0]:.2f}.",
        per_cpu=True,
    )
    print(text)


@dataclass(frozen=True)
class Case:
    """threads: of each rank"""

    ranks: int
    threads: int
    backend: str

    def __str__(self) -> str:
        return f"{self.ranks} × {self.threads}" + (f", {self.backend}" if self.ranks > 1 else "")


def _row(batch: int, case: Case, results: list[dict[str, float]], one: list[dict[str, float]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(result.get(key, 0.0) for result in results)

    total_s = median("total_s")
    ratios = [first["total_s"] / second["total_s"] for first, second in zip(one, results, strict=True)]
    return {
        "batch": batch,
        "ranks × threads": str(case),
        "tok/s": round(batch * NUM_OUTPUT / total_s, 1),
        "over 1 × 2": round(statistics.median(ratios), 2),
        "least … most": f"{min(ratios):.2f} … {max(ratios):.2f}",
        "waiting": f"{median('waiting') / total_s:.0%}",
        "step exchange": f"{median('step exchange') / total_s:.0%}",
    }


def _in_process(function: Callable[..., Any], *args: Any) -> None:
    process = get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def _run_ranks(path: Path, case: Case, batch: int, seed: int) -> dict[str, float]:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        args = case, path, f"{folder}/store", theirs, batch, seed
        processes = [context.Process(target=_rank, args=(rank, *args)) for rank in range(case.ranks)]
        for process in processes:
            process.start()
        assert ours.poll(300), "the ranks did not end within 300 s"
        result: dict[str, float] = ours.recv()
        for process in processes:
            process.join(30)
    return result


def _rank(rank: int, case: Case, path: Path, store: str, answer: Connection, batch: int, seed: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.config import load_config
    from moe_serve.dispatch.base import EpGroup
    from moe_serve.engine import build
    from moe_serve.engine.protocol.messages import Submit
    from moe_serve.engine.step.exchange import make_exchange
    from tests.engine.queue_mailbox import QueueMailbox

    dist.init_process_group("gloo", store=dist.FileStore(store, case.ranks), rank=rank, world_size=case.ranks)
    world = dist.group.WORLD
    assert world is not None
    times: dict[str, float] = defaultdict(float)
    config = load_config(
        overrides=[
            f"model.path={path}", f"parallel.num_ranks={case.ranks}", f"dispatch.backend={case.backend}",
            f"parallel.threads_per_rank={case.threads}", "engine.max_batch_tokens=2048", "cache.memory_gib=0.25",
        ]
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True)

    def submits(first: int) -> list[Submit]:
        prompts = draw_prompts(batch, first)[rank :: case.ranks]
        return [Submit(f"{first}.{i}", 0, prompt, params, seed=0) for i, prompt in enumerate(prompts)]

    exchange = make_exchange("auto", world, True, 60.0)
    mailbox = QueueMailbox(submits(7))
    engine = build.build_engine(config, EpGroup(rank, case.ranks, torch.device("cpu"), world), exchange, mailbox)
    exchange.gather = _timed(exchange.gather, times, "step exchange")  # type: ignore[method-assign]
    engine.run()  # warms up
    engine._wants_stop = False
    for message in submits(seed):
        mailbox.put(message)
    times.clear()
    waited_s = sum(engine.served.waited_s)
    dist.barrier()
    started = time.perf_counter()
    engine.run()
    times["total_s"] = time.perf_counter() - started
    times["waiting"] = sum(engine.served.waited_s) - waited_s
    if rank == 0:
        answer.send(dict(times))
    dist.barrier()
    os._exit(0)


def _timed(function: Callable[..., Any], times: dict[str, float], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            times[name] += time.perf_counter() - started

    return call


if __name__ == "__main__":
    main()
