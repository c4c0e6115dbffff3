"""The Python of a step without its model: scheduling, the batch, tokens and events; and the exchange of two ranks.

    python -m benchmarks.step_python [--steps 300] [--note TEXT]

Decode steps of one rank, with a token made up for each row: no kernels, no sampler. "batch from lists" is what a batch
cost when each step put all block lists together.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.conditions import add_isa, conditions, save
from moe_serve.attention_dp.batch import BatchBuilder
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import ScheduledChunk, Scheduler
from moe_serve.engine.output.grammars import Grammars
from moe_serve.engine.protocol.messages import ModelLimits, Submit, Tokens, encode
from moe_serve.engine.requests import OpenRequests
from moe_serve.engine.status import EngineCounters
from moe_serve.kernels.numerics import FAST

BLOCK_SIZE = 16
CASES = [(16, 1000), (16, 32_000), (128, 1000), (128, 32_000)]
NO_STOPS = SamplingParams(max_new_tokens=1 << 20, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions()
    waits = _exchange(20 * args.steps)  # first: its ranks are forked before torch starts threads
    torch.set_num_threads(1)
    rows = [_decode(num_requests, context, args.steps) for num_requests, context in CASES]
    short = {num_prompt: _first_token_of_a_short_prompt(num_prompt) for num_prompt in (10, 400)}
    notes = (
        f"Microseconds of a decode step, medians over {args.steps} steps (in brackets the least). Exchange on shared "
        f"memory with the plan that follows, two ranks: median {waits[0]:.0f}, 90 % within {waits[1]:.0f} µs. "
        f"A prompt that arrives behind one of 120,000 tokens, 512 tokens a step: first token of 10 tokens in step "
        f"{short[10]}, of 400 tokens in step {short[400]}. "
        f"Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("step_python", "The Python of a step, without model and sampler", rows, facts, notes, per_cpu=True))


def _decode(num_requests: int, context: int, num_steps: int) -> dict[str, Any]:
    """Returns a row: what each part of a decode step takes."""
    scheduler, requests, counters = _open(num_requests, context, num_steps)
    for chunk in scheduler.commit(scheduler.propose()):
        scheduler.complete(chunk, 7)
    builder = BatchBuilder(scheduler.blocks.tables, "cpu", FAST)
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_steps):
        times = [time.perf_counter()]
        proposal = scheduler.propose()
        times.append(time.perf_counter())
        chunks = scheduler.commit(proposal)
        times.append(time.perf_counter())
        builder.build(chunks)
        times.append(time.perf_counter())
        events = []
        for chunk in chunks:
            scheduler.complete(chunk, 7)
            events.append(requests.extended(chunk.request, 7))
        times.append(time.perf_counter())
        counters.count_forward(chunks, len(events), False)
        encode(Tokens(0, 0, events))
        times.append(time.perf_counter())
        assert len(chunks) == num_requests
        parts = zip(("propose", "commit", "batch", "tokens and events", "message"), times, times[1:], strict=False)
        for name, start_s, end_s in parts:
            taken[name].append(end_s - start_s)
        taken["all"].append(times[-1] - times[0])
        if len(taken["all"]) % 30 == 0:  # seldom: it would put the table out of the processor's cache
            started_s = time.perf_counter()
            _batch_from_lists(chunks)
            taken["batch from lists"].append(time.perf_counter() - started_s)
    micros = {name: _micros(seconds) for name, seconds in taken.items()}
    return {"requests": num_requests, "tokens each": context, **micros}


def _micros(seconds: Sequence[float]) -> str:
    return f"{1e6 * statistics.median(seconds):.0f} ({1e6 * min(seconds):.0f})"


def _open(num_requests: int, context: int, num_steps: int) -> tuple[Scheduler, OpenRequests, EngineCounters]:
    max_len = context + (1 << 20) + num_steps
    num_blocks = num_requests * (-(-context // BLOCK_SIZE) + num_steps // BLOCK_SIZE + 2)
    blocks = RequestBlocks(max(num_blocks, max_len // BLOCK_SIZE), BLOCK_SIZE)
    scheduler = Scheduler(blocks, num_requests, num_requests * context, max_len)
    counters = EngineCounters()
    requests = OpenRequests(
        scheduler, ModelLimits("none", 1000, max_len, max_len, [1], BLOCK_SIZE), counters, Grammars(None)
    )
    prompt = list(range(context))
    for i in range(num_requests):
        own = prompt[i % BLOCK_SIZE :]  # so that they need their next blocks in different steps
        refusal = requests.submit(Submit(f"request-{i:06}", 0, own, NO_STOPS, seed=i, salt=str(i)))
        assert refusal is None, refusal
    return scheduler, requests, counters


def _batch_from_lists(chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
    """Returns the ids, positions, slots and padded block lists of decode rows, put together anew."""
    ids = [chunk.request.output_ids[-1] for chunk in chunks]
    positions = [chunk.start for chunk in chunks]
    tables = [chunk.request.block_ids[: chunk.start // BLOCK_SIZE + 1] for chunk in chunks]
    slots = [table[-1] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in zip(tables, positions, strict=True)]
    flat = ids + positions + slots
    widest = max(map(len, tables))
    for table in tables:
        flat += table
        flat += [0] * (widest - len(table))
    return torch.tensor(flat, dtype=torch.int64)


def _first_token_of_a_short_prompt(num_prompt: int) -> int:
    """Returns in which step, counted from 1, a prompt has its first token that arrives while a long one is computed."""
    scheduler = Scheduler(RequestBlocks(20_000, BLOCK_SIZE), 128, 512, 200_000)
    requests = OpenRequests(
        scheduler, ModelLimits("none", 1000, 200_000, 200_000, [1], BLOCK_SIZE), EngineCounters(), Grammars(None)
    )
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    assert requests.submit(Submit("long", 0, [3] * 120_000, params, seed=0)) is None
    num_steps, first_token = 0, 0
    while not first_token:
        if num_steps == 1:
            assert requests.submit(Submit("short", 0, [5] * num_prompt, params, seed=0)) is None
        for chunk in scheduler.commit(scheduler.propose()):
            scheduler.complete(chunk, 7 if chunk.samples else None)
            if chunk.samples and chunk.request.request_id == "short":
                first_token = num_steps
        num_steps += 1
    return first_token


def _exchange(num_steps: int) -> tuple[float, float]:
    """Returns the median and the 90th percentile of an exchange of two ranks that do nothing else, in microseconds."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe()
        ranks = [context.Process(target=_exchanging_rank, args=(r, folder, num_steps, sender)) for r in range(2)]
        for process in ranks:
            process.start()
        seconds: list[float] = receiver.recv()
        for process in ranks:
            process.join(30)
    return 1e6 * statistics.median(seconds), 1e6 * statistics.quantiles(seconds, n=10)[-1]


def _exchanging_rank(rank: int, folder: str, num_steps: int, answer: Connection) -> None:
    from moe_serve.engine.step.exchange import make_exchange
    from moe_serve.engine.step.plan import RankState, StepSettings, plan_step

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 2), rank=rank, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    exchange = make_exchange("shm", world, True, 30.0)
    settings = StepSettings(max_tokens_per_rank=512)
    seconds = []
    for step in range(num_steps):
        started_s = time.perf_counter()
        states = exchange.gather(RankState(0, step, decode_tokens=4, has_work=1), step)
        plan_step(states, settings)
        seconds.append(time.perf_counter() - started_s)
    if rank == 0:
        answer.send(seconds)
    exchange.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
