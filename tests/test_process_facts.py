import os
import resource
import signal
import subprocess

from moe_serve.process_facts import runs


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
