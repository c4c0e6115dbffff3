"""How the end of a process is put into words."""

import mmap
import os
import signal
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
