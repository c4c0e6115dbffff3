"""Runs the policies of a replay in parallel in forked processes, which answer in bytes (numpy arrays and JSON).

A replay is one pass over the trace per policy, and policies are independent, so the result is the same as in sequence.
Children read the trace themselves, so nothing large passes between processes.
"""

import io
import json
import os
import select
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.child_process import die_with_parent
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.replay.result import PolicyResult
from moe_serve.errors import MoeServeError, TraceError

Task = Callable[[Callable[[int], None]], PolicyResult]  # takes a progress callback


def usable_jobs(jobs: int, num_tasks: int) -> int:
    """Returns how many processes to use: no more than tasks, and one where the system cannot fork."""
    return min(jobs, num_tasks) if hasattr(os, "fork") else 1


def run_in_parallel(tasks: Sequence[Task], jobs: int, progress: Callable[[], None] | None = None) -> list[PolicyResult]:
    """Returns the results of all tasks, in their order; at most `jobs` at a time.

    progress: called once per window of any task
    Raises the first error of a task again, once the others have ended; one of ours keeps its type.
    """
    with tempfile.TemporaryDirectory(prefix="moe_serve_replay.") as name:
        folder = Path(name)
        claims_read, claims_write = os.pipe()
        ticks_read, ticks_write = os.pipe()
        os.write(claims_write, bytes(range(len(tasks))))  # one byte is one task: reads of single bytes are atomic
        os.close(claims_write)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        children: list[int] = []
        try:
            for _ in range(jobs):
                child = os.fork()
                if child == 0:
                    die_with_parent(parent)  # a shell's background jobs, and so these, ignore Ctrl-C
                    os.close(ticks_read)
                    _work(tasks, folder, claims_read, ticks_write)
                children.append(child)
            os.close(ticks_write)
            _watch(ticks_read, progress)
            while children:
                _, status = os.waitpid(children[-1], 0)
                children.pop()
                if status != 0 and not list(folder.glob("*.error")):
                    raise TraceError(f"a replay process ended with status {status}; run again with --jobs 1 to see why")
        finally:
            os.close(claims_read)
            os.close(ticks_read)
            for child in children:
                os.kill(child, 9)
                os.waitpid(child, 0)
        for error in sorted(folder.glob("*.error")):
            raise _our_error(error.read_text())
        return [result_from_bytes((folder / str(index)).read_bytes()) for index in range(len(tasks))]


def _work(tasks: Sequence[Task], folder: Path, claims: int, ticks: int) -> None:
    """Runs tasks until none is left, then ends the process."""
    status = 0
    try:
        while claim := os.read(claims, 1):
            index = claim[0]
            try:
                result = tasks[index](lambda _: _tick(ticks))
                (folder / str(index)).write_bytes(result_to_bytes(result))
            except MoeServeError as problem:
                (folder / f"{index}.error").write_text(json.dumps([type(problem).__name__, str(problem)]))
                break
    except (KeyboardInterrupt, BrokenPipeError):  # the parent has it, too, or is gone
        status = 1
    except BaseException:  # the outermost loop of this process: show it, and end
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stderr.flush()
        os._exit(status)


def _tick(ticks: int) -> None:
    os.write(ticks, b".")


def _watch(ticks: int, progress: Callable[[], None] | None) -> None:
    while True:
        select.select([ticks], [], [])
        arrived = os.read(ticks, 4096)
        if not arrived:
            return  # the last child has closed its end
        if progress is not None:
            for _ in arrived:
                progress()


def _our_error(text: str) -> MoeServeError:
    import moe_serve.errors

    kind, message = json.loads(text)
    found = getattr(moe_serve.errors, kind, MoeServeError)
    return found(message) if found not in (moe_serve.errors.PeerError,) else MoeServeError(message)


def result_to_bytes(result: PolicyResult) -> bytes:
    """Returns a result as an .npz."""
    final = result.final
    words: dict[str, Any] = {
        "name": result.name,
        "decisions": [asdict(each) for each in result.decisions],
        "unkept": result.unkept,
    }
    arrays = result.arrays()
    if final is not None:
        words["final"] = [final.num_logical, final.num_ranks, final.moe_layer_ids, final.version]
        arrays["final"] = final.physical_to_logical
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, words=np.array(json.dumps(words)), **arrays)
    return buffer.getvalue()


def result_from_bytes(content: bytes) -> PolicyResult:
    """Returns the result that `result_to_bytes` wrote."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files if name != "words"}
        words = json.loads(str(archive["words"][()]))
    final: Placement | None = None
    if "final" in words:
        num_logical, num_ranks, layer_ids, version = words["final"]
        final = Placement(arrays.pop("final"), num_logical, num_ranks, tuple(layer_ids), version)
    decisions = tuple(Decision(**each | {"layer_rows": tuple(each["layer_rows"])}) for each in words["decisions"])
    return PolicyResult(words["name"], **arrays, final=final, decisions=decisions, unkept=tuple(words["unkept"]))
