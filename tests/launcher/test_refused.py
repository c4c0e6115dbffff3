"""A rank that the front end refuses ends with an exit code and a last line that say so, before it loads a model."""

import asyncio
import gc
import os
import sys
import time

from moe_serve.dispatch.base import EpGroup
from tests.ranks import run_ranks
from tests.server.served import bridge_over_tcp, fake_config, in_event_loop


def run_worker_in_fork(place: dict[str, str], settings: list[str], import_s: float = 0.0) -> tuple[int, list[str]]:
    """Runs the worker's own command in a fork of a process that has torch; returns its exit code and output.

    place:    of the rank, as launchers set it in the environment
    import_s: how much longer the import of torch shall take
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # a store that an earlier test has left would, once collected, wait for a thread of its own process
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        import torch

        torch.set_num_threads = lambda _: time.sleep(import_s)
        os.environ.update(place)
        try:
            from moe_serve.launcher.serve import serve

            serve(None, settings)
        finally:
            os._exit(99)
    os.close(writing)
    with os.fdopen(reading) as output:
        lines = output.read().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), lines


def place_of(rank: int, port: int) -> dict[str, str]:
    """Returns what a launcher says to one of two ranks. port: of rank 0's store"""
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in named.items()}}


def start_refused(rank: int, group: EpGroup, port: int) -> tuple[int, list[str]]:
    settings = ["parallel.num_ranks=2", f"server.worker_port={port}", "engine.cpu_kernels=torch"]
    return run_worker_in_fork(place_of(0, 1) | {"MOE_SERVE_LAUNCH_ID": "7"}, settings, import_s=0.5)


@in_event_loop
async def test_a_refused_rank_exits_with_1_and_the_reason_is_its_last_line():
    bridge = bridge_over_tcp(fake_config(3))
    await bridge.start()
    try:
        ((code, lines),) = await asyncio.to_thread(run_ranks, 1, start_refused, bridge.link.port)
    finally:
        await bridge.close()
    assert code == 1, lines
    assert lines[-1].endswith(
        "the front end refused this rank: rank 0 belongs to 2 ranks but this front end serves 3; give both the same "
        "configuration"
    ), lines
