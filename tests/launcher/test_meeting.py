"""Launchers of several hosts that meet: what does not fit is one clear message on every host. Ranks are not started."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moe_serve
from moe_serve.config import ServeConfig, load_config
from moe_serve.errors import ConfigError, LaunchError, ModelError, MoeServeError
from moe_serve.launcher import hosts
from moe_serve.launcher.hosts import (
    Follower,
    HostIsBack,
    HostIsNew,
    Leader,
    Note,
    Running,
    Start,
    StoppedError,
    TakePages,
    token_of_hosts,
)
from moe_serve.launcher.local import Launch
from moe_serve.launcher.rank_start import Handover, HostMemory
from moe_serve.launcher.system import Here, Signals, follow, lead
from moe_serve.links.link import Link
from tests.dispatch.hosts.relay import relay
from tests.launcher.running import eventually, quiet_port

TOKEN = "0123456789abcdef" * 2
THREE_RANKS = {"parallel": {"num_ranks": 3}}


class Display:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, style: str = "") -> None:
        self.notes.append(text)

    def line(self, who: str, line: str) -> None:
        self.notes.append(line)

    def stop(self) -> None:
        pass


class Launcher(threading.Thread):
    """A launcher in a thread. said: the error with which it ended, or its exit code

    look: as of serve_with_other_hosts;  more: settings other than those of all
    """

    def __init__(self, node_rank: int, port: int, *more: str, token: str = TOKEN, look: Callable = lambda config: None):
        super().__init__(daemon=True)
        settings = {
            "launcher.nnodes": 2, "launcher.node_rank": node_rank, "launcher.dist_init_addr": f"127.0.0.1:{port}",
            "parallel.num_ranks": 6, "server.attach_deadline_s": 20, "server.port": 0, "server.worker_port": port + 1,
        }  # fmt: skip
        self.config = load_config(overrides=[f"{key}={value}" for key, value in settings.items()] + list(more))
        self.display, self.signals = Display(), Signals()
        link = Link(token=token, host="127.0.0.1", port=port + 1)
        self.here = Here(self.display, look, Path("/nowhere"), link, self.signals)
        self.said: MoeServeError | StoppedError | int | None = None
        self.start()

    def run(self) -> None:
        try:
            self.said = (follow if self.config.launcher.node_rank else lead)(self.config, self.here)
        except (MoeServeError, StoppedError) as error:
            self.said = error

    def end(self, timeout_s: float = 60.0) -> str:
        """Returns all that it has said."""
        self.join(timeout_s)
        assert not self.is_alive(), self.display.notes
        return "\n".join([*self.display.notes, str(self.said)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_WARN_S", 0.3)
    monkeypatch.setattr(hosts, "_TELL_S", 0.5)
    monkeypatch.setattr(hosts, "_DIAL_S", 0.4)
    monkeypatch.setattr(hosts, "_REDIAL_S", 0.1)
    monkeypatch.setattr(hosts, "TURN_S", 0.01)


@pytest.fixture
def port() -> int:
    return quiet_port()


def test_two_hosts_that_say_node_rank_0_are_both_told(port: int) -> None:
    first = Launcher(0, port)
    time.sleep(0.2)
    second = Launcher(0, port)
    for each in (first, second):
        assert "two hosts say launcher.node_rank 0" in each.end()
        assert isinstance(each.said, MoeServeError)


def test_a_node_rank_that_is_given_twice_ends_all(port: int) -> None:
    three = "launcher.nnodes=3"
    launchers = [Launcher(node_rank, port, three) for node_rank in (0, 1)]
    time.sleep(0.3)
    launchers.append(Launcher(1, port, three))
    for each in launchers:
        assert "two hosts say launcher.node_rank 1" in each.end()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("launcher.nnodes=3", "hosts differ in launcher.nnodes: 2 on node rank 0"),
        ("cache.block_size=32", "node ranks differ in cache.block_size: 16 on node rank 0; 32 on node rank 1"),
    ],
)
def test_a_setting_that_differs_is_named_on_every_host(port: int, setting: str, said: str) -> None:
    for each in [Launcher(0, port), Launcher(1, port, setting)]:
        assert said in each.end()


def test_another_version_is_named_on_every_host(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Launcher(0, port)
    time.sleep(0.2)
    monkeypatch.setattr(moe_serve, "__version__", "9.9")
    second = Launcher(1, port)
    for each in (first, second):
        assert "node ranks differ in the version of moe_serve" in each.end()
        assert "9.9 on node rank 1" in each.end()


def test_another_token_is_named_on_both_sides(port: int) -> None:
    first = Launcher(0, port, "server.attach_deadline_s=0.5")
    second = Launcher(1, port, token="another" * 5)
    assert "has another token (MOE_SERVE_TOKEN)" in second.end()
    assert "node rank 1 of 2 had not come" in first.end()
    assert "127.0.0.1: it has another token" in str(first.said)


def test_hosts_without_a_token_say_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_SERVE_TOKEN", raising=False)
    config = load_config(overrides=["launcher.nnodes=2", "parallel.num_ranks=2", "launcher.dist_init_addr=h:1"])
    with pytest.raises(LaunchError, match=r"MOE_SERVE_TOKEN \(make one with: openssl rand -hex 32\)"):
        token_of_hosts(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launcher.nnodes=2"], "set it to HOST:PORT"),
        (["launcher.nnodes=2", "launcher.dist_init_addr=host"], "dist_init_addr is host"),
        (["launcher.nnodes=2", "launcher.dist_init_addr=h:1", "launcher.node_rank=2"], "count from 0 to 1"),
        (["launcher.nnodes=4", "launcher.dist_init_addr=h:1"], "a multiple of 4"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_the_hosts_meet(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(overrides=["parallel.num_ranks=6", *overrides])


def test_an_address_where_nobody_listens_is_named_at_the_deadline(port: int) -> None:
    said = Launcher(1, port, "server.attach_deadline_s=0.5").end()
    assert f"waiting for node rank 0 at 127.0.0.1:{port}: nothing listens there" in said
    assert f"node rank 0 was not met at 127.0.0.1:{port} within 0.5 s: nothing listens there" in said


def test_a_path_that_loses_large_packets_is_named_on_both_hosts(port: int) -> None:
    with relay(("127.0.0.1", port)) as between:
        between.largest = 100
        leader = Launcher(0, port, "server.attach_deadline_s=1.5")
        follower = Launcher(1, between.address[1], "server.attach_deadline_s=1.5")
        for said in (leader.end(), follower.end()):
            assert "small packets pass and large ones do not: some MTU on the way is too small" in said


def test_a_host_that_does_not_come_is_named_at_the_deadline(port: int) -> None:
    said = Launcher(0, port, "server.attach_deadline_s=0.5").end()
    assert "node rank 1 of 2 had not come" in said
    assert "server.attach_deadline_s" in said


def test_an_address_of_another_machine_is_no_place_for_node_rank_0(port: int) -> None:
    said = Launcher(0, port, f"launcher.dist_init_addr=192.0.2.1:{port}").end()
    assert "launcher.dist_init_addr is '192.0.2.1', which is no address of this machine" in said
    assert "node rank 0 listens there" in said


@contextlib.contextmanager
def program(*says: bytes) -> Iterator[int]:
    """Yields the port of a program that says this to each connection, and closes it; without words it waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(listener.accept()[0])
                    if says:
                        kept[-1].recv(4096)
                        kept[-1].sendall(says[0])
                        kept[-1].close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        for each in kept:
            each.close()


