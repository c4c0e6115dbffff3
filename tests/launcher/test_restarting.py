"""What a launcher makes of lost ranks: a restart, also while it drains, ever longer pauses, the end. No processes."""

import os
import signal
import socket
from collections.abc import Collection
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_serve.config import load_config
from moe_serve.engine.protocol.messages import Apart, ModelLimits, Ready
from moe_serve.launcher import launch_watch, local
from moe_serve.launcher import system as system_module
from moe_serve.launcher.hosts import (
    Died,
    FrontEndsEnded,
    HostIsBack,
    HostIsNew,
    Join,
    MemoryIs,
    Start,
    TakePages,
    TellMemory,
)
from moe_serve.launcher.launch_watch import Loss
from moe_serve.launcher.local import Death, Launch
from moe_serve.launcher.rank_start import Handover, HostMemory
from moe_serve.launcher.system import PrefillElsewhere, RanksOfHosts, Signals, _Ended, _OtherHost, _Prefill, _System
from moe_serve.links.link import Link
from moe_serve.links.listeners import refuse_new_connections
from tests.clock import Clock
from tests.launcher.listening import takes_connections

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

    def keep_host(self) -> None:
        pass

    def deaths(self) -> list[Death]:
        return []


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
    clock = Clock(monkeypatch, 1000.0, system_module, local, launch_watch)
    system, ranks, _ = serving()
    for had_served, pause_s in ((True, 0.0), (False, 5.0), (False, 10.0)):
        system._start_again(Loss(ended(1), None, had_served=had_served))
        if pause_s:
            clock.now_s += pause_s - 0.1
            system._start_when_due(system._starts_at_s)
            assert system._starts_at_s is not None, "it is not due"
            clock.now_s += 0.1
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
    """In the place of a Leader: other hosts come and go as the test says, and are told things."""

    front_ends: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.missing: list[int] = []
        self.news: list[tuple[int, object]] = []  # returned by the next turn
        self.are_gone: dict[int, str] = {}
        self.told: list[tuple[object, list[int]]] = []

    def turn(self) -> list[tuple[int, object]]:
        news, self.news = self.news, []
        return news

    def gone(self, after_s: float) -> dict[int, str]:
        return self.are_gone

    def address_of(self, node_rank: int) -> str:
        return f"10.0.0.{node_rank}"

    def tell(self, message: object, node_ranks: Collection[int] | None = None) -> None:
        self.told.append((message, list(node_ranks or ())))

    def told_last(self, kind: type) -> tuple[object, list[int]]:
        return [each for each in self.told if isinstance(each[0], kind)][-1]


class Pages:
    """In the place of a PageListener."""

    launch_id = 0

    def begin(self, launch_id: int) -> None:
        self.launch_id = launch_id


