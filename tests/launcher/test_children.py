"""Ranks are forked from one process that has imported what they need; how they end is known, and none is left."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_serve.launcher.children import Forked, ForkServer, end_children
from moe_serve.launcher.rank_env import LAUNCH_FILES
from tests.launcher.running import eventually, gone

Lines = list[tuple[str, str]]


@contextmanager
def fork_server(lines: Lines, *arguments: str) -> Iterator[ForkServer]:
    server = ForkServer("tests.launcher.forked", arguments, dict(os.environ), lambda *line: lines.append(line))
    try:
        yield server
    finally:
        server.finish()


def fork(server: ForkServer, rank: int, ends: str, *texts: str) -> Forked:
    files = [os.memfd_create(text) for text in texts]
    for file, text in zip(files, texts, strict=True):
        os.write(file, text.encode())
    try:
        return server.fork(f"rank {rank}", {"RANK": str(rank), "ENDS": ends}, {LAUNCH_FILES: files})
    finally:
        for file in files:
            os.close(file)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_have_their_own_environment_files_output_and_end_and_what_was_imported_once() -> None:
    lines: Lines = []
    with fork_server(lines, "x") as server:
        ends = {"0": 0, "7": 7, "killed": -signal.SIGABRT, "waits": -signal.SIGTERM}
        children = [fork(server, rank, each, "of", str(rank)) for rank, each in enumerate(ends)]
        last = children[3]
        assert eventually(lambda: ("rank 3", "moe rank 3: 3, of 3, ['x']") in lines), lines
        assert last.code is None
        assert os.getpgid(last.pid) == last.pid != parent_of(last.pid)
        last.signal(signal.SIGTERM)
        for child, code in zip(children, ends.values(), strict=True):
            assert child.wait(time.monotonic() + 30)
            assert child.code == code
            child.finish()
    for rank, child in enumerate(children):
        said = f"moe rank {rank}: {rank}, of {rank}, ['x']"
        assert child.last_lines[0] == said
        assert (f"rank {rank}", said) in lines
    assert [line for who, line in lines if who == "fork server"] == ["prepare x, 1 thread"]


def test_ranks_end_with_the_process_that_they_are_forked_from_and_that_with_its_launcher() -> None:
    with fork_server([]) as server:
        children = [fork(server, rank, "waits") for rank in range(2)]
        assert eventually(lambda: all(child.pid for child in children))
        pids = [child.pid for child in children]
        assert server.runs
        os.kill(parent_of(pids[0]), signal.SIGKILL)
        assert all(child.wait(time.monotonic() + 30) for child in children)
        assert [child.code for child in children] == [-signal.SIGKILL] * 2
        assert not server.runs
        late = fork(server, 2, "waits")
        assert late.code is not None
        end_children([*children, late], 0.0)
    assert eventually(lambda: gone(pids))


def test_a_process_that_cannot_import_says_why_for_all_ranks() -> None:
    with fork_server([], "fail") as server:
        children = [fork(server, rank, "waits") for rank in range(2)]
        for child in children:
            assert child.wait(time.monotonic() + 30)
            assert child.code == 1
            assert child.last_lines[-1] == "OSError: no such library"
        end_children(children, 0.0)


@pytest.mark.parametrize("grace_s", [0.0, 0.05])
def test_ranks_that_are_not_started_yet_are_ended(grace_s: float) -> None:
    lines: Lines = []
    with fork_server(lines, "wait") as server:
        child = fork(server, 0, "waits")
        assert eventually(lambda: lines)
        assert (child.pid, child.code) == (0, None)
        end_children([child], grace_s)
        assert child.code == 1 or child.code == -signal.SIGKILL
        assert not server.runs
