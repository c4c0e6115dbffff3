"""The launchers of several hosts as one: `moe-serve serve --nnodes N --node-rank R --dist-init-addr HOST:PORT` on each.

The launcher of node rank 0 listens at HOST:PORT and leads: it says when all ranks start and when the system ends. The
others connect to it, each starts the ranks of its own host, and reports how they end. Before any rank starts, the
launchers compare what they are; what does not fit ends all of them with one message. A connection that is cut is made
again. Where ranks serve on without their leader, the next one lets its own ranks join them. Nothing blocks: `turn` is
called often. Node ranks are numbers of hosts; ranks are numbers of processes.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Exited, Fatal
from moe_serve.errors import ConfigError, LaunchError, MoeServeError
from moe_serve.launcher.facts import Fact, first_difference, launcher_facts
from moe_serve.launcher.local import Death, Launch
from moe_serve.launcher.rank_start import HostMemory
from moe_serve.links.channel import Channel, NotOursError
from moe_serve.links.link import TOKEN, host_and_port, shared_token
from moe_serve.server.edge.ports import open_port

TURN_S = 0.05
_WARN_S = 5.0  # a host that is not there by then is named, and again whenever the wait has doubled
_TELL_S = 15.0  # how long a launcher that cannot start waits for the others, to tell them why
_PROVE_S = 10.0  # for a new connection to prove itself
_DIAL_S = 5.0  # for one attempt to connect
_REDIAL_S = 0.5
_CLOSE_S = 1.0
_MOST_ARRIVING = 64
_MOST_REFUSED = 8  # kept for the report


class HostMessage(msgspec.Struct, frozen=True):
    """Base of all messages between launchers."""


class Running(HostMessage, frozen=True):
    """A launch whose ranks a host runs, for a launcher of node rank 0 that does not know it.

    memory:     what hosts need that join;  num_before: by rank, processes that were this rank before
    ended:      ranks of this host whose processes have ended
    is_serving: the ranks here reach those of most hosts, so the launch is not to be ended
    """

    launch: Launch
    memory: HostMemory
    num_before: dict[int, int]
    ended: list[Death]
    is_serving: bool


class HostHello(HostMessage, tag="hello", frozen=True):
    """A launcher says what it is, on every new connection.

    process: a random number of its process;  facts: what all launchers must have in common
    problem: why its host cannot take part; "": it can
    running: None: no ranks that others could join
    """

    node_rank: int
    nnodes: int
    host: str
    process: str
    facts: list[Fact]
    problem: str = ""
    running: Running | None = None


class Start(HostMessage, tag="start", frozen=True):
    """Start the ranks of your host, after those of an earlier launch have been ended."""

    launch: Launch


class EndRanks(HostMessage, tag="end_ranks", frozen=True):
    """End the ranks of your host; those that are ending by themselves get grace_s."""

    grace_s: float


class Join(HostMessage, tag="join", frozen=True):
    """Start the ranks of your host, which have all ended, beside the others of a launch that goes on.

    num_before: by rank, also of other hosts, processes that were this rank before
    """

    launch: Launch
    memory: HostMemory
    num_before: dict[int, int]


class TakePages(HostMessage, tag="take_pages", frozen=True):
    """Take pages of the prefill ranks of this launch."""

    launch_id: int


class TellMemory(HostMessage, tag="tell_memory", frozen=True):
    """Tell what another host needs to join this launch, which your host has ranks of."""

    launch_id: int


class MemoryIs(HostMessage, tag="memory_is", frozen=True):
    """What another host needs to join this launch. memory: None: my ranks have left nothing of it"""

    launch_id: int
    memory: HostMemory | None


class Replace(HostMessage, tag="replace", frozen=True):
    """Start a rank of your host anew, beside the others of its launch, unless your host has done so.

    num_before: of the process to be replaced
    """

    launch_id: int
    rank: int
    num_before: int


class EndRank(HostMessage, tag="end_rank", frozen=True):
    """End what is left of a rank of your host. num_before: of the process that is meant"""

    launch_id: int
    rank: int
    num_before: int


class End(HostMessage, tag="end", frozen=True):
    """The system ends, with this exit code. reason: "" where it ends as it should"""

    reason: str
    code: int
    grace_s: float = 0.0


class Note(HostMessage, tag="note", frozen=True):
    """A line to print on every host."""

    text: str
    style: str = ""


class Died(HostMessage, tag="died", frozen=True):
    """A rank of my host has ended."""

    launch_id: int
    death: Death


class Signalled(HostMessage, tag="signalled", frozen=True):
    """My launcher has got this signal: the whole system is to end."""

    number: int


class TellFrontEnds(HostMessage, tag="tell_front_ends", frozen=True):
    """Tell the front ends of your host what has become of a rank, or of the launch."""

    message: Exited | Fatal


class Drain(HostMessage, tag="drain", frozen=True):
    """Let the front ends of your host end, once their open requests have."""


class FrontEndsEnded(HostMessage, tag="front_ends_ended", frozen=True):
    """The front ends of my host have ended. code: 0: as they were told; else why the system must end"""

    code: int


class HostIsNew(HostMessage, frozen=True):
    """The launcher of a host is another process than before, or this one is. Never sent: the leader notes it.

    running: the launch whose ranks that host runs; None: what it had started is gone, if there was anything
    """

    host: str
    running: Running | None


class HostIsBack(HostMessage, frozen=True):
    """The launcher of a host has a new connection: what was on its way may be lost. Never sent: the leader notes it."""

    host: str


_Any = (
    HostHello | Start | EndRanks | Join | TakePages | TellMemory | Replace | EndRank | End | Note | TellFrontEnds
    | Drain | MemoryIs | Died | Signalled | FrontEndsEnded
)  # fmt: skip
_News = HostIsNew | HostIsBack
_decoder = msgspec.json.Decoder(_Any)


class StoppedError(Exception):
    """The launcher was told to end while it waited for the others."""


def token_of_hosts(config: ServeConfig) -> str:
    """Returns the token by which the hosts trust each other. Raises LaunchError where none is set."""
    if not os.environ.get(TOKEN) and config.server.token_file is None:
        raise LaunchError(
            f"launcher.nnodes is {config.launcher.nnodes} and no token is set, by which the hosts trust each other; "
            f"give all of them the same ${TOKEN} (make one with: openssl rand -hex 32), or a server.token_file"
        )
    return shared_token(config.server.token_file, config.server.worker_host, config.server.worker_port)


def _hello(config: ServeConfig) -> HostHello:
    launcher = config.launcher
    name, process = socket.gethostname(), secrets.token_hex(8)
    return HostHello(launcher.node_rank, launcher.nnodes, name, process, launcher_facts(config))


@dataclass
class _Other:
    """A launcher that has proved itself and fits. channel: None while its connection is cut, since cut_s"""

    hello: HostHello
    address: str
    channel: Channel | None
    cut_s: float = 0.0

    @property
    def name(self) -> str:
        return f"node rank {self.hello.node_rank} ({self.hello.host}, {self.address})"


class Leader:
    """Node rank 0's side. Raises LaunchError where the address is not this host's or is taken; see `Follower` then.

    note: prints a line
    """

    def __init__(self, config: ServeConfig, token: str, note: Callable[[str], None]):
        host, port = config.launcher.meeting_place()
        self._where = f"{host}:{port}"
        self._listener = open_port(host, port, "launcher.dist_init_addr", "launcher.dist_init_addr")
        self._config, self._token, self._note = config, token, note
        self._hello = _hello(config)
        self._arriving: deque[tuple[Channel, str, float]] = deque()
        self._others: dict[int, _Other] = {}
        self._refused: deque[str] = deque(maxlen=_MOST_REFUSED)
        self._misfits: deque[_Other] = deque(maxlen=_MOST_REFUSED)  # have been told so, and will close
        self._has_met = False
        self._front_ends: tuple[str, ...] = ()
        self._running: Running | None = None  # a launch that has lost its leader
        self._news: list[tuple[int, _News]] = []  # not returned yet

    @property
    def missing(self) -> list[int]:
        """The node ranks without a connection."""
        there = {rank for rank, other in self._others.items() if other.channel is not None}
        return [rank for rank in range(1, self._config.launcher.nnodes) if rank not in there]

    @property
    def front_ends(self) -> tuple[str, ...]:
        """HOST:PORT of each front end, by its number, as the others reach it. They stay, once all have met."""
        config = self._config
        if not self._front_ends:
            hosts = [config.launcher.meeting_place()[0]]
            if config.launcher.front_ends == "every_host":
                hosts += [self._others[rank].address for rank in range(1, config.launcher.nnodes)]
            first = config.server.worker_port
            ports = range(first, first + config.server.api_workers)
            self._front_ends = tuple(host_and_port(host, port) for host in hosts for port in ports)
        return self._front_ends

    def address_of(self, node_rank: int) -> str:
        """Returns the address of a host that has come, as the others reach it."""
        return self._others[node_rank].address if node_rank else self._config.launcher.meeting_place()[0]

    def meet(self, is_stopped: Callable[[], bool]) -> Running | None:
        """Waits for all others, or for one whose ranks serve: they have lost their leader, and this host joins them.

        Raises LaunchError or ConfigError where one does not come in time, cannot start or does not fit, StoppedError
        where this launcher is told to end.
        """
        deadline_s = self._config.server.attach_deadline_s
        wait = _Wait(deadline_s, self._note)
        while self.missing and self._running is None:
            if is_stopped():
                raise StoppedError
            for rank, message in self.turn():
                match message:
                    case Signalled():
                        raise LaunchError(f"{self._others[rank].name} was told to end")
            if wait.is_over(f"waiting at {self._where} for node rank {_and(self.missing)}"):
                refused = f" (refused: {'; '.join(self._refused)})" if self._refused else ""
                raise LaunchError(
                    f"node rank {_and(self.missing)} of {self._config.launcher.nnodes} had not come to {self._where} "
                    f"after {deadline_s:g} s{refused}; start moe-serve serve there, look at its last lines, and let it "
                    "reach this address, or raise server.attach_deadline_s"
                )
            time.sleep(TURN_S)
        self._has_met = True
        if self._running is not None:
            self._front_ends = self._running.launch.front_ends
            self._news = [(rank, HostIsNew(each.name, each.hello.running)) for rank, each in self._others.items()]
        return self._running

    def turn(self) -> list[tuple[int, _Any | _News]]:
        """Takes new connections; returns what has arrived, with the node rank of its sender.

        Raises ConfigError where a launcher does not fit, before all have met; later it is refused.
        """
        self._accept()
        found: list[tuple[int, _Any | _News]] = [*self._news]
        self._news = []
        for _ in range(len(self._arriving)):
            channel, address, since_s = self._arriving.popleft()
            try:
                hello = next(iter(channel.turn()), None)
                if hello is not None:
                    found += self._greet(_decoder.decode(hello), channel, address)
                elif time.monotonic() - since_s < _PROVE_S:
                    self._arriving.append((channel, address, since_s))
                else:
                    raise OSError(f"it has not said who it is ({channel.silence})")
            except (NotOursError, OSError, msgspec.DecodeError) as error:
                channel.close()
                self._refuse(f"{address}: {error}")
        for rank, other in self._others.items():
            if other.channel is None:
                continue
            try:
                for text in other.channel.turn():
                    found.append((rank, _decoder.decode(text)))  # those before an error, too
            except (NotOursError, OSError, msgspec.DecodeError):
                self._cut(other)
        return found

    def _accept(self) -> None:
        while len(self._arriving) < _MOST_ARRIVING:
            try:
                connected, (address, *_) = self._listener.accept()
            except OSError:
                return
            self._arriving.append((Channel(connected, self._token, dials=False), address, time.monotonic()))

    def _refuse(self, text: str) -> None:
        if text not in self._refused:
            self._refused.append(text)
            self._note(f"refused a connection from {text}")

    def _greet(self, message: _Any, channel: Channel, address: str) -> list[tuple[int, _News]]:
        """Takes a launcher in; where it is another process than before, the one before is lost."""
        if not isinstance(message, HostHello):
            raise OSError("it did not say who it is")
        new, before = _Other(message, address, channel), self._others.get(message.node_rank)
        problem = self._misfit(new)
        if problem is not None:
            _say(channel, End(problem, 2))
            self._misfits.append(new)
            if not self._has_met:
                raise ConfigError(problem)
            self._refuse(f"{address}: {problem}")
            return []
        if before is not None and before.channel is not None:
            before.channel.close()
        self._others[message.node_rank] = new
        is_known = before is not None and before.hello.process == message.process
        if not is_known:
            num_there = self._config.launcher.nnodes - len(self.missing)
            self.tell(Note(f"{new.name} is here: {num_there} of {self._config.launcher.nnodes} hosts"))
            self._note(f"{new.name} is here: {num_there} of {self._config.launcher.nnodes} hosts")
        if self._running is None and not self._has_met and message.running is not None and message.running.is_serving:
            self._running = message.running
        if is_known:
            return [(message.node_rank, HostIsBack(new.name))]
        is_new = before is not None or self._has_met
        return [(message.node_rank, HostIsNew(new.name, message.running))] if is_new else []

    def _misfit(self, new: _Other) -> str | None:
        """Returns why a launcher cannot take part, in words for every host."""
        hello, own = new.hello, self._hello
        if hello.problem:
            return f"{new.name} cannot start: {hello.problem}"
        if hello.nnodes != own.nnodes:
            return (
                f"hosts differ in launcher.nnodes: {own.nnodes} on node rank 0 ({own.host}), {hello.nnodes} on "
                f"{new.name}; give all hosts the same"
            )
        others = {0: (own, own.host)} | {rank: (each.hello, each.name) for rank, each in self._others.items()}
        other, name = others.get(hello.node_rank, (hello, ""))
        at_once = hello.node_rank == 0 or self._is_connected(hello.node_rank)
        if at_once and other.process != hello.process and (not self._has_met or other.host != hello.host):
            return (
                f"two hosts say launcher.node_rank {hello.node_rank}: {name}, and {hello.host} ({new.address}); give "
                f"each host a number of its own, from 0 to {own.nnodes - 1}"
            )
        if not 0 < hello.node_rank < own.nnodes:
            return f"launcher.node_rank is {hello.node_rank} on {hello.host}, expected 1 to {own.nnodes - 1}"
        first, every = hello.node_rank * self._config.server.api_workers, self._config.num_front_ends
        if first < len(self._front_ends) == every:
            known, _, port = self._front_ends[first].rpartition(":")
            if host_and_port(new.address, port) != self._front_ends[first]:
                return (
                    f"the front ends of node rank {hello.node_rank} were at {known} and {hello.host} is at "
                    f"{new.address}; start it at that address again, or start all hosts again"
                )
        before = self._others.get(hello.node_rank, new).address
        takes_pages = self._config.parallel.num_prefill_ranks and hello.node_rank in self._config.nodes_of("decode")
        if takes_pages and self._has_met and new.address != before:
            return (
                f"pages for node rank {hello.node_rank} go to {before} and {hello.host} is at {new.address}; start it "
                "at that address again, or start all hosts again"
            )
        return first_difference([own.facts, hello.facts], "node rank", [0, hello.node_rank])

    def _is_connected(self, node_rank: int) -> bool:
        other = self._others.get(node_rank)
        return other is not None and other.channel is not None

    def _cut(self, other: _Other) -> None:
        assert other.channel is not None
        other.channel.close()
        other.channel, other.cut_s = None, time.monotonic()

    def gone(self, after_s: float) -> dict[int, str]:
        """Returns the names of hosts whose connections were cut so long ago and not made again, by node rank."""
        now_s = time.monotonic()
        others = self._others.items()
        return {rank: each.name for rank, each in others if each.channel is None and now_s - each.cut_s > after_s}

    def tell(self, message: _Any, node_ranks: Collection[int] | None = None) -> None:
        """Sends a message to those of the others that are connected. node_ranks: to these alone; None: to all"""
        for rank, other in self._others.items():
            is_meant = node_ranks is None or rank in node_ranks
            if is_meant and other.channel is not None and not _say(other.channel, message):
                self._cut(other)

    def fail(self, reason: str, is_stopped: Callable[[], bool]) -> None:
        """Tells the others that this system cannot start, also those that come within some seconds."""
        told: set[int] = set()
        until_s = time.monotonic() + _TELL_S
        while True:
            for rank, other in self._others.items():
                if other.channel is not None and rank not in told:
                    _say(other.channel, End(reason, 2))
                    told.add(rank)
            told |= {each.hello.node_rank for each in self._misfits}
            if len(told) >= self._config.launcher.nnodes - 1 or is_stopped() or time.monotonic() > until_s:
                return
            with contextlib.suppress(ConfigError):  # one more that does not fit: it has been told
                self.turn()
            time.sleep(TURN_S)

    def close(self) -> None:
        """Closes the connections, once the others have taken what was sent, or after a second."""
        self._listener.close()
        others = [each.channel for each in (*self._others.values(), *self._misfits)]
        for channel in [*(each for each, _, _ in self._arriving), *others]:
            if channel is not None:
                _finish(channel)


class Follower:
    """The side of the other node ranks: stays connected with node rank 0.

    note: prints a line
    """

    def __init__(self, config: ServeConfig, token: str, note: Callable[[str], None]):
        self._config, self._token, self._note = config, token, note
        host, port = config.launcher.meeting_place()
        self._place = host, port
        self.where = f"{host}:{port}"
        self._hello = _hello(config)
        self.find_running: Callable[[], Running | None] = lambda: None  # what this host runs, for each new connection
        self._channel: Channel | None = None
        self._dialled_s = -_REDIAL_S
        self._is_connected = False
        self._has_met = False
        self._cut_s = time.monotonic()  # when the last connection ended
        self._later: list[_Any] = []  # to be returned next
        self._why = "not tried"

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection on which hello has been said."""
        return self._is_connected

    @property
    def why(self) -> str:
        """Why there is no connection; where there is one, why there was none before."""
        return self._why

    @property
    def cut_for_s(self) -> float:
        """Seconds since the connection was lost; 0 while there is one."""
        return 0.0 if self._is_connected else time.monotonic() - self._cut_s

    def turn(self) -> list[_Any]:
        """Connects where there is no connection; returns what has arrived.

        Raises LaunchError before the first connection where another program listens there, or one with another token.
        """
        found, self._later = self._later, []
        if self._channel is None and time.monotonic() - self._dialled_s >= _REDIAL_S:
            self._dial()
        channel = self._channel
        if channel is None:
            return found
        try:
            for text in channel.turn():
                found.append(_decoder.decode(text))  # those before an error, too
            if channel.is_open and not self._is_connected:
                hello = msgspec.structs.replace(self._hello, running=self.find_running())
                self._is_connected = self._has_met = _say(channel, hello)
            if not channel.is_open and time.monotonic() - self._dialled_s > _DIAL_S:
                raise OSError(errno.ETIMEDOUT, channel.silence)
        except NotOursError as error:
            self._cut(str(error))
            if not self._has_met:
                raise LaunchError(
                    f"launcher.dist_init_addr is {self.where}, and no launcher of this system listens there ({error}); "
                    "correct the address, or what listens there"
                ) from None
        except (OSError, msgspec.DecodeError) as error:
            refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            self._cut("nothing listens there" if refused else getattr(error, "strerror", None) or str(error))
        return found

    def _dial(self) -> None:
        self._dialled_s = time.monotonic()
        connected: socket.socket | None = None
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(*self._place, type=socket.SOCK_STREAM)[0]
            connected = socket.socket(family, kind, protocol)
            channel = Channel(connected, self._token, dials=True)
            code = connected.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:  # gaierror too
            self._why = error.strerror or str(error)
            if connected is not None:
                connected.close()
            return
        self._channel = channel

    def _cut(self, why: str) -> None:
        assert self._channel is not None
        self._channel.close()
        if self._is_connected:
            self._cut_s = time.monotonic()
        self._channel, self._is_connected, self._why = None, False, why

    def tell(self, message: _Any) -> bool:
        """Sends a message; returns False where there is no connection."""
        if self._channel is None or not self._is_connected:
            return False
        if not _say(self._channel, message):
            self._cut("it reads nothing")
        return self._is_connected

    def meet(self, is_stopped: Callable[[], bool]) -> Start | Join | End:
        """Waits for node rank 0 and for all others; returns how the first launch begins, or why there is none.

        Raises LaunchError where node rank 0 is not reached in time, StoppedError where this launcher is told to end.
        """
        deadline_s = self._config.server.attach_deadline_s
        wait, before = _Wait(deadline_s, self._note), list[_Any]()
        while True:
            if is_stopped():
                raise StoppedError
            found = self.turn()
            for number, message in enumerate(found, 1):
                match message:
                    case Start() | Join() | End():
                        self._later = before + found[number:]
                        return message
                    case TakePages():  # of prefill ranks that serve, where those that decode are started again
                        before = [message]
                    case Note():
                        self._note(f"node rank 0: {message.text}")
            state = "it has not started the ranks" if self._is_connected else self._why
            if wait.is_over(f"waiting for node rank 0 at {self.where}: {state}"):
                raise LaunchError(
                    f"node rank 0 was not met at {self.where} within {deadline_s:g} s: {state}; start moe-serve serve "
                    "there with --node-rank 0, check launcher.dist_init_addr and the firewall between the hosts, or "
                    "raise server.attach_deadline_s"
                )
            time.sleep(TURN_S)

    def fail(self, reason: str, is_stopped: Callable[[], bool]) -> None:
        """Tells node rank 0, and by it all others, that this host cannot take part. Gives up after some seconds."""
        self._hello = msgspec.structs.replace(self._hello, problem=reason)
        until_s = time.monotonic() + _TELL_S
        with contextlib.suppress(MoeServeError):
            while not self._is_connected and not is_stopped() and time.monotonic() < until_s:
                self.turn()
                time.sleep(TURN_S)

    def close(self) -> None:
        """Closes the connection, once node rank 0 has taken what was sent, or after a second."""
        if self._channel is not None:
            _finish(self._channel)
            self._channel = None


