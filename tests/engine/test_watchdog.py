"""A phase that lasts long is named, then the stacks are written; one that makes progress is not mentioned."""

import logging
import sys
from pathlib import Path

import pytest

from moe_serve.engine.watchdog import Watchdog, WatchLimits

LIMITS = WatchLimits(warn_s=1.0, stack_s=3.0, give_up_s=5.0)  # 4, 12 and 20 ticks


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged from here on."""
    monkeypatch.setattr(logging.getLogger("moe_serve"), "propagate", True)
    caplog.set_level(logging.INFO, "moe_serve")
    return caplog.messages


def test_a_long_phase_is_named_then_its_stacks_are_written_then_it_is_given_up(
    caplog: pytest.LogCaptureFixture, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[str] = []
    with (tmp_path / "stacks").open("w+") as stacks:
        monkeypatch.setattr(sys, "stderr", stacks)
        watchdog = Watchdog("rank 3", LIMITS, lambda: "dispatch 7 waits for rank 1", given_up.append)
        watchdog.enter("the forward", 17)
        for _ in range(21):
            watchdog.tick()
        text = stacks.read() or Path(stacks.name).read_text()
    assert caplog.messages[0] == "rank 3 has been in the forward of step 17 for 1 s: dispatch 7 waits for rank 1"
    assert caplog.messages[1].startswith("rank 3 has been in the forward of step 17 for 3 s")
    assert "the stacks of its threads follow" in caplog.messages[1]
    assert "test_watchdog.py" in text
    assert text.count("most recent call first") >= 1
    assert given_up[0].startswith("rank 3 has been in the forward of step 17 for 5 s")


def test_progress_and_sleep_are_not_mentioned(caplog: pytest.LogCaptureFixture, lines: list[str]) -> None:
    watchdog = Watchdog("rank 3", LIMITS)
    for step in range(10):
        watchdog.enter("the exchange", step)
        for _ in range(4):
            watchdog.tick()
        watchdog.leave()
        for _ in range(30):
            watchdog.tick()
    assert caplog.messages == []


def test_a_phase_of_the_start_that_shows_progress_goes_on(caplog: pytest.LogCaptureFixture, lines: list[str]) -> None:
    watchdog = Watchdog("rank 0", LIMITS)
    for _ in range(10):
        watchdog.enter("loading weights")
        for _ in range(4):
            watchdog.tick()
    assert caplog.messages == []
    for _ in range(6):
        watchdog.tick()
    assert caplog.messages == ["rank 0 has been in the phase 'loading weights' of the start for 1 s"]
