"""Replays in processes of their own, which may be interrupted."""

import os
import signal

import pytest

from moe_serve.eplb.replay.parallel import run_in_parallel
from moe_serve.errors import TraceError


def test_an_interrupted_process_ends_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(progress):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            progress(1)

    with pytest.raises(TraceError, match="a replay process ended"):
        run_in_parallel([interrupted], jobs=1)
    assert "Traceback" not in capfd.readouterr().err
