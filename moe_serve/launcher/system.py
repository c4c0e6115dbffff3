"""`moe-serve serve`: all ranks and the front end, from start-up display to Ctrl-C.

The parent only supervises. It receives the ranks' progress from the front end (as supervisor, see
server/ranks/bridge.py), notices first when a process ends, reports it to the front end, and shuts everything down in
order: no new calls, then the ranks, then whatever is left. A rank that was killed is replaced beside the others. Where
that fails, and where the ranks cannot go on at all, it restarts all of them, and the front end submits the open
requests to the new ones; after too many losses it ends with a report.

On several hosts (hosts.py) the parent of node rank 0 does that for all; those of the others start and end the ranks of
their hosts as it says, and report how they end.
"""

import contextlib
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from moe_serve.config import ServeConfig, ServerConfig, served_name
from moe_serve.engine.protocol.messages import Message
from moe_serve.errors import LaunchError, MoeServeError
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.front_ends import FrontEnds
from moe_serve.launcher.hosts import (
    Died,
    End,
    EndRank,
    EndRanks,
    Follower,
    HostLost,
    Join,
    Leader,
    Note,
    Replace,
    Signalled,
    Start,
    StoppedError,
    ask_other_leader,
    token_of_hosts,
)
from moe_serve.launcher.launch_watch import LaunchWatch, Loss
from moe_serve.launcher.local import WORKER, Death, Launch, LocalRanks, OnLine, Restarts, in_a_while
from moe_serve.launcher.preflight import has_tokenizer
from moe_serve.launcher.rank_env import new_launch_id
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.server.edge.ports import open_port

_POLL_MS = 50
_END_GRACE_S = 4.0  # for the front end and the ranks to end in order
_LOSS_GRACE_S = 3.0  # for the ranks that are left when one is lost
_GONE_S = 3.0  # after which it is said that node rank 0 is not reached
_UNHEARD = 1000  # processes of a rank, at most, that its host had started before it was lost, and nobody has heard of
_HOST_GONE_S = 10.0  # a launcher whose connection was cut for so long is gone, while the ranks start


