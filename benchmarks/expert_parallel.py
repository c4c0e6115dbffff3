"""Two ranks with one thread each against one rank with two threads, batch 16, and where the time of a rank goes.

    python -m benchmarks.expert_parallel [--rounds 3] [--backends collective,low_latency]

Runs the engines without HTTP. The parts are wall time on rank 0: dispatch and combine include waiting for the other
rank.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.bench_model import NUM_OUTPUT, draw_prompts, write_bench_model
from benchmarks.conditions import conditions, save

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backends", default="collective", help="transports of the two ranks, separated by commas")
    args = parser.parse_args()
    facts = conditions("moe-serve")
    cases = [("1 × 2", 1, 2, "auto"), *((f"2 × 1, {name}", 2, 1, name) for name in args.backends.split(","))]
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        _in_process(write_bench_model, path)  # torch must not start threads before the ranks are forked
        for number in range(args.rounds):
            for name, num_ranks, num_threads, backend in cases:
                runs[name].append(_run_ranks(path, num_ranks, num_threads, backend, seed=number))
                print(name, runs[name][-1], flush=True)
    rows = [_row(name, results) for name, results in runs.items()]
    text = save(
        "expert_parallel",
        "Two ranks against one, batch 16",
        rows,
        facts,
        "Bench model, 64 prompt + 64 output tokens a request, float32; ranks × threads; medians over interleaved "
        "rounds. Shares are parts of the wall time of rank 0 and include waiting for the other rank. "
        f"Load average at the end: {os.getloadavg()[0]:.2f}.",
    )
    print(text)


def _row(name: str, results: list[dict[str, float]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(result.get(key, 0.0) for result in results)

    total = median("total_s")
    parts = {key: f"{median(key) / total:.0%}" for key in ("dispatch", "combine", "counts", "step exchange")}
    return {"ranks × threads": name, "tok/s": round(BATCH * NUM_OUTPUT / total), **parts}


def _in_process(function: Callable[..., Any], *args: Any) -> None:
    process = get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def _run_ranks(path: Path, num_ranks: int, num_threads: int, backend: str, seed: int) -> dict[str, float]:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank, args=(rank, num_ranks, num_threads, backend, path, f"{folder}/store", theirs, seed)
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        assert ours.poll(300), "the ranks did not end within 300 s"
        result: dict[str, float] = ours.recv()
        for process in processes:
            process.join(30)
    return result


def _rank(
    rank: int, num_ranks: int, num_threads: int, backend: str, path: Path, store: str, answer: Connection, seed: int
) -> None:
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch
    import torch.distributed as dist

    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.config import load_config
    from moe_serve.dispatch.base import EpGroup
    from moe_serve.engine import build
    from moe_serve.engine.exchange import make_exchange
    from moe_serve.engine.messages import Submit
    from tests.engine.queue_mailbox import QueueMailbox

    torch.set_num_threads(num_threads)
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    world = dist.group.WORLD
    assert world is not None
    times: dict[str, float] = defaultdict(float)
    original = build.make_all_to_all
    build.make_all_to_all = lambda *args, **kwargs: _Timed(original(*args, **kwargs), times)
    config = load_config(
        overrides=[
            f"model.path={path}", f"parallel.num_ranks={num_ranks}", f"dispatch.backend={backend}",
            "engine.max_batch_tokens=2048", "cache.memory_gib=0.25",
        ]
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True)

    def submits(first: int) -> list[Submit]:
        prompts = draw_prompts(BATCH, first)[rank::num_ranks]
        return [Submit(f"{first}.{i}", 0, prompt, params, seed=0) for i, prompt in enumerate(prompts)]

    exchange = make_exchange("auto", world, True, 60.0)
    mailbox = QueueMailbox(submits(7))
    engine = build.build_engine(config, EpGroup(rank, num_ranks, torch.device("cpu"), world), exchange, mailbox)
    gather = exchange.gather
    exchange.gather = _timed(gather, times, "step exchange")  # type: ignore[method-assign]
    engine.run()  # warms up
    engine._wants_stop = False
    for message in submits(seed):
        mailbox.put(message)
    times.clear()
    dist.barrier()
    started = time.perf_counter()
    engine.run()
    times["total_s"] = time.perf_counter() - started
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


class _Timed:
    """A transport that adds up the time of its calls and waits."""

    def __init__(self, inner: Any, times: dict[str, float]):
        self._inner = inner
        for name, method in (("counts", "exchange_counts"), ("dispatch", "dispatch"), ("combine", "combine")):
            setattr(self, method, self._both_halves(getattr(inner, method), times, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @staticmethod
    def _both_halves(function: Callable[..., Any], times: dict[str, float], name: str) -> Callable[..., Any]:
        send = _timed(function, times, name)

        class Receive:
            def __init__(self, pending: Any):
                self.wait = _timed(pending.wait, times, name)

        return lambda *args: Receive(send(*args))


if __name__ == "__main__":
    main()
