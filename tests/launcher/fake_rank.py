"""A process in a rank's place, without torch: `python -m tests.launcher.fake_rank --config FILE`.

It speaks the real messages as tests/server/fake_worker.py does. $FAKE_RANK chooses mishaps: "RANK:NAME", with
commas between them; RANK may be all, or the ranks' role. See below.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_serve.config import load_config
from moe_serve.engine.protocol.messages import Fatal, Goodbye, Progress
from tests.server.fake_worker import FakeWorker, LinkedWorker


def prepare(arguments: Sequence[str]) -> None:
    """Has nothing to do for all ranks."""


async def run() -> int:
    config = load_config(Path(sys.argv[sys.argv.index("--config") + 1]))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = [each.partition(":") for each in os.environ.get("FAKE_RANK", "").split(",")]
    mishaps = {name for who, _, name in chosen if who in (str(rank), "all", config.parallel.role)}
    print(f"this is rank {rank}", flush=True)
    if "settings" in mishaps:
        print("moe-serve worker: the setting x is wrong; set y", file=sys.stderr, flush=True)
        return 2
    if "dies at start" in mishaps:
        os.abort()
    was_here = False
    if any("started again" in each for each in mishaps):
        mark = Path(os.environ["MOE_SERVE_SOCKETS"]) / f"rank-{rank}-was-here"
        was_here = mark.exists()
        mark.touch()
    if "dies when started again" in mishaps and was_here:
        os.abort()
    launch_id = int(os.environ["MOE_SERVE_LAUNCH_ID"])
    worker = FakeWorker(rank, num_ranks, config.server.worker_port, launch_id)
    if config.server.api_workers > 1:
        worker = LinkedWorker(rank, num_ranks, 0, launch_id, num_front_ends=config.server.api_workers)
    worker.restarts_left = int(os.environ["MOE_SERVE_RESTARTS_LEFT"])
    worker.tokens_at_once = 4
    differs = "other weights" in mishaps or ("other weights when started again" in mishaps and was_here)
    worker.computes = [("the files of weights", "theirs" if differs else "ours", "")]
    if "slow" in mishaps:
        worker.tokens_at_once, worker.round_s = 1, 0.05  # seconds for a request: time to do something to it
    task = asyncio.create_task(worker.run(ready=False))
    await asyncio.sleep(0.05)
    worker.say(Progress(rank, launch_id, "loading weights", 0.5))
    if "never ready" in mishaps:
        await asyncio.sleep(1000)
    if "reports why" in mishaps:
        while not worker.num_alive:  # until the front end listens
            await asyncio.sleep(0.02)
        worker.say(Fatal(rank, launch_id, "cache.memory_gib 0.001 holds 1 block; raise it", rank))
        await asyncio.sleep(0.2)
        return 2
    if "hangs at the end" in mishaps:
        worker.say = lambda message, say=worker.say: None if isinstance(message, Goodbye) else say(message)
    worker.get_ready()
    while not task.done():
        worker.load(len(worker.running))
        await asyncio.wait({task}, timeout=0.5)
    while "hangs at the end" in mishaps:
        await asyncio.sleep(1000)
    await task
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