@pytest.mark.parametrize("says", ["SSH-2.0-OpenSSH_9.2", "HTTP/1.1 400 Bad Request"])
def test_another_program_at_the_address_is_named_at_once(says: str) -> None:
    with program(says.encode() + b"\r\n") as port:
        assert f"another program is there, which says {says!r}" in Launcher(1, port).end(5)


def test_a_program_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    with program() as port:
        assert "no answer, as where a firewall drops" in Launcher(1, port, "server.attach_deadline_s=1").end()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_port_that_another_program_has_is_one_message_on_every_host(port: int, number: int) -> None:
    """Where decode ranks attach, prefill ranks, and where pages come."""
    roles = ("parallel.num_prefill_ranks=1", "parallel.handover_gb=0.01") * (number > 1)
    with socket.create_server(("127.0.0.1", port + number)):
        for each in [Launcher(0, port, *roles), Launcher(1, port, *roles)]:
            assert f"port {port + number} on 127.0.0.1 cannot be opened" in each.end()
            assert "server.worker_port" in each.end()


def missing(config: object) -> None:
    raise ModelError("model.path is '/models/a' but there is no such folder")


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_model_that_is_missing_on_one_host_ends_all_with_its_reason(port: int, node_rank: int) -> None:
    looks = [missing if number == node_rank else lambda config: None for number in range(2)]
    for number, each in enumerate([Launcher(number, port, look=look) for number, look in enumerate(looks)]):
        assert "model.path is '/models/a' but there is no such folder" in each.end()
        if number == 0 and node_rank == 1:
            assert "node rank 1 (" in each.end()