def ask_other_leader(config: ServeConfig, token: str) -> str | None:
    """Returns why a launcher with node rank 0 is refused by the one that listens at its address; None where none is."""
    follower = Follower(config, token, lambda text: None)
    until_s = time.monotonic() + _DIAL_S
    with contextlib.suppress(MoeServeError), contextlib.closing(follower):
        while time.monotonic() < until_s:
            for message in follower.turn():
                if isinstance(message, End):
                    return message.reason
            time.sleep(TURN_S)
    return None


class _Wait:
    """One wait: names what is missing now and then, and ends at the deadline."""

    def __init__(self, deadline_s: float, note: Callable[[str], None]):
        self._deadline_s, self._note = deadline_s, note
        self._started_s = time.monotonic()
        self._next_s = _WARN_S

    def is_over(self, text: str) -> bool:
        """Returns whether the deadline has passed. text: what is waited for"""
        waited_s = time.monotonic() - self._started_s
        if waited_s > self._next_s:
            self._next_s = 2 * waited_s
            self._note(f"{text} ({waited_s:.0f} s)")
        return waited_s > self._deadline_s


def _say(channel: Channel, message: _Any) -> bool:
    try:
        channel.send(msgspec.json.encode(message))
    except OSError:
        return False
    return True


def _finish(channel: Channel) -> None:
    """Closes a connection once the other end has read all and closed its own, or after a second."""
    until_s = time.monotonic() + _CLOSE_S
    with contextlib.suppress(OSError, NotOursError):
        while channel.is_open and time.monotonic() < until_s:
            if not channel.has_unsent:
                channel.socket.shutdown(socket.SHUT_WR)
            for _ in channel.turn():  # what is not read would make the kernel throw away what is not sent
                pass
            time.sleep(TURN_S)
    channel.close()


def _and(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
