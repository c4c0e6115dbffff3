"""What a launcher makes of lost ranks: a restart, also while it drains, ever longer pauses, the end. No processes."""

import signal
import time

import pytest

from moe_serve.config import load_config
from moe_serve.engine.protocol.messages import ModelLimits, Ready
from moe_serve.launcher.hosts import HostIsBack, HostIsNew
from moe_serve.launcher.launch_watch import Loss
from moe_serve.launcher.local import Death
from moe_serve.launcher.system import RanksElsewhere, Signals, _Ended, _Prefill, _System

LIMITS = ModelLimits("m", 100, 20, 10, [1], 4)


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
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, style: str = "") -> None:
        self.notes.append(text)

    def phase(self, rank: int, phase: str, fraction: float) -> None:
        pass

    def stop(self) -> None:
        pass


LOSS = Loss(None, "rank 1 was killed")


def serving(*overrides: str) -> tuple[_System, Ranks, FrontEnds]:
    """Returns a system that has served."""
    ranks, front_ends = Ranks(), FrontEnds()
    config = load_config(overrides=["parallel.num_ranks=2", *overrides])
    system = _System(config, Display(), ranks, Signals())
    system._front_ends, system._was_ready = front_ends, True
    return system, ranks, front_ends


def draining() -> tuple[_System, Ranks, FrontEnds]:
    """Returns a system that has served, and then got SIGTERM."""
    system, ranks, front_ends = serving()
    system.signals.count(signal.SIGTERM)
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
    system.signals.count(signal.SIGTERM)
    with pytest.raises(_Ended):
        system._start_again(LOSS)
    assert ranks.num_starts == 0


def test_a_system_that_has_never_served_ends_at_once():
    system, _, front_ends = draining()
    system._was_ready = False
    assert not system._drains()
    assert not front_ends.signals


def ended(rank: int, code: int = -9) -> Death:
    return Death(rank, 100 + rank, code, (f"this is rank {rank}",))


def test_ranks_that_are_lost_too_often_end_the_system_with_a_report() -> None:
    system, ranks, _ = serving("launcher.max_restarts=1")
    system._start_again(Loss(ended(1), None))
    assert ranks.num_starts == 1
    with pytest.raises(_Ended) as end:
        system._start_again(Loss(ended(0), None))
    assert (end.value.code, ranks.num_starts) == (1, 1)
    notes = system.display.notes
    assert "  this is rank 0" in notes, "its last lines again"
    report = notes[notes.index("the ranks were lost 2 times within 600 s:") :]
    assert [line[12:] for line in report[1:3]] == [str(ended(1)), str(ended(0))], "behind the time of day"
    assert "raise launcher.max_restarts" in report[-1]


def test_ranks_that_end_at_every_start_get_ever_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    system, ranks, _ = serving()
    for had_served, pause_s in ((True, 0.0), (False, 5.0), (False, 10.0)):
        system._start_again(Loss(ended(1), None, had_served=had_served))
        if pause_s:
            now_s[0] += pause_s - 0.1
            system._start_when_due(system._starts_at_s)
            assert system._starts_at_s is not None, "it is not due"
            now_s[0] += 0.1
            system._start_when_due(system._starts_at_s)
        assert system._starts_at_s is None
    assert ranks.num_starts == 3
    assert [line for line in system.display.notes if line.startswith("the ranks are started again")] == [
        "the ranks are started again (restart 1 of 3 within 600 s)",
        "the ranks are started again in 5 s (restart 2 of 3 within 600 s)",
        "the ranks are started again in 10 s (restart 3 of 3 within 600 s)",
    ]
    with pytest.raises(_Ended):
        system._start_again(Loss(ended(1), None, had_served=False))


@pytest.mark.parametrize(("code", "said"), [(2, "exited with code 2"), (-6, "was killed by SIGABRT")])
@pytest.mark.parametrize("was_ready", [False, True])
def test_a_rank_that_cannot_start_ends_the_system_with_its_reason(code: int, said: str, was_ready: bool) -> None:
    """A wrong setting does so at a restart too; for what is lost then, ranks are started once more."""
    system, ranks, _ = serving()
    system._was_ready = was_ready
    loss = Loss(ended(1, code), None, had_served=False)
    if was_ready and code != 2:
        system._start_again(loss)
        assert system._starts_at_s is not None
    else:
        with pytest.raises(_Ended) as end:
            system._start_again(loss)
        assert end.value.code == (2 if code == 2 else 1)
    assert system.display.notes[:2] == [f"rank 1 (process 101) {said}", "  this is rank 1"]
    assert ranks.num_starts == 0