@pytest.mark.parametrize("node_rank", [0, 1])
def test_ctrl_c_while_hosts_meet_ends_all(port: int, node_rank: int) -> None:
    launchers = [Launcher(number, port, "launcher.nnodes=3") for number in range(2)]
    assert eventually(lambda: any("is here" in note for note in launchers[1].display.notes))
    launchers[node_rank].signals.count(2)
    said = [each.end() for each in launchers]
    assert isinstance(launchers[node_rank].said, StoppedError)
    assert "was told to end" in said[1 - node_rank]


@contextlib.contextmanager
def met(port: int) -> Iterator[tuple[Leader, Follower]]:
    configs = [
        load_config(
            overrides=[
                "launcher.nnodes=2", f"launcher.node_rank={number}", f"launcher.dist_init_addr=127.0.0.1:{port}",
                "parallel.num_ranks=2",
            ]
        )
        for number in range(2)
    ]  # fmt: skip
    notes: list[str] = []
    leader, follower = Leader(configs[0], TOKEN, notes.append), Follower(configs[1], TOKEN, notes.append)
    with contextlib.closing(leader), contextlib.closing(follower):
        turns = threading.Thread(target=leader.meet, args=(lambda: False,))
        turns.start()
        while not follower.is_connected:
            follower.turn()
        turns.join()
        yield leader, follower


def test_a_connection_that_is_cut_is_made_again_and_the_host_is_the_same(port: int) -> None:
    with met(port) as (leader, follower):
        assert follower._channel is not None
        follower._channel.socket.shutdown(socket.SHUT_RDWR)
        found: list[object] = []
        news: list[object] = []
        until_s = time.monotonic() + 10
        while (leader.missing or not follower.is_connected or not found) and time.monotonic() < until_s:
            news += leader.turn()
            found += [each for each in follower.turn() if isinstance(each, Start)]
            if not leader.missing and follower.is_connected:
                leader.tell(Start(Launch(7, "h", 1)))
        assert found[0] == Start(Launch(7, "h", 1))
        ((node_rank, message),) = news
        assert isinstance(message, HostIsBack)
        assert node_rank == 1


@pytest.mark.parametrize("says", ["before", "behind"])
def test_what_comes_beside_the_start_is_not_lost(port: int, says: str) -> None:
    start = Start(Launch(7, "h", 1))
    with met(port) as (leader, follower):
        for message in (TakePages(8), start) if says == "before" else (start, TakePages(8)):
            leader.tell(message)
        leader.tell(Note("b"))
        assert follower.meet(lambda: False) == Start(Launch(7, "h", 1))
        found: list[object] = []
        until_s = time.monotonic() + 10
        while len(found) < 2 and time.monotonic() < until_s:
            found += follower.turn()
        assert found == [TakePages(8), Note("b")]


