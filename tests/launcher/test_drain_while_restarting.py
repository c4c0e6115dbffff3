"""A launcher that was asked to end starts lost ranks again while requests wait for them. Without processes."""

import signal

import pytest

from moe_serve.config import load_config
from moe_serve.launcher.launch_watch import Loss
from moe_serve.launcher.system import _Ended, _System
from moe_serve.links.link import Link


class Ranks:
    """In the place of LocalRanks: counts the starts."""

    launch_id = 1
    children: tuple[()] = ()
    num_starts = 0

    def start(self) -> None:
        self.num_starts += 1

    def end(self, grace_s: float) -> None:
        pass


class FrontEnds:
    """In the place of those that drain; they end with their last request."""

    have_ended = False

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


class Display:
    def note(self, text: str, style: str = "") -> None:
        pass

    def stop(self) -> None:
        pass


LOSS = Loss(None, "rank 1 was killed")


def draining() -> tuple[_System, Ranks, FrontEnds]:
    """Returns a system that has served, and then got SIGTERM."""
    ranks, front_ends = Ranks(), FrontEnds()
    system = _System(load_config(overrides=["parallel.num_ranks=2"]), Display(), ranks, Link(folder=None))
    system._front_ends, system._was_ready = front_ends, True
    system.wants_drain, system.stop_signals = True, 1
    return system, ranks, front_ends


def test_ranks_that_are_lost_in_a_drain_are_started_again_for_the_requests_that_are_left():
    system, ranks, front_ends = draining()
    assert not system._launch.is_ready, "SIGTERM came while the ranks are started"
    assert system._drains()
    assert front_ends.signals == [signal.SIGTERM]
    system._start_again(LOSS)
    assert ranks.num_starts == 1


def test_ranks_that_are_lost_are_not_started_again_where_no_request_is_left_or_nobody_waits():
    system, ranks, front_ends = draining()
    front_ends.have_ended = True
    with pytest.raises(_Ended):
        system._start_again(LOSS)
    front_ends.have_ended = False
    system.stop_signals = 2
    with pytest.raises(_Ended):
        system._start_again(LOSS)
    assert ranks.num_starts == 0


def test_a_system_that_has_never_served_ends_at_once():
    system, _, front_ends = draining()
    system._was_ready = False
    assert not system._drains()
    assert not front_ends.signals
