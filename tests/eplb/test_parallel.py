"""Replays in processes of their own, which may be interrupted."""

import os
import signal
from collections.abc import Iterator

import pytest

from moe_serve.eplb.replay.parallel import run_in_parallel
from moe_serve.errors import TraceError
from tests.launcher.running import eventually


@pytest.fixture(
    params=[signal.default_int_handler, signal.SIG_IGN], ids=["SIGINT raises", "SIGINT ignored"], autouse=True
)
def _inherited(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes inherit what a terminal's job has, or a background job of a shell without job control."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_process_ends_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(progress):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            progress(1)

    with pytest.raises(TraceError, match="a replay process ended"):
        run_in_parallel([interrupted], jobs=1)
    assert "Traceback" not in capfd.readouterr().err


def test_a_process_whose_parent_is_killed_ends(capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()

    def endless(_):
        os.write(write, os.getpid().to_bytes(4, "little"))
        while True:
            signal.pause()  # neither looks at its parent nor tells it anything

    parent = os.fork()
    if parent == 0:
        try:
            run_in_parallel([endless], jobs=1)
        finally:
            os._exit(1)
    child = int.from_bytes(os.read(read, 4), "little")
    os.close(read)
    os.close(write)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    # An orphan of ours: tests/conftest.py makes this process its parent.
    ended = eventually(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert "Traceback" not in capfd.readouterr().err
