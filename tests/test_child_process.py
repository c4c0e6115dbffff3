"""How the end of a process is put into words."""

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_serve.child_process import describe_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (2, "exited with code 2"),
        (-9, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
    ],
)
def test_an_end_is_put_into_words(code, words):
    assert describe_exit(code) == words


def test_a_process_whose_shared_memory_has_no_pages_left_names_the_place(tmp_path: Path):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # pytest's own handler would write a report
        with open(tmp_path / "segment", "w+b") as file:
            file.truncate(mmap.PAGESIZE)
            segment = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)  # its page cannot be had any more, as on a full disk
            segment[0] = 1
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert describe_exit(code) == "was killed by SIGBUS (as where /dev/shm is full: make room there)"


def test_a_child_that_is_interrupted_while_it_begins_says_nothing(tmp_path: Path):
    (tmp_path / "begins.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "moe_serve.child_process", str(os.getpid()), "begins"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=60) == (b"", b"")
    assert child.returncode == -signal.SIGINT