class Hosts:
    """In the place of a Leader: the other host comes and goes as the test says."""

    front_ends: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.missing: list[int] = []
        self.news: list[tuple[int, object]] = []  # returned by the next turn
        self.are_gone: list[str] = []

    def turn(self) -> list[tuple[int, object]]:
        news, self.news = self.news, []
        return news

    def gone(self, after_s: float) -> list[str]:
        return self.are_gone

    def tell(self, message: object) -> None:
        pass


class Pages:
    """In the place of a PageListener."""

    address = "10.0.0.1:1"

    def begin(self, launch_id: int) -> None:
        pass


class OnTwoHosts:
    """The launcher of the decode ranks, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str):
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.hosts, self.display = Hosts(), Display()
        overrides = ("parallel.num_ranks=1", "parallel.num_prefill_ranks=1", *overrides)
        config = load_config(overrides=list(overrides))
        self.ranks = RanksElsewhere(self.hosts, Pages())
        self.prefill = _Prefill(config.of_role("prefill"), self.display, self.ranks)
        arguments = config.of_role("decode"), self.display, Ranks(), Signals(), self.hosts, self.prefill
        self._system = _System(*arguments)
        self.prefill.start(lambda message: None)

    def turn(self, *news: object, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.hosts.news = [(1, each) for each in news]
        self._system._hear_of_prefill(self.hosts, self.prefill)
        self.prefill.turn()

    def lose(self, why: str = "it was killed") -> None:
        """Loses the prefill ranks; what is said of it takes a second."""
        self.prefill.lose(why)
        self.turn()
        self.turn(after_s=2)


def test_a_start_does_not_wait_for_prefill_ranks_whose_host_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OnTwoHosts(monkeypatch)
    system.hosts.missing, system.hosts.are_gone = [1], ["b"]
    system.turn()
    assert not system.prefill.is_ready
    system.turn(after_s=2)
    assert any("they are started again in 5 s" in line for line in system.display.notes)
    assert system.prefill.is_ready, "the decode ranks serve without them"
    first = system.ranks.launch_id
    system.hosts.missing, system.hosts.are_gone = [], []
    system.turn(HostIsNew("b", None), after_s=60)
    assert system.ranks.launch_id != first
    assert not system.prefill.is_ready


def test_a_start_waits_for_prefill_ranks_that_are_about_to_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OnTwoHosts(monkeypatch)
    system.lose()
    assert any("they are started again in 5 s" in line for line in system.display.notes)
    assert not system.prefill.is_ready


@pytest.mark.parametrize("why", ["setting", "losses"])
def test_prefill_ranks_that_were_given_up_come_back_with_the_next_launcher_of_their_host(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    system = OnTwoHosts(monkeypatch, "launcher.max_restarts=0")
    system.lose()
    system.prefill.is_wrong = why == "setting"
    assert "they are not started again; the decode ranks serve on" in system.display.notes
    assert system.prefill.is_ready
    given_up = system.ranks.launch_id
    system.turn(after_s=100)
    assert system.ranks.launch_id == given_up
    system.turn(HostIsNew("b", None))
    assert system.ranks.launch_id != given_up
    assert not system.prefill.is_wrong
    assert not system.prefill.is_ready


def test_prefill_ranks_are_started_again_where_their_start_may_be_lost_with_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = OnTwoHosts(monkeypatch)
    first = system.ranks.launch_id
    system.turn(HostIsBack("b"))
    for _ in range(3):
        system.turn(after_s=5)
    assert any("the connection with b was cut while they were started" in line for line in system.display.notes)
    assert system.ranks.launch_id != first


def test_prefill_ranks_that_serve_outlast_a_connection_of_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OnTwoHosts(monkeypatch)
    first = system.ranks.launch_id
    system.prefill.take(Ready(0, first, LIMITS, {}))
    system.turn(HostIsBack("b"))
    for _ in range(3):
        system.turn(after_s=5)
    assert system.prefill.is_ready
    assert system.ranks.launch_id == first
