"""Ranks for tests: forked from the torch-warm parent, kept in a pool per world size, gloo over a file store.

Forking a warm parent takes 0.1 s where starting Python and importing torch anew takes 4-9 s. A pool is forked when
first asked for; it is forked again after a failure, and when a function comes from a module that was imported later.
What the parent patches after the fork is not seen by the ranks: patch inside the function.
"""

import os
import pickle
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))  # times as long: where code is slow, as under a sanitizer
GRACE_S = 2.0  # how long the others may go on after one rank failed: their tracebacks often say more
_pools: dict[int, "RankPool"] = {}


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds the ranks' tracebacks."""


def run_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Returns [fn(rank, group, *args) for every rank], run by that many processes at once.

    fn:   a function at the top of its module; group is its EpGroup (cpu; a gloo process group, also for one rank)
    args: picklable; results too (they travel over pipes between parent and own children only)
    Raises RankFailure when a rank raises or dies, or when one has not answered after timeout_s, times PATIENCE.
    """
    if "<" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} cannot be named in a rank; move the function to the top of its module")
    pool = _pools.get(num_ranks)
    if pool is not None and not pool.knows(fn):
        _pools.pop(num_ranks).close()
        pool = None
    if pool is None:
        pool = _pools[num_ranks] = RankPool(num_ranks)
    try:
        return pool.run(fn, args, PATIENCE * timeout_s)
    except BaseException:
        _pools.pop(num_ranks).close(kill=True)  # its ranks may be inside a collective: start the next run anew
        raise


def run_virtual_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Returns [fn(rank, *args) for every rank], run by that many threads of this process; the first error is raised."""
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException | None] = [None] * num_ranks

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank, *args)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        if any(error is not None for error in errors):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.0005)
    for error in errors:
        if error is not None:
            raise error
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if hung:
        raise RankFailure(f"virtual ranks {hung} of {num_ranks} hang after {timeout_s:g} s")
    return results


def close_pools() -> None:
    """Ends all ranks. Called by conftest.py when the session ends."""
    while _pools:
        _pools.popitem()[1].close()


class RankPool:
    """num_ranks forked processes that run one function at a time."""

    def __init__(self, num_ranks: int):
        import sys

        import torch

        torch.set_num_threads(1)  # a forked child cannot use threads that its parent had started
        self._modules = frozenset(sys.modules)
        self._folder = Path(tempfile.mkdtemp(prefix="moe_serve_ranks_"))
        context = get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, num_ranks, theirs, [*self._pipes, ours], str(self._folder / "store")),
                daemon=True,
                name=f"rank {rank} of {num_ranks}",
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def knows(self, fn: Callable[..., Any]) -> bool:
        return fn.__module__ in self._modules and all(process.is_alive() for process in self._processes)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((fn.__module__, fn.__qualname__, args)))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < len(self._pipes):
            open_pipes = [p for rank, p in enumerate(self._pipes) if rank not in results and rank not in failures]
            ready = connection.wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    ok, value = False, f"died with exit code {self._processes[rank].exitcode}"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        silent = [rank for rank in range(len(self._pipes)) if rank not in results and rank not in failures]
        if failures:
            texts = [f"--- rank {rank} of {len(self._pipes)}:\n{text}" for rank, text in sorted(failures.items())]
            note = f"\n(no answer from ranks {silent})" if silent else ""
            raise RankFailure(f"{fn.__qualname__} failed on ranks {sorted(failures)}\n" + "\n".join(texts) + note)
        if silent:
            raise RankFailure(f"{fn.__qualname__}: ranks {silent} of {len(self._pipes)} hang after {timeout_s:g} s")
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self, kill: bool = False) -> None:
        for pipe in self._pipes:
            pipe.close()  # a waiting rank reads the end of its pipe and leaves
        for process in self._processes:
            if not kill:
                process.join(5)
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(rank: int, num_ranks: int, pipe: Connection, inherited: list[Connection], store: str) -> None:
    """The life of one rank: joins the group, then runs what the pipe names until the pipe ends."""
    import gc
    import sys

    import torch
    import torch.distributed as dist

    from moe_serve.dispatch.base import EpGroup

    gc.freeze()  # what the parent has left, such as a store of torch, would wait here for threads of the parent
    for other in inherited:
        other.close()  # else a sibling's pipe would stay open when the parent closes it
    torch.set_num_threads(1)
    group: EpGroup | None = None
    while True:
        try:
            module, qualname, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            if group is None:
                # The file is removed with the pool's folder; no port to collide on.
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, num_ranks),
                    rank=rank,
                    world_size=num_ranks,
                    timeout=timedelta(seconds=300),
                )
                group = EpGroup(rank, num_ranks, torch.device("cpu"), dist.group.WORLD)
            fn: Any = sys.modules[module]
            for name in qualname.split("."):
                fn = getattr(fn, name)
            answer = (True, fn(rank, group, *args))
            blob = pickle.dumps(answer)
        except BaseException:
            blob = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(blob)
        except OSError:
            break
    if group is not None:
        dist.destroy_process_group()
    os._exit(0)  # the parent's atexit handlers are not ours to run
