"""Constraints are tried in a fork that may end as it likes: the next one is tried all the same."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_serve.server.workers import grammar_check_process
from moe_serve.server.workers.grammar_check_process import Busy, Check, TooMuchMemory, TooMuchTime, Trials


@contextmanager
def trials_of(check: Check) -> Iterator[Trials]:
    trials = Trials(check)
    try:
        yield trials
    finally:
        trials.close()


def pid_unless(task: bytes) -> bytes:
    """Ends as the task says."""
    match task:
        case b"loop":
            while True:
                pass
        case b"raise":
            raise MemoryError
        case b"end":
            os._exit(0)
        case b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"sleep":
            time.sleep(30)
    return b"%d" % os.getpid()


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (b"loop", TooMuchTime), (b"raise", TooMuchMemory), (b"end", TooMuchMemory), (b"kill", TooMuchMemory),
        (b"sleep", Busy),
    ],
)  # fmt: skip
def test_a_fork_that_ends_over_a_constraint_says_why_and_the_next_one_goes_on(
    task: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check_process, "CPU_S", 0.03)
    monkeypatch.setattr(grammar_check_process, "_SOON_S", 0.05)
    monkeypatch.setattr(grammar_check_process, "_PATIENCE_S", 0.3 if error is Busy else 30.0)
    with trials_of(pid_unless) as trials:
        first = trials.answer(b"")
        with pytest.raises(error):
            trials.answer(task)
        assert trials.answer(b"") != first


def test_one_fork_tries_many_and_another_one_follows_it_where_it_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check_process, "_STARVED_S", 0.0)
    with trials_of(pid_unless) as trials:
        (first,) = {int(trials.answer(b"x" * size)) for size in (0, 1, 100_000, 5)}
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert int(trials.answer(b"")) != first


def test_a_fork_that_has_grown_ends_after_its_answer_so_that_the_next_one_has_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []

    def grow(task: bytes) -> bytes:
        kept.append(bytearray(2 * grammar_check_process._GROWN_BYTES))  # the heap of a large process may give back some
        return b"%d" % len(kept)

    monkeypatch.setattr(grammar_check_process, "_STARVED_S", 0.0)
    with trials_of(grow) as trials:
        assert [trials.answer(b"") for _ in range(3)] == [b"1"] * 3


def test_a_fork_that_gets_no_core_is_followed_by_one_of_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(task: bytes) -> bytes:
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            time.sleep(30)  # as where others take all cores
        return b"done"

    monkeypatch.setattr(grammar_check_process, "_SOON_S", 0.05)
    with trials_of(starve) as trials:
        assert trials.answer(b"") == b"done"


def test_a_fork_that_somebody_kills_over_a_constraint_is_followed_by_one_that_tries_it_again(tmp_path: Path) -> None:
    def killed_once(task: bytes) -> bytes:
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with trials_of(killed_once) as trials:
        assert trials.answer(b"sound" * 100_000) == b"sound" * 100_000


def test_a_machine_without_room_for_a_fork_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError

    with trials_of(pid_unless) as trials:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", no_fork)
            with pytest.raises(Busy):
                trials.answer(b"")
        assert trials.answer(b"")