class _Ended(Exception):
    """Ends `watch` with an exit code. reason: for other hosts; "" where it ends as it should"""

    def __init__(self, code: int, reason: str = ""):
        super().__init__(code)
        self.code, self.reason = code, reason


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP. wants_drain: the first was SIGTERM"""

    def __init__(self) -> None:
        self.num = 0
        self.wants_drain = False

    def count(self, number: int, frame: FrameType | None = None) -> None:
        """Notes one more."""
        self.wants_drain |= number == signal.SIGTERM and not self.num
        self.num += 1

    def have_come(self) -> bool:
        """Returns whether there was one."""
        return self.num > 0


def serve_on_this_machine(config: ServeConfig, display: StartDisplay, worker: str = WORKER) -> int:
    """Serves until Ctrl-C or SIGTERM. Returns the exit code: 0 = as asked, 1 = lost a process, 2 = a wrong setting.

    Raises LaunchError before anything is started, when a port is taken.
    """
    listener = open_port(config.server.host, config.server.port)
    with listener, OwnFolder() as folder:
        config = with_port(config, listener.getsockname()[1])
        ranks = LocalRanks(config, display.line, folder, module=worker)
        with signals_stop() as signals:
            return _System(config, display, ranks, Link(folder=folder), signals).run(listener)


def serve_with_other_hosts(
    config: ServeConfig, display: StartDisplay, look: Callable[[ServeConfig], None], worker: str = WORKER
) -> int:
    """Serves beside the launchers of other hosts, as serve_on_this_machine does.

    look: checks what this host has before ranks are started; where it raises, all hosts end with its error
    Raises what it raises, and LaunchError or ConfigError where the hosts do not meet or do not fit.
    """
    token = token_of_hosts(config)
    host, _ = config.launcher.meeting_place()
    config = config.model_copy(update={"server": config.server.model_copy(update={"worker_host": host})})
    link = Link(token=token, host=host, port=config.server.worker_port)
    with OwnFolder() as folder, signals_stop() as signals:
        here = Here(display, look, worker, folder, link, signals)
        try:
            return lead(config, here) if config.launcher.node_rank == 0 else follow(config, here)
        except StoppedError:
            return 0


@dataclass(frozen=True)
class Here:
    """What the launcher of one of several hosts works with."""

    display: StartDisplay
    look: Callable[[ServeConfig], None]
    worker: str
    folder: Path
    link: Link
    signals: Signals


def lead(config: ServeConfig, here: Here) -> int:
    """Serves as node rank 0; returns the exit code."""
    display, link, signals = here.display, here.link, here.signals
    try:
        leader = Leader(config, link.token, display.note)
    except LaunchError as error:
        raise LaunchError(ask_other_leader(config, link.token) or f"{error}; node rank 0 listens there") from None
    with contextlib.closing(leader), contextlib.ExitStack() as opened:
        try:
            here.look(config)
            open_port(link.host, link.port, "launcher.dist_init_addr", "server.worker_port").close()
            listener = opened.enter_context(open_port(config.server.host, config.server.port))
            leader.meet(signals.have_come)
        except MoeServeError as error:
            display.note(f"{error}; this is told to the other hosts", style="red")
            leader.fail(str(error), signals.have_come)
            raise
        except StoppedError:
            leader.tell(End("node rank 0 was told to end", 0))
            raise
        config = with_port(config, listener.getsockname()[1])
        ranks = RanksOfHosts(leader, config, display.line, here.folder, here.worker, link)
        return _System(config, display, ranks, link, signals, leader).run(listener)


def follow(config: ServeConfig, here: Here) -> int:
    """Starts and ends the ranks of this host as node rank 0 says; returns the exit code."""
    display, link, signals = here.display, here.link, here.signals
    ranks = LocalRanks(config, display.line, here.folder, here.worker, link)
    with contextlib.closing(Follower(config, link.token, display.note)) as leader:
        try:
            here.look(config)
        except MoeServeError as error:
            leader.fail(str(error), signals.have_come)
            raise
        try:
            begun = leader.meet(signals.have_come)
        except StoppedError:
            leader.tell(Signalled(signal.SIGINT))
            raise
        display.stop()
        try:
            end = begun if isinstance(begun, End) else _run_ranks(ranks, begun, leader, here)
            if end.reason:
                display.note(f"the system ends: {end.reason}", style="red")
        finally:
            ranks.end(0.0)
    return end.code


def _run_ranks(ranks: LocalRanks, begun: Start | Join, leader: Follower, here: Here) -> End:
    """Runs the ranks of this host until node rank 0 says that the system ends, or is gone for long; returns why."""
    server, signals = ranks.config.server, here.signals
    if isinstance(begun, Join):
        ranks.join(begun.launch, begun.memory, begun.num_before)
    else:
        ranks.start_in(begun.launch)
    num_told, ends_s, is_gone_said = 0, 0.0, False
    restarts, untold = Restarts(ranks.config.launcher), deque[Died]()
    while True:
        for message in leader.turn():
            match message:
                case Start():
                    ranks.end(0.0)
                    ranks.start_in(message.launch)
                case EndRanks():
                    ranks.end(message.grace_s)
                case Replace() if message.launch_id == ranks.launch_id:
                    ranks.replace_ended(message.rank, message.num_before)
                case EndRank() if message.launch_id == ranks.launch_id:
                    ranks.end_rank(message.rank, message.num_before)
                case Note():
                    here.display.note(f"node rank 0: {message.text}", message.style)
                case End():
                    ranks.end(message.grace_s)
                    return message
        ranks.keep_host()
        for death in ranks.deaths():
            untold.append(Died(ranks.launch_id, death))
            if ranks.may_replace(death) and restarts.note_loss(str(death)):
                ranks.replace_ended(death.rank, death.num_before)
                here.display.note(f"{death}; it is started again here ({restarts.describe()})", "yellow")
        while untold and leader.tell(untold[0]):
            untold.popleft()
        if leader.cut_for_s > _GONE_S and not is_gone_said:
            here.display.note(f"node rank 0 is not reached at {leader.where} ({leader.why}); waiting for it", "yellow")
        is_gone_said = leader.cut_for_s > _GONE_S
        if leader.cut_for_s > server.attach_deadline_s:
            return End(f"node rank 0 was not reached at {leader.where} for {leader.cut_for_s:.0f} s: {leader.why}", 1)
        if signals.num > num_told:
            if not leader.tell(Signalled(signal.SIGTERM if signals.wants_drain and not num_told else signal.SIGINT)):
                return End("", 0)
            num_told = signals.num
            ends_s = time.monotonic() + (server.drain_deadline_s if signals.wants_drain else 0.0) + 2 * _END_GRACE_S
        if num_told and (num_told > 1 or time.monotonic() > ends_s):
            return End("", 0)
        time.sleep(_POLL_MS / 1000)


class RanksOfHosts(LocalRanks):
    """The ranks of all hosts, seen from node rank 0: it starts its own, and tells the others to start theirs."""

    def __init__(self, leader: Leader, config: ServeConfig, on_line: OnLine, folder: Path, module: str, link: Link):
        super().__init__(config, on_line, folder, module, link)
        self._leader = leader
        self._died: list[Death] = []  # elsewhere, and not asked for yet
        self._launch: Launch | None = None
        self._num_replaced = Counter[int]()  # of each rank elsewhere, processes before its last one

    def start(self) -> None:
        host, _ = self.config.launcher.meeting_place()
        with open_port(host, 0, "launcher.dist_init_addr") as store:
            launch = Launch(new_launch_id(), host, store.getsockname()[1])
            self.start_in(launch, store.fileno())
        self._launch, self._num_replaced = launch, Counter[int]()
        self._died = []
        self._leader.tell(Start(launch))

    def note_death(self, message: Died) -> None:
        """Notes how a rank of another host has ended."""
        if message.launch_id == self.launch_id:
            self._died.append(message.death)
            self._num_replaced[message.death.rank] = message.death.num_before

    def finish(self, rank: int) -> None:
        if rank < self._num_local:
            super().finish(rank)
        else:
            self._leader.tell(EndRank(self.launch_id, rank, self._num_replaced[rank]), rank // self._num_local)

    def replace(self, rank: int) -> None:
        if rank < self._num_local:
            super().replace(rank)
        else:
            self._leader.tell(Replace(self.launch_id, rank, self._num_replaced[rank]), rank // self._num_local)
            self._num_replaced[rank] += 1

    def take_back(self, node_rank: int) -> range:
        """Lets a host whose processes have all ended join the launch; returns its ranks, none where it cannot."""
        memory = self.memory_of_hosts()
        if self._launch is None or memory is None:
            return range(0)
        ranks = range(node_rank * self._num_local, (node_rank + 1) * self._num_local)
        for rank in ranks:
            self._num_replaced[rank] += _UNHEARD
        num_before = [self._num_replaced[rank] for rank in ranks]
        self._leader.tell(Join(self._launch, memory, num_before), node_rank)
        return ranks

    def deaths(self) -> list[Death]:
        elsewhere, self._died = self._died, []
        return sorted([*super().deaths(), *elsewhere], key=lambda death: not death.was_killed)

    def end(self, grace_s: float) -> None:
        self._leader.tell(EndRanks(grace_s))
        super().end(grace_s)


def with_port(config: ServeConfig, http_port: int) -> ServeConfig:
    """Returns the configuration with the real port in place of 0."""
    return config.model_copy(update={"server": config.server.model_copy(update={"port": http_port})})


class _System:
    """The system as its launcher sees it. hosts: the others, where there are; ranks is of all then"""

    def __init__(
        self,
        config: ServeConfig,
        display: StartDisplay,
        ranks: LocalRanks,
        link: Link,
        signals: Signals,
        hosts: Leader | None = None,
    ):
        self.config = config
        self.display = display
        self.ranks = ranks
        self.signals = signals
        self._hosts = hosts
        self._drain_until_s = 0.0
        self._link = link
        self._front_ends: FrontEnds | None = None
        self._restarts = Restarts(config.launcher)
        self._starts_at_s: float | None = None  # when all ranks, which have ended, are started again
        self._waits_for: list[int] = []  # node ranks without which they cannot
        self._was_ready = False
        self.begin_launch()

    def run(self, listener: socket.socket) -> int:
        """Serves until the end; returns the exit code. listener: takes HTTP connections"""
        end = _Ended(0)
        try:
            self.ranks.start()
            self.start_front_ends(listener.fileno())
            if self.config.server.api_workers == 1:
                listener.close()  # the front end holds it now
            self.watch()
        except _Ended as ended:
            end = ended
        finally:
            self.end(end)
        return end.code

    def begin_launch(self) -> None:
        """Begins to watch ranks that are about to start."""
        self._launch = LaunchWatch(self.config, self.display, self.ranks, self._restarts, self._tell)
        self._launched_s, self._is_announced = time.monotonic(), False

    def start_front_ends(self, http_fd: int) -> None:
        """Starts the front ends with the listening socket, and attaches to them as supervisor."""
        note = partial(self._note, style="red")
        config_file, on_line = self.ranks.config_file, self.display.line
        self._front_ends = FrontEnds(self.config, self._link, config_file, http_fd, on_line, note)
        self._front_ends.start()

    def watch(self) -> None:
        """Prints and forwards reports, and restarts lost ranks, until _Ended is raised."""
        while True:
            if self.signals.num and not self._drains():
                self.display.stop()
                self._note("ending …")
                raise _Ended(0)
            if self._hosts is not None:
                self._hear(self._hosts)
            assert self._front_ends is not None
            for message in self._front_ends.receive(_POLL_MS):
                self._launch.take(message)
            if self._launch.is_ready and not self._is_announced and self._front_ends.serve(self.ranks.launch_id):
                self._announce()
            if self._starts_at_s is not None:
                self._start_when_due(self._starts_at_s)
            elif not (self._drain_until_s and any(child.code == 0 for child in self.ranks.children)):
                loss = self._launch.find_loss()  # a rank that ends with 0 at the end of a drain is none
                if loss is not None:
                    self._start_again(loss)
                else:
                    self._launch.replace_lost_ranks()
            code = None if self.signals.num else self._front_ends.watch()
            if code is not None:
                raise _Ended(code, "the front end on node rank 0 has ended; its last lines are there")

    def _hear(self, hosts: Leader) -> None:
        """Takes what other hosts report."""
        self.ranks.keep_host()
        assert isinstance(self.ranks, RanksOfHosts), "there are several hosts"
        for node_rank, message in hosts.turn():
            match message:
                case Died():
                    self.ranks.note_death(message)
                case Signalled():
                    self.signals.count(message.number)
                case HostLost() if self._starts_at_s is None:
                    back = self.ranks.take_back(node_rank) if self._launch.goes_on else ()
                    self._launch.replaced(back)
                    if back:
                        self._note(f"{message.host} is back; its ranks join the others", style="yellow")
                    else:
                        self._launch.lose(f"the launcher of {message.host} was started again")
        if self._starts_at_s is None and not self._launch.is_ready:
            for name in hosts.gone(_HOST_GONE_S):
                self._launch.lose(f"{name} is gone")

    def _note(self, text: str, style: str = "") -> None:
        """Prints a line on every host."""
        self.display.note(text, style=style)
        if self._hosts is not None:
            self._hosts.tell(Note(text, style))

    def _drains(self) -> bool:
        """Returns whether to go on until open requests have ended: after one SIGTERM, within the deadline.

        Also while lost ranks are started again: the requests wait for them.
        """
        if not self.signals.wants_drain or self.signals.num > 1 or not (self._launch.is_ready or self._was_ready):
            return False
        if self._front_ends is None or self._front_ends.have_ended:
            return False
        deadline_s = self.config.server.drain_deadline_s
        if not self._drain_until_s:
            self._drain_until_s = time.monotonic() + deadline_s + _END_GRACE_S
            self._front_ends.signal(signal.SIGTERM)
            self._note(f"open requests have {deadline_s:g} s to end; a second signal ends them now")
        return time.monotonic() < self._drain_until_s

    def _announce(self) -> None:
        self._is_announced = True
        self.display.stop()
        if self._was_ready:
            self._note(f"ready again after {time.monotonic() - self._launched_s:.1f} s", style="green")
            return
        self._was_ready = True
        address = _url(self.config.server)
        self._note(f"ready after {self.display.elapsed_s:.1f} s: {address}", style="green")
        prompt = '{"text": "def "}' if has_tokenizer(self.config) else '{"input_ids": [5, 6, 7]}'
        self.display.note(
            f"  OpenAI clients: base_url {address}/v1, model {served_name(self.config.model)}\n"
            f"  SGLang's clients: {address}/generate\n"
            f"  watch: {address}/dashboard, /metrics, /server_info (all settings)\n"
            f"  try: curl {address}/generate -H 'content-type: application/json' -d '{prompt}'"
        )

    def _tell(self, message: Message) -> None:
        if self._front_ends is not None:
            self._front_ends.tell(message)

    def _start_again(self, loss: Loss) -> None:
        """Prints why the ranks are lost, ends them, and restarts them when their pause is over.

        Raises _Ended where a restart cannot help, or comes too often.
        """
        self.display.stop()
        self._note(str(loss), style="red")
        for line in loss.last_lines:
            self._note(f"  {line}")
        if not self._was_ready or loss.is_setting or (self.signals.num and not self._drains()):
            raise _Ended(2 if loss.is_setting else 1, "the start failed, as said above")
        if not self._restarts.note_loss(str(loss), loss.had_served):
            for line in self._restarts.report():
                self._note(line, style="red")
            raise _Ended(1, "the ranks were lost too often, as said above")
        self.ranks.end(0.0 if loss.others_run else _LOSS_GRACE_S)
        if not self.signals.num or self._drains():
            pause_s = self._restarts.pause_s
            self._starts_at_s = time.monotonic() + pause_s
            again = f"the ranks are started again{in_a_while(pause_s)} ({self._restarts.describe()})"
            self._note(again, style="yellow")
            self._start_when_due(self._starts_at_s)

    def _start_when_due(self, starts_at_s: float) -> None:
        waited_s, missing = time.monotonic() - starts_at_s, [] if self._hosts is None else self._hosts.missing
        if waited_s < 0:
            return
        if missing and missing != self._waits_for:
            which = ", ".join(map(str, missing))
            self._note(f"waiting for node rank {which}: start moe-serve serve there again", style="yellow")
        self._waits_for = missing
        if missing and waited_s > self.config.server.attach_deadline_s:
            raise _Ended(1, f"other hosts did not come back within {self.config.server.attach_deadline_s:g} s")
        if not missing:
            self._starts_at_s = None
            self.ranks.start()
            self.begin_launch()

    def end(self, ended: _Ended) -> None:
        """Ends every process; after a second signal, without waiting."""
        front_ends = self._front_ends
        if self._hosts is not None:
            self._hosts.tell(End(ended.reason, ended.code, _END_GRACE_S if self._launch.is_ready else 0.0))
        if front_ends is not None:
            front_ends.signal(signal.SIGINT)  # at once: what may be drained has been
        if not self._launch.is_ready or front_ends is None or front_ends.have_ended:
            for child in self.ranks.children:  # no front end asks them to end, or they do not listen yet
                child.signal(signal.SIGINT if self._launch.is_ready else signal.SIGTERM)
        children = [*self.ranks.children, *(front_ends.children if front_ends is not None else ())]
        deadline_s = time.monotonic() + _END_GRACE_S
        while time.monotonic() < deadline_s and self.signals.num < 2:
            if all(child.code is not None for child in children):
                break
            for death in self.ranks.deaths():
                if death.code != 0:  # the front end need not wait for this one's goodbye
                    self._launch.tell_exit(death)
            time.sleep(_POLL_MS / 1000)
        if front_ends is not None:
            front_ends.close()
        self.ranks.end(grace_s=0.0)


@contextmanager
def signals_stop() -> Iterator[Signals]:
    """Counts SIGINT, SIGTERM and SIGHUP instead of letting them raise in the middle of something."""
    signals = Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signals.count) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _url(server: ServerConfig) -> str:
    host, scheme = server.host, "http" if server.ssl_certfile is None else "https"
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{server.port}"
