"""The demo model on two real ranks, by `moe-serve serve`: one system for all tests of this folder."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.running import Running, gone


@pytest.fixture(scope="package")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its recordings."""
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="package")
def demo(dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The system, which Ctrl-C ends: nothing is left."""
    settings = (
        "server.worker_port=0",
        f"eplb.recorder_dir={dumps}",
        f"server.profile_dir={tmp_path_factory.mktemp('p')}",
    )
    flags = "--port", "0", "--log-requests", "--log-format", "json", *(f"--set={setting}" for setting in settings)
    with Running("moe_serve", ["serve", *flags]) as running:
        yield running
        pids = running.descendants()
        assert running.end(signal.SIGINT) == 0, running.output
        assert gone(pids)