class OnHosts:
    """The launcher of node rank 0, where decode ranks are on the first hosts and prefill ranks on the last, and its
    clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str, nnodes: int = 2, prefill_nnodes: int = 1):
        self.clock = Clock(monkeypatch, 1000.0, system_module, local, launch_watch)
        self.hosts, self.display, self.pages = Hosts(), Display(), Pages()
        hosts = f"launcher.nnodes={nnodes}", f"launcher.prefill_nnodes={prefill_nnodes}", "launcher.dist_init_addr=h:5"
        numbers = f"parallel.num_ranks={nnodes - prefill_nnodes}", f"parallel.num_prefill_ranks={prefill_nnodes}"
        config = load_config(overrides=[*hosts, *numbers, *overrides])
        own, theirs = config.of_role("decode"), config.of_role("prefill")
        self.ranks = PrefillElsewhere(self.hosts, theirs, ("a:1",), ("a:3", "b:3"), self.pages)
        self.prefill = _Prefill(theirs, self.display, self.ranks)
        decode = RanksOfHosts(self.hosts, own, lambda who, line: None, Path("/nowhere"), Link(token="t" * 32))
        self._system = _System(own, self.display, decode, Signals(), self.hosts, self.prefill)
        self.prefill.start(lambda message: None)

    def turn(self, *news: object, after_s: float = 0.0) -> None:
        self.clock.now_s += after_s
        self.hosts.news = [each if isinstance(each, tuple) else (self.ranks.nodes[-1], each) for each in news]
        self._system._hear(self.hosts)
        self.prefill.turn()

    def lose(self, why: str = "it was killed") -> None:
        """Loses the prefill ranks; what is said of it takes a second."""
        self.prefill.lose(why)
        self.turn()
        self.turn(after_s=2)


def test_a_start_does_not_wait_for_prefill_ranks_whose_host_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OnHosts(monkeypatch)
    system.hosts.missing, system.hosts.are_gone = [1], {1: "b"}
    system.turn()
    assert not system.prefill.is_ready
    system.turn(after_s=2)
    assert any("they are started again in 5 s" in line for line in system.display.notes)
    assert system.prefill.is_ready, "the decode ranks serve without them"
    first = system.ranks.launch_id
    system.hosts.missing, system.hosts.are_gone = [], {}
    system.turn(HostIsNew("b", None), after_s=60)
    assert system.ranks.launch_id != first
    assert not system.prefill.is_ready


def test_a_start_waits_for_prefill_ranks_that_are_about_to_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OnHosts(monkeypatch)
    system.lose()
    assert any("they are started again in 5 s" in line for line in system.display.notes)
    assert not system.prefill.is_ready


@pytest.mark.parametrize("why", ["setting", "losses"])
def test_prefill_ranks_that_were_given_up_come_back_with_the_next_launcher_of_their_host(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    system = OnHosts(monkeypatch, "launcher.max_restarts=0")
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


def test_a_host_is_told_again_to_start_its_ranks_where_that_may_be_lost_with_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = OnHosts(monkeypatch)
    start, _ = system.hosts.told_last(Start)
    system.hosts.told.clear()
    system.turn(HostIsBack("b"))
    assert system.hosts.told == [(start, [1])]
    system.lose()
    system.turn(HostIsBack("b"))
    assert len(system.hosts.told) == 2, "that its ranks end, and no start of ranks that are lost"


def on_three_hosts(tmp_path: Path) -> tuple[_System, RanksOfHosts, Hosts]:
    """Returns node rank 0 of three hosts without roles, whose ranks are about to be started."""
    config = load_config(overrides=["parallel.num_ranks=3", "launcher.nnodes=3", "launcher.dist_init_addr=h:5"])
    hosts = Hosts()
    ranks = RanksOfHosts(hosts, config, lambda who, line: None, tmp_path, Link(token="t" * 32))
    system = _System(config, Display(), ranks, Signals(), hosts)
    ranks.elsewhere.start_in(LAUNCH)
    ranks.launch_id = LAUNCH.launch_id
    return system, ranks, hosts


LAUNCH, NEXT = Launch(7, "127.0.0.1", 1), Launch(8, "127.0.0.1", 2)


def test_hosts_without_roles_are_told_again_until_all_ranks_are_ready(tmp_path: Path) -> None:
    system, _, hosts = on_three_hosts(tmp_path)
    told = [(Start(LAUNCH), [1, 2])]
    for node_rank in (1, 2):
        hosts.news = [(node_rank, HostIsBack("b"))]
        system._hear(hosts)
        told.append((Start(LAUNCH), [node_rank]))
        assert hosts.told == told
    for rank in range(3):
        system._launch.take(Ready(rank, 7, LIMITS, {}))
    hosts.news = [(1, HostIsBack("b"))]
    system._hear(hosts)
    assert hosts.told == told


def test_what_is_told_again_is_of_the_newest_launch(tmp_path: Path) -> None:
    system, ranks, hosts = on_three_hosts(tmp_path)
    for launch in (LAUNCH, NEXT):
        if launch is NEXT:
            ranks.elsewhere.start_in(NEXT)
            ranks.launch_id = NEXT.launch_id
        hosts.told.clear()
        hosts.news = [(1, HostIsBack("b")), (1, Died(launch.launch_id, ended(1)))]
        system._hear(hosts)
        assert hosts.told == [(Start(launch), [1])]
        assert ranks.deaths() == [ended(1)], "the first process of this rank has ended in each launch"


def test_no_host_is_told_to_start_ranks_that_are_lost_while_their_pause_runs(tmp_path: Path) -> None:
    system, _, hosts = on_three_hosts(tmp_path)
    system._was_ready = True
    system._start_again(Loss(ended(1), None, had_served=False))
    hosts.told.clear()
    hosts.news = [(1, HostIsBack("b"))]
    system._hear(hosts)
    assert not hosts.told


def test_a_rank_whose_end_is_told_again_has_ended_once(tmp_path: Path) -> None:
    system, ranks, hosts = on_three_hosts(tmp_path)
    again = Death(1, 101, -9, ("this is rank 1", "and one line more"))
    replacement = Death(1, 102, -9, (), num_before=1)
    for told, found in ((ended(1), ended(1)), (again, None), (replacement, replacement), (again, None)):
        hosts.news = [(1, Died(7, told))]
        system._hear(hosts)
        assert ranks.deaths() == ([] if found is None else [found])


class Leading:
    """In the place of a Follower: node rank 0 says what the test says, and is reached when it says so."""

    cut_for_s = 0.0
    is_connected = True

    def __init__(self) -> None:
        self.says: list[object] = []  # next
        self.told: list[object] = []

    def turn(self) -> list[object]:
        says, self.says = self.says, []
        return says

    def tell(self, message: object) -> bool:
        if self.is_connected:
            self.told.append(message)
        return self.is_connected


class RanksHere(Ranks):
    """Of node rank 1, which have been started in LAUNCH; the one there is has ended."""

    launch_id = LAUNCH.launch_id

    def start_in(self, launch: Launch) -> None:
        self.launch_id = launch.launch_id
        self.start()

    def ended(self) -> list[Death]:
        return [ended(1)]


def another_host(listener: object = None) -> tuple[_OtherHost, Leading, RanksHere]:
    """Returns node rank 1. listener: takes HTTP; None: its host does not"""
    leader, ranks = Leading(), RanksHere()
    here = SimpleNamespace(display=Display(), signals=Signals())
    config = load_config(overrides=["parallel.num_ranks=2"])
    return _OtherHost(config, here, leader, ranks, listener, None, None), leader, ranks


def test_a_launcher_that_is_told_again_starts_nothing_and_tells_again_which_ranks_have_ended() -> None:
    launcher, leader, ranks = another_host()
    leader.says = [Start(LAUNCH)]
    for _ in range(2):
        assert launcher._turn() is None
        assert leader.told == [Died(7, ended(1))]
    assert ranks.num_starts == 0
    leader.says = [Start(LAUNCH), Start(NEXT)]
    assert launcher._turn() is None
    assert (ranks.num_starts, ranks.launch_id) == (1, NEXT.launch_id)
    assert leader.told == [Died(7, ended(1))], "nothing of ranks that are gone"


class FrontEndsThatCannotStart:
    """In the place of those of another host, which say at their start that a setting is wrong."""

    def receive(self, wait_ms: int) -> list[object]:
        return []

    def serve(self, launch_id: int) -> bool:
        return False

    def goes_on(self, launch_id: int) -> bool:
        return False

    def watch(self) -> int:
        return 2

    def tell(self, message: object) -> None:
        pass


def test_the_end_of_front_ends_is_told_when_node_rank_0_is_reached_and_told_again() -> None:
    launcher, leader, _ = another_host(listener=object())
    launcher._front_ends, leader.is_connected = FrontEndsThatCannotStart(), False
    for says in ([], [Start(NEXT)], []):
        leader.says = says
        assert launcher._turn() is None
    leader.is_connected = True
    launcher._turn()
    assert leader.told == [FrontEndsEnded(2)]
    leader.says = [Start(NEXT)]  # the connection was cut before it arrived
    launcher._turn()
    assert leader.told[1:] == [Died(8, ended(1)), FrontEndsEnded(2)]
    launcher._turn()
    assert len(leader.told) == 3


def test_prefill_ranks_that_serve_outlast_a_connection_of_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OnHosts(monkeypatch)
    first = system.ranks.launch_id
    system.prefill.take(Ready(0, first, LIMITS, {}))
    system.turn(HostIsBack("b"))
    for _ in range(3):
        system.turn(after_s=5)
    assert system.prefill.is_ready
    assert system.ranks.launch_id == first


def test_prefill_ranks_of_several_hosts_meet_on_the_first_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other decode hosts learn whose pages they take, again where they may not have heard."""
    system = OnHosts(monkeypatch, nnodes=4, prefill_nnodes=2)
    (start, to), launch_id = system.hosts.told_last(Start), system.ranks.launch_id
    assert to == [2, 3]
    assert start == Start(Launch(launch_id, "10.0.0.2", system.ranks._store_port, ("a:1",), ("a:3", "b:3")))
    assert system.pages.launch_id == launch_id
    assert [type(message) for message, _ in system.hosts.told] == [TakePages, Start]
    system.turn((1, HostIsBack("b")))
    assert system.hosts.told[-1] == (TakePages(launch_id), [0, 1])