@pytest.mark.parametrize("node_rank", [1, 2])
def test_a_decode_host_stays_at_its_address_where_pages_are_sent(port: int, node_rank: int) -> None:
    settings = ["launcher.nnodes=3", f"launcher.dist_init_addr=127.0.0.1:{port}", "parallel.num_prefill_ranks=1"]
    settings.append("parallel.num_ranks=2")
    configs = [load_config(overrides=[*settings, f"launcher.node_rank={each}"]) for each in range(3)]
    with contextlib.closing(Leader(configs[0], TOKEN, lambda line: None)) as leader:
        leader._has_met = True
        leader._others[node_rank] = hosts._Other(hosts._hello(configs[node_rank]), "10.0.0.8", None)
        problem = leader._misfit(hosts._Other(hosts._hello(configs[node_rank]), "10.0.0.9", None))
    if node_rank == 2:
        assert problem is None, "it has prefill ranks"
    else:
        assert problem is not None
        assert problem.startswith("pages for node rank 1 go to 10.0.0.8 and ")
        assert problem.endswith(" is at 10.0.0.9; start it at that address again, or start all hosts again")


def configs_of(nnodes: int, port: int) -> list[ServeConfig]:
    """Returns the settings of hosts that all have a front end."""
    settings = {"nnodes": nnodes, "dist_init_addr": f"127.0.0.1:{port}", "front_ends": "every_host"}
    every = [f"launcher.{key}={value}" for key, value in settings.items()]
    return [
        load_config(overrides=[*every, f"launcher.node_rank={number}"], base=THREE_RANKS) for number in range(nnodes)
    ]


def turned(leader: Leader, followers: list[Follower]) -> list[tuple[int, object]]:
    """Lets all be connected; returns what node rank 0 has heard."""
    found: list[tuple[int, object]] = []
    until_s = time.monotonic() + 5
    while leader.missing or not all(each.is_connected for each in followers):
        assert time.monotonic() < until_s
        for each in followers:
            each.turn()
        found += leader.turn()
    return found + leader.turn()


def test_the_next_launcher_of_node_rank_0_takes_over_a_launch_that_serves(port: int) -> None:
    """Where ranks go on after the loss of node rank 0, it does not wait for all hosts, and starts no launch anew."""
    configs, notes = configs_of(3, port), list[str]()
    launch = Launch(7, "127.0.0.1", 1, tuple(f"127.0.0.1:{configs[0].server.worker_port}" for _ in range(3)))
    memory = HostMemory(Handover(7, 1, {}, "", []), {})
    apart, serving = (Running(launch, memory, {0: 2, 1: 1}, [], is_serving) for is_serving in (False, True))
    followers = [Follower(configs[number], TOKEN, notes.append) for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        for each in followers:
            stack.callback(each.close)
        leader = stack.enter_context(contextlib.closing(Leader(configs[0], TOKEN, notes.append)))
        followers[0].find_running = lambda: apart
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            followers[0].turn()
            assert leader.turn() == []
        assert leader._running is None, "that host may not answer"
        followers[0]._cut("the test")
        followers[0].find_running = lambda: serving
        took: list[Running | None] = []
        waits = threading.Thread(target=lambda: took.append(leader.meet(lambda: False)))
        waits.start()
        while waits.is_alive():
            followers[0].turn()
        assert took == [serving]
        assert leader.front_ends == launch.front_ends
        heard = turned(leader, followers)
    assert [(rank, message.running) for rank, message in heard if isinstance(message, HostIsNew)] == [
        (1, serving), (2, None),
    ], "so node rank 2 is told to join"  # fmt: skip


def test_unauthenticated_peers_at_the_rendezvous_keep_nobody_out(port: int) -> None:
    first = Launcher(0, port, "launcher.nnodes=3")
    time.sleep(0.2)
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    for each in peers[::2]:
        with contextlib.suppress(OSError):
            each.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    second = Launcher(1, port, "launcher.nnodes=3")
    time.sleep(0.5)
    for each in peers:
        each.close()
    deadline_s = time.monotonic() + 10
    while not any("1 (" in line and "is here" in line for line in first.display.notes):
        assert time.monotonic() < deadline_s, first.display.notes
        time.sleep(0.02)
    first.signals.count(2)
    second.end()
    first.end()
