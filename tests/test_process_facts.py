import os
import platform
import resource
import signal
import subprocess
import threading
import time

import pytest

from moe_serve.process_facts import ProcessorWaits, give_freed_memory_back, resident_bytes, runs


def test_a_process_runs_until_it_has_ended_also_while_it_is_stopped_and_while_nobody_can_look():
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        assert runs(process.pid)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            found = runs(process.pid)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert found, "a rank that has no free file descriptor takes no other one for dead"
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not runs(process.pid), "a zombie"
    process.wait()
    assert not runs(process.pid)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_was_freed_below_a_piece_that_is_kept_goes_back_to_the_system() -> None:
    pieces = [b"1" * (1 << 16) for _ in range(1024)]
    kept, before = b"1" * (1 << 16), resident_bytes()
    del pieces
    give_freed_memory_back()
    assert before - resident_bytes() > 48 << 20
    assert kept


@pytest.mark.skipif(platform.system() != "Linux", reason="Linux tells it")
def test_a_thread_waits_for_its_processor_while_another_process_has_it():
    core = min(os.sched_getaffinity(0))
    beside = subprocess.Popen(["sh", "-c", "read line; while :; do :; done"], stdin=subprocess.PIPE)
    os.sched_setaffinity(beside.pid, {core})
    found: list[float] = []

    def measure() -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        waits = ProcessorWaits()
        began_s, wall_s, cpu_s = waits.seconds(), time.perf_counter(), time.thread_time()
        assert beside.stdin is not None
        beside.stdin.write(b"go\n")
        beside.stdin.flush()
        while time.perf_counter() - wall_s < 0.1 or waits.seconds() == began_s:
            pass
        found.extend((waits.seconds() - began_s, time.perf_counter() - wall_s - (time.thread_time() - cpu_s)))

    try:
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
    finally:
        beside.kill()
        beside.communicate()
    waited_s, without_s = found
    assert 0.5 * without_s < waited_s < without_s + 0.02, "a host may take the core from both, too"


@pytest.mark.parametrize("content", [b"", b"12", b"one two three"])
def test_waits_for_the_processor_are_0_where_the_system_tells_nothing(content, tmp_path, monkeypatch):
    path = tmp_path / "schedstat"
    path.write_bytes(content)
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda name, flags: open_file(path, flags))
    waits = ProcessorWaits()
    assert [waits.seconds(), waits.seconds()] == [0.0, 0.0]