class RanksWithStore(Ranks):
    """Rank 0 opens the store of each launch, and closes it for all that come once the ranks have met."""

    def __init__(self) -> None:
        self.stores: list[socket.socket] = []

    def start_in(self, launch: Launch, store_fd: int | None = None) -> None:
        assert store_fd is not None
        self.stores.append(socket.socket(fileno=os.dup(store_fd)))

    def end(self, grace_s: float) -> None:
        for each in self.stores:
            each.close()


def test_the_store_of_each_launch_is_a_new_one_which_its_ranks_reach_until_they_have_met() -> None:
    with socket.create_server(("127.0.77.1", 0)) as found:
        host, port = found.getsockname()
    config = load_config(overrides=[f"server.worker_port={port - 2}", "server.api_workers=1"])
    assert config.page_port == port
    ranks = RanksWithStore()
    here = SimpleNamespace(display=Display(), signals=Signals())
    launcher = _OtherHost(config, here, SimpleNamespace(), ranks, None, None, host)
    for number in (1, 2):
        launcher._begin(Start(Launch(number, host, port)))
        assert takes_connections((host, port))
        process = get_context("fork").Process(target=refuse_new_connections)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert not takes_connections((host, port)), "the ranks have met"
    ranks.end(0.0)
    with pytest.raises(ConnectionRefusedError):  # the launcher has kept none, at which a rank would wait for nothing
        socket.create_connection((host, port), 60)
    assert len(ranks.stores) == 2


def is_ready(system: OnHosts) -> None:
    for rank in range(len(system.ranks.nodes)):
        system.prefill.take(Ready(rank, system.ranks.launch_id, LIMITS, {"on_lost_rank": "mask"}))
    assert system.prefill.is_ready


MEMORY = HostMemory(Handover(7, 1, {}, "", []), {})


def test_a_prefill_host_that_is_back_joins_the_other_one_which_tells_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = OnHosts(monkeypatch, nnodes=3, prefill_nnodes=2)
    is_ready(system)
    launch = system.hosts.told_last(Start)[0].launch
    system.hosts.missing, system.hosts.are_gone = [2], {2: "c"}
    system.turn(after_s=20)
    assert system.prefill.is_ready, "the ranks of the other host say what becomes of those"
    system.hosts.missing, system.hosts.are_gone = [], {}
    system.turn((2, HostIsNew("c", None)))
    assert "c is back; its ranks join the others" in system.display.notes
    assert system.hosts.told[-1] == (TellMemory(launch.launch_id), [1])
    system.turn((1, HostIsBack("b")))
    assert [message for message, _ in system.hosts.told].count(TellMemory(launch.launch_id)) == 2
    system.turn((1, MemoryIs(launch.launch_id + 1, MEMORY)), (1, MemoryIs(launch.launch_id, MEMORY)))
    joined = system.hosts.told[-1]
    assert joined == (Join(launch, MEMORY, {1: 1000}), [2])
    system.turn((1, MemoryIs(launch.launch_id, MEMORY)))
    assert system.hosts.told[-1] == joined, "once"


def test_another_prefill_host_is_asked_where_the_one_that_was_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OnHosts(monkeypatch, nnodes=4, prefill_nnodes=3)
    is_ready(system)
    asks = TellMemory(system.ranks.launch_id)
    system.turn((3, HostIsNew("d", None)))
    assert system.hosts.told[-1] == (asks, [1])
    system.hosts.missing, system.hosts.are_gone = [1], {1: "b"}
    for _ in range(3):
        system.turn(after_s=5)
    assert [ranks for message, ranks in system.hosts.told if message == asks] == [[1], [2]], "each once"


@pytest.mark.parametrize("has_served", [False, True])
def test_a_rank_that_cannot_start_has_a_wrong_setting_unless_others_have_served_with_it(
    monkeypatch: pytest.MonkeyPatch, has_served: bool
) -> None:
    system = OnHosts(monkeypatch)
    if has_served:  # later the network between hosts may fail while ranks look for each other
        is_ready(system)
        system.lose()
        system.turn(after_s=30)
    launch = system.prefill._launch
    assert launch is not None
    monkeypatch.setattr(launch, "find_loss", lambda: Loss(ended(0, 2), None, had_served=False))
    system.turn()
    assert system.prefill.is_wrong != has_served
    assert any("they are started again in" in line for line in system.display.notes[-1:]) == has_served


@pytest.mark.parametrize(
    "loss", ["all hosts are gone", "the other one has nothing left", "the other one waits", "while they start"]
)
def test_prefill_ranks_of_two_hosts_are_started_again_where_none_can_go_on(
    monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    system = OnHosts(monkeypatch, nnodes=3, prefill_nnodes=2)
    first = system.ranks.launch_id
    if loss != "while they start":
        is_ready(system)
    if loss == "the other one waits":  # as where the first one is lost
        system.prefill.take(Apart(1, first, 0, "rank 0 is not reached"))
        system.turn((1, HostIsNew("b", None)))
    elif loss == "the other one has nothing left":
        system.turn((2, HostIsNew("c", None)))
        system.turn((1, MemoryIs(first, None)))
    else:
        system.hosts.are_gone = {2: "c"} if loss == "while they start" else {1: "b", 2: "c"}
        system.turn()
    system.hosts.are_gone = {}
    for _ in range(3):
        system.turn(after_s=5)
    assert system.ranks.launch_id != first, system.display.notes
