"""`moe-serve serve`: all ranks and the front end, from start-up display to Ctrl-C.

The parent only supervises. It receives the ranks' progress from the front end (as supervisor, see
server/ranks/bridge.py), notices first when a process ends, reports it to the front end, and shuts everything down in
order: no new calls, then the ranks, then whatever is left. A rank that was killed is replaced beside the others. Where
that fails, and where the ranks cannot go on at all, it restarts all of them, and the front end submits the open
requests to the new ones; after too many losses it ends with a report.

On several hosts (hosts.py) the parent of node rank 0 does that for all; those of the others start and end the ranks of
their hosts as it says, and report how they end. Each watches the front ends of its own host. Where ranks serve on after
the loss of node rank 0, their parents wait for it, and its next one takes over. With prefill ranks the first hosts have
the ranks that decode, and the last ones the prefill ranks: two launches, of which node rank 0 leads both.
"""

import contextlib
import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from moe_serve.config import ServeConfig, ServerConfig, served_name
from moe_serve.engine.protocol.messages import SUPERVISOR, Exited, Fatal, Members, Message, ToFrontEnd
from moe_serve.errors import LaunchError, MoeServeError
from moe_serve.launcher.children import Forked, OnLine, end_children
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.facts import Fact, difference_of_roles
from moe_serve.launcher.front_ends import FrontEnds
from moe_serve.launcher.hosts import (
    Died,
    Drain,
    End,
    EndRank,
    EndRanks,
    Follower,
    FrontEndsEnded,
    HostIsBack,
    HostIsNew,
    HostMessage,
    Join,
    Leader,
    MemoryIs,
    Note,
    Replace,
    Running,
    Signalled,
    Start,
    StoppedError,
    TakePages,
    TellFrontEnds,
    TellMemory,
    ask_other_leader,
    token_of_hosts,
)
from moe_serve.launcher.launch_watch import LaunchWatch, Loss
from moe_serve.launcher.local import Death, Launch, LocalRanks, Restarts, in_a_while
from moe_serve.launcher.preflight import has_tokenizer
from moe_serve.launcher.rank_env import new_launch_id, own_host
from moe_serve.launcher.rank_start import HostMemory
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link, host_and_port
from moe_serve.process_facts import numa_nodes
from moe_serve.server.edge.ports import open_port

if TYPE_CHECKING:
    from moe_serve.launcher.page_listener import PageListener

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


def serve_on_this_machine(config: ServeConfig, display: StartDisplay) -> int:
    """Serves until Ctrl-C or SIGTERM. Returns the exit code: 0 = as asked, 1 = lost a process, 2 = a wrong setting.

    Raises LaunchError before anything is started, when a port is taken.
    """
    listener = open_port(config.server.host, config.server.port)
    with (
        listener,
        OwnFolder() as folder,
        memory_for_handover(config) as page_files,
        memory_for_weights(config) as weight_files,
    ):
        config = with_port(config, listener.getsockname()[1])
        own, prefill = config, None
        if config.parallel.num_prefill_ranks:
            config = share_threads(config)
            own = config.of_role("decode")
        ranks = LocalRanks(own, display.line, folder, page_files=page_files, weight_files=weight_files)
        if config.parallel.num_prefill_ranks:
            theirs, shown = config.of_role("prefill"), _PrefillDisplay(display, own.parallel.num_ranks)
            link = ranks.link.of_prefill()
            assert link.folder is not None
            link.folder.mkdir(mode=0o700)
            memory = page_files, ranks.pages, weight_files
            prefill = _Prefill(theirs, shown, LocalRanks(theirs, shown.line, link.folder, link, *memory))
        with signals_stop() as signals:
            return _System(own, display, ranks, signals, prefill=prefill).run(listener)


@contextmanager
def _memory(name: str, number: int) -> Iterator[list[int]]:
    """Makes empty files in memory, without names in a folder, and closes them in the end."""
    files = [os.memfd_create(name) for _ in range(number)]
    try:
        yield files
    finally:
        for descriptor in files:
            os.close(descriptor)


def memory_for_weights(config: ServeConfig) -> AbstractContextManager[list[int]]:
    """Makes empty files in memory for one copy of the weights of both roles: for ranks that are bound to no NUMA node,
    and to each. None where there is one role."""
    number = max((node.number for node in numa_nodes()), default=-1) + 2 if config.parallel.num_prefill_ranks else 0
    return _memory("moe_serve_weights", number)


@contextmanager
def memory_for_handover(config: ServeConfig) -> Iterator[list[int]]:
    """Makes the memory for pages on their way to decode ranks, one file without a name for each prefill rank.

    config: of both roles, or of that of this host: one that has only prefill ranks needs files for its own alone
    Raises LaunchError where there is not so much.
    """
    parallel, size = config.parallel, int(config.parallel.handover_gb * 1e9)
    number = config.ranks_per_host if parallel.role == "prefill" else parallel.num_prefill_ranks
    with _memory("moe_serve_pages", number) as pages:
        for descriptor in pages:
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                raise LaunchError(
                    f"parallel.handover_gb is {size / 1e9:g} for each of {number} prefill ranks, and there is no "
                    f"memory for that ({error.strerror}); lower it"
                ) from None
        yield pages


def share_threads(config: ServeConfig) -> ServeConfig:
    """Returns the configuration with the cores of this host divided over the ranks of both roles."""
    parallel = config.parallel
    if parallel.threads_per_rank is not None:
        return config
    num_threads = max(1, len(os.sched_getaffinity(0)) // (parallel.num_ranks + parallel.num_prefill_ranks))
    return config.model_copy(update={"parallel": parallel.model_copy(update={"threads_per_rank": num_threads})})


def serve_with_other_hosts(config: ServeConfig, display: StartDisplay, look: Callable[[ServeConfig], None]) -> int:
    """Serves beside the launchers of other hosts, as serve_on_this_machine does.

    look: checks what this host has before ranks are started; where it raises, all hosts end with its error
    Raises what it raises, and LaunchError or ConfigError where the hosts do not meet or do not fit.
    """
    token = token_of_hosts(config)
    host, _ = config.launcher.meeting_place()
    config = config.model_copy(update={"server": config.server.model_copy(update={"worker_host": host})})
    link = Link(token=token, host=host, port=config.server.worker_port)
    with OwnFolder() as folder, signals_stop() as signals:
        here = Here(display, look, folder, link, signals)
        try:
            return lead(config, here) if config.launcher.node_rank == 0 else follow(config, here)
        except StoppedError:
            return 0


@dataclass(frozen=True)
class Here:
    """What the launcher of one of several hosts works with."""

    display: StartDisplay
    look: Callable[[ServeConfig], None]
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
        at_pages = None
        try:
            here.look(config)
            for port in [link.port] + [config.prefill_port] * bool(config.parallel.num_prefill_ranks):
                open_port(link.host, port, "launcher.dist_init_addr", "server.worker_port").close()
            if config.parallel.num_prefill_ranks:
                at_pages = opened.enter_context(_open_page_port(config, link.host))
            copies = opened.enter_context(memory_for_handover(config))
            listener = opened.enter_context(open_port(config.server.host, config.server.port))
            running = leader.meet(signals.have_come)
        except MoeServeError as error:
            display.note(f"{error}; this is told to the other hosts", style="red")
            leader.fail(str(error), signals.have_come)
            raise
        except StoppedError:
            leader.tell(End("node rank 0 was told to end", 0))
            raise
        config = with_port(config, listener.getsockname()[1])
        if at_pages is None:
            ranks = RanksOfHosts(leader, config, display.line, here.folder, link)
            return _System(config, display, ranks, signals, leader).run(listener, running)
        return _lead_roles(config, here, leader, copies, at_pages, listener)


def _open_page_port(config: ServeConfig, host: str) -> socket.socket:
    """Opens `config.page_port`. host: an address of this host that the others reach"""
    return open_port(host, config.page_port, "launcher.dist_init_addr", "server.worker_port")


def _lead_roles(
    config: ServeConfig,
    here: Here,
    leader: Leader,
    copies: Sequence[int],
    at_pages: socket.socket,
    listener: socket.socket,
) -> int:
    """Serves with decode ranks on the first hosts, this one among them, and prefill ranks on the others; returns the
    exit code.

    copies: descriptors of memory, of pages that those send, by rank;  at_pages: where they come here
    """
    from moe_serve.launcher.page_listener import PageListener

    display, own, theirs = here.display, config.of_role("decode"), config.of_role("prefill")
    ports = range(config.prefill_port, config.page_port)
    for_prefill = tuple(host_and_port(here.link.host, port) for port in ports)
    pages_at = tuple(host_and_port(leader.address_of(node), config.page_port) for node in own.nodes)
    with contextlib.closing(PageListener(at_pages, copies, here.link.token)) as pages:
        if len(own.nodes) == 1:
            link = Link(folder=here.folder, token=here.link.token, for_prefill=for_prefill)
            ranks = LocalRanks(own, display.line, here.folder, link, page_files=copies, pages_at=pages_at)
        else:
            link = replace(here.link, for_prefill=for_prefill)
            ranks = RanksOfHosts(leader, own, display.line, here.folder, link, copies, pages_at)
        elsewhere = PrefillElsewhere(leader, theirs, for_prefill, pages_at, pages)
        prefill = _Prefill(theirs, _PrefillDisplay(display, own.parallel.num_ranks), elsewhere)
        return _System(own, display, ranks, here.signals, leader, prefill).run(listener)


def follow(config: ServeConfig, here: Here) -> int:
    """Starts and ends the ranks of this host as node rank 0 says; returns the exit code."""
    display, link, signals = here.display, here.link, here.signals
    with contextlib.closing(Follower(config, link.token, display.note)) as leader, contextlib.ExitStack() as opened:
        listener = at_pages = store_host = None
        own, own_address = config.of_this_host(), own_host(link.host) or link.host
        try:
            here.look(config)
            memory = opened.enter_context(memory_for_handover(own))
            if own.parallel.role == "decode":
                at_pages = opened.enter_context(_open_page_port(config, own_address))
            elif own.parallel.role == "prefill" and len(own.nodes) > 1 and config.launcher.node_rank == own.nodes.start:
                store_host = own_address
                _open_page_port(config, store_host).close()
            if config.has_front_ends:
                listener = opened.enter_context(open_port(config.server.host, config.server.port))
                config = with_port(config, listener.getsockname()[1])
        except MoeServeError as error:
            leader.fail(str(error), signals.have_come)
            raise
        try:
            begun = leader.meet(signals.have_come)
        except StoppedError:
            leader.tell(Signalled(signal.SIGINT))
            raise
        display.stop()
        pages = None
        if own.parallel.role == "prefill" and len(own.nodes) == 1:
            link = replace(link, folder=here.folder)  # with each other
        if at_pages is not None:
            from moe_serve.launcher.page_listener import PageListener

            pages = PageListener(at_pages, memory, link.token)
            opened.callback(pages.close)
        ranks = LocalRanks(own, display.line, here.folder, link, page_files=memory)
        host = _OtherHost(config, here, leader, ranks, listener, pages, store_host)
        end = begun if isinstance(begun, End) else host.run(begun)
        if end.reason:
            display.note(f"the system ends: {end.reason}", style="red")
    return end.code


class _OtherHost:
    """A host other than that of node rank 0, as its launcher sees it.

    listener:   takes HTTP; None: this host does not
    pages:      takes those of prefill ranks; None: as listener
    store_host: where the store of a launch listens whose rank 0 is here; None: it is elsewhere
    """

    def __init__(
        self,
        config: ServeConfig,
        here: Here,
        leader: Follower,
        ranks: LocalRanks,
        listener: socket.socket | None,
        pages: "PageListener | None",
        store_host: str | None,
    ):
        self._pages, self._store_host = pages, store_host
        self._config, self._display, self._signals = config, here.display, here.signals
        self._leader, self._listener = leader, listener
        self._ranks = ranks
        self._front_ends: FrontEnds | None = None
        self._front_ends_ended: FrontEndsEnded | None = None  # once they have, and are not started again
        self._is_announced = self._is_draining = self._is_gone_said = False
        self._num_before: dict[int, int] = {}  # by rank, where this host was told when it joined
        self._restarts, self._untold = Restarts(config.launcher), deque[Died | FrontEndsEnded]()
        self._num_told, self._ends_s = 0, 0.0  # signals; when they end this launcher
        self._led_s = time.monotonic()  # when there was a leader, or ranks served without one
        leader.find_running = self._find_running

    def run(self, begun: Start | Join) -> End:
        """Runs the ranks and front ends of this host until node rank 0 says that the system ends, or is gone for long.

        Returns why it ends.
        """
        end: End | None = None
        try:
            self._begin(begun)
            while end is None:
                end = self._turn()
            if self._front_ends is not None:
                self._front_ends.signal(signal.SIGINT)
            self._ranks.end(end.grace_s)
            if self._front_ends is not None and self._signals.num < 2:
                end_children(self._front_ends.children, end.grace_s)
        finally:
            self._ranks.end(0.0)
            if self._front_ends is not None:
                self._front_ends.close()
        return end

    def _begin(self, begun: Start | Join) -> None:
        """Starts the ranks of this host, in the place of those before."""
        ranks, front_ends = self._ranks, self._front_ends
        if front_ends is not None:
            over = "all ranks are started again" if isinstance(begun, Start) else "the ranks here join those that serve"
            front_ends.tell(Fatal(SUPERVISOR, ranks.launch_id, over, SUPERVISOR))
        ranks.end(0.0)
        self._untold = deque(each for each in self._untold if isinstance(each, FrontEndsEnded))  # these outlast ranks
        if isinstance(begun, Join):
            self._num_before = begun.num_before
            ranks.join(begun.launch, begun.memory, begun.num_before)
        else:
            self._num_before = {}
            self._start_in(begun.launch)
        self._is_announced = False
        if front_ends is None and self._listener is not None:
            note = partial(self._display.note, style="red")
            arguments = self._config, ranks.link, ranks.config_file, self._listener.fileno(), self._display.line, note
            self._front_ends = FrontEnds(*arguments)
            self._front_ends.start()

    def _start_in(self, launch: Launch) -> None:
        """Starts the ranks of this host.

        The store of each launch has a socket of its own, since rank 0 shuts it once the ranks have met.
        """
        if self._store_host is None:
            self._ranks.start_in(launch)
            return
        with _open_page_port(self._config, self._store_host) as store:
            self._ranks.start_in(launch, store.fileno())

    def _turn(self) -> End | None:
        """Does what node rank 0 says, and reports to it; returns why this launcher is to end, once it is."""
        leader, ranks = self._leader, self._ranks
        for message in leader.turn():
            match message:
                case Start() if message.launch.launch_id == ranks.launch_id:  # told again: it may not have heard us
                    self._untold.extend(Died(ranks.launch_id, death) for death in ranks.ended())
                    self._untold.extend(() if self._front_ends_ended is None else (self._front_ends_ended,))
                case Start() | Join():
                    self._begin(message)
                case EndRanks():
                    ranks.end(message.grace_s)
                case Replace() if message.launch_id == ranks.launch_id:
                    ranks.replace_ended(message.rank, message.num_before)
                case EndRank() if message.launch_id == ranks.launch_id:
                    ranks.end_rank(message.rank, message.num_before)
                case TakePages() if self._pages is not None:
                    self._pages.begin(message.launch_id)
                case TellMemory():
                    is_ours = message.launch_id == ranks.launch_id
                    leader.tell(MemoryIs(message.launch_id, ranks.memory_of_hosts() if is_ours else None))
                case TellFrontEnds() if self._front_ends is not None:
                    self._front_ends.tell(message.message)
                case Drain():
                    self._drain()
                case Note():
                    self._display.note(f"node rank 0: {message.text}", message.style)
                case End():
                    return message
        ranks.keep_host()
        for death in ranks.deaths():
            self._untold.append(Died(ranks.launch_id, death))
            if ranks.may_replace(death) and self._restarts.note_loss(str(death)):
                ranks.replace_ended(death.rank, death.num_before)
                self._display.note(f"{death}; it is started again here ({self._restarts.describe()})", "yellow")
        while self._untold and leader.tell(self._untold[0]):
            self._untold.popleft()
        self._watch_front_ends()
        return self._end_of_signals() or self._end_for_want_of_a_leader()

    def _watch_front_ends(self) -> None:
        """Waits a moment, and keeps the front ends running."""
        front_ends = self._front_ends
        if front_ends is None:
            time.sleep(_POLL_MS / 1000)
            return
        for message in front_ends.receive(_POLL_MS):
            if isinstance(message, Members) and not self._leader.is_connected:
                serving = ", ".join(map(str, message.members))
                self._display.note(f"{message.reason}; ranks that take part: {serving}", style="yellow")
        if not self._is_announced and front_ends.serve(self._ranks.launch_id):
            self._is_announced = True
            self._display.note(f"this host takes HTTP: {_url(self._config.server)}", style="green")
        if self._front_ends_ended is not None:
            return
        code = (0 if front_ends.have_ended else None) if self._is_draining else front_ends.watch()
        if code is not None:
            self._front_ends_ended = FrontEndsEnded(code)
            self._untold.append(self._front_ends_ended)

    def _drain(self) -> None:
        if self._front_ends is not None and not self._is_draining:
            self._is_draining = True
            self._front_ends.signal(signal.SIGTERM)

    def _end_of_signals(self) -> End | None:
        """Passes signals on to node rank 0, which ends all hosts; returns why this one ends by itself."""
        signals, now_s = self._signals, time.monotonic()
        if signals.num > self._num_told:
            drains = signals.wants_drain and not self._num_told
            if not self._leader.tell(Signalled(signal.SIGTERM if drains else signal.SIGINT)):
                if not drains:
                    return End("", 0)
                self._drain()
            self._num_told = signals.num
            self._ends_s = now_s + (self._config.server.drain_deadline_s if drains else 0.0) + 2 * _END_GRACE_S
        if not self._num_told:
            return None
        takes_http = self._listener is not None and self._front_ends_ended is None
        is_alone = not self._leader.is_connected and not takes_http
        return End("", 0) if is_alone or self._num_told > 1 or now_s > self._ends_s else None

    def _end_for_want_of_a_leader(self) -> End | None:
        """Returns why this host ends without node rank 0: it is gone for long, and no ranks serve on without it."""
        leader, cut_s, deadline_s = self._leader, self._leader.cut_for_s, self._config.server.attach_deadline_s
        goes_on = self._front_ends is not None and self._front_ends.goes_on(self._ranks.launch_id)
        if leader.is_connected or goes_on:
            self._led_s = time.monotonic()
        if cut_s > _GONE_S and not self._is_gone_said:
            meanwhile = "ranks that reach the hosts of most serve on, but no lost host joins them until it is back"
            what = "waiting for it" if self._front_ends is None else meanwhile
            self._display.note(f"node rank 0 is not reached at {leader.where} ({leader.why}); {what}", "yellow")
        self._is_gone_said = cut_s > _GONE_S
        if time.monotonic() - self._led_s > deadline_s:
            return End(f"node rank 0 was not reached at {leader.where} for {cut_s:.0f} s: {leader.why}", 1)
        return None

    def _find_running(self) -> Running | None:
        """Returns what the next launcher of node rank 0 must know to let its ranks join those that serve here."""
        ranks, memory, front_ends = self._ranks, self._ranks.memory_of_hosts(), self._front_ends
        if ranks.launch is None or memory is None or front_ends is None or not ranks.children:
            return None
        said, told = front_ends.num_before, self._num_before
        num_before = {rank: max(said.get(rank, 0), told.get(rank, 0)) for rank in {*said, *told}}
        return Running(ranks.launch, memory, num_before, ranks.ended(), front_ends.goes_on(ranks.launch_id))


class RanksElsewhere:
    """Ranks of other hosts, which node rank 0 tells to start and end them.

    config: of their role

    nodes: node ranks of those hosts
    num_replaced: of each rank, processes before its last one
    """

    def __init__(self, leader: Leader, config: ServeConfig):
        self._leader, self._first, self._per_host = leader, config.nodes.start, config.ranks_per_host
        self.nodes = [node for node in config.nodes if node]
        self._died: list[Death] = []  # not asked for yet
        self._last_died: dict[int, int] = {}  # by rank, processes before the one that has ended last
        self.num_replaced = Counter[int]()
        self.launch_id = 0
        self._launch = Launch(0, "", 0)  # that was started last

    def start_in(self, launch: Launch) -> None:
        """Starts the ranks, after those of an earlier launch have been ended."""
        self._launch = launch
        self.begin(launch.launch_id)
        self._leader.tell(Start(launch), self.nodes)

    def start_again_on(self, node_rank: int) -> None:
        """Tells a host again to start its ranks, unless it has, and how they have ended: a message may be lost with a
        connection."""
        self._leader.tell(Start(self._launch), [node_rank])

    def begin(self, launch_id: int, num_replaced: Mapping[int, int] | None = None) -> None:
        """Notes that these are the ranks of a launch from now on."""
        self.launch_id, self.num_replaced = launch_id, Counter(num_replaced or {})
        self._died, self._last_died = [], {}

    def join(self, node_rank: int, launch: Launch, memory: HostMemory, num_here: Mapping[int, int]) -> None:
        """Lets the ranks of a host whose processes have all ended join the others. num_here: of ranks of this host"""
        self.num_replaced.update(dict.fromkeys(self.ranks_of(node_rank), _UNHEARD))
        self._leader.tell(Join(launch, memory, {**self.num_replaced, **num_here}), [node_rank])

    def ranks_of(self, node_rank: int) -> range:
        """Returns the ranks of a host."""
        first = (node_rank - self._first) * self._per_host
        return range(first, first + self._per_host)

    def _node_of(self, rank: int) -> list[int]:
        return [self._first + rank // self._per_host]

    def note_death(self, message: Died) -> None:
        """Notes how a rank has ended; once, though its host may tell it again."""
        death = message.death
        if message.launch_id == self.launch_id and death.num_before > self._last_died.get(death.rank, -1):
            self._died.append(death)
            self.num_replaced[death.rank] = self._last_died[death.rank] = death.num_before

    def finish(self, rank: int) -> None:
        """Ends what is left of a rank."""
        self._leader.tell(EndRank(self.launch_id, rank, self.num_replaced[rank]), self._node_of(rank))

    def replace(self, rank: int) -> None:
        """Starts a new process for one rank beside the others of its launch."""
        self._leader.tell(Replace(self.launch_id, rank, self.num_replaced[rank]), self._node_of(rank))
        self.num_replaced[rank] += 1

    def deaths(self) -> list[Death]:
        """Returns the ranks that ended since the last call. Those that were killed come first, as the likely cause."""
        died, self._died = self._died, []
        return sorted(died, key=lambda death: not death.was_killed)

    def end(self, grace_s: float) -> None:
        """Ends all ranks; those that are ending get grace_s to do so."""
        self._leader.tell(EndRanks(grace_s), self.nodes)


class RanksOfHosts(LocalRanks):
    """The ranks of several hosts, seen from node rank 0: it starts its own, and tells the others to start theirs.

    elsewhere: those of the others
    """

    def __init__(
        self,
        leader: Leader,
        config: ServeConfig,
        on_line: OnLine,
        folder: Path,
        link: Link,
        page_files: Sequence[int] = (),
        pages_at: Sequence[str] = (),
    ):
        super().__init__(config, on_line, folder, link, page_files=page_files, pages_at=pages_at)
        self._leader, self.elsewhere = leader, RanksElsewhere(leader, config)

    def start(self) -> None:
        host, _ = self.config.launcher.meeting_place()
        with open_port(host, 0, "launcher.dist_init_addr") as store:
            port = store.getsockname()[1]
            launch = Launch(new_launch_id(), host, port, self._leader.front_ends, self._pages_at)
            self.start_in(launch, store.fileno())
        self.elsewhere.start_in(launch)

    def join_running(self, running: Running) -> range:
        """Starts the ranks of this host beside those of others that have lost their leader; returns them."""
        own = range(self._num_local)
        self.elsewhere.begin(running.launch.launch_id, running.num_before)
        num_before = self.elsewhere.num_replaced
        num_before.update(dict.fromkeys(own, _UNHEARD))
        self.join(running.launch, running.memory, num_before)
        return own

    def finish(self, rank: int) -> None:
        if rank < self._num_local:
            super().finish(rank)
        else:
            self.elsewhere.finish(rank)

    def replace(self, rank: int) -> None:
        if rank < self._num_local:
            super().replace(rank)
        else:
            self.elsewhere.replace(rank)

    def take_back(self, node_rank: int) -> range:
        """Lets a host whose processes have all ended join the launch; returns its ranks, none where it cannot."""
        memory = self.memory_of_hosts()
        if self.launch is None or memory is None:
            return range(0)
        self.elsewhere.join(node_rank, self.launch, memory, dict(enumerate(self._num_before)))
        return self.elsewhere.ranks_of(node_rank)

    def deaths(self) -> list[Death]:
        return sorted([*super().deaths(), *self.elsewhere.deaths()], key=lambda death: not death.was_killed)

    def end(self, grace_s: float) -> None:
        self.elsewhere.end(grace_s)
        super().end(grace_s)


class PrefillElsewhere(RanksElsewhere):
    """The prefill ranks, on hosts of their own, which send their pages to the decode hosts.

    front_ends: where they attach;  pages_at: as in Launch;  pages: takes them on this host
    """

    children: Sequence[Forked] = ()  # here

    def __init__(
        self,
        leader: Leader,
        config: ServeConfig,
        front_ends: tuple[str, ...],
        pages_at: tuple[str, ...],
        pages: "PageListener",
    ):
        super().__init__(leader, config)
        self._front_ends, self._pages_at, self._pages = front_ends, pages_at, pages
        self._takers, self._store_port = config.nodes_of("decode"), config.page_port
        self._joining: list[int] = []  # node ranks that wait for what they need
        self._asked: list[int] = []  # the one that was asked for it last

    @property
    def are_reached(self) -> bool:
        """Whether their hosts can be told to start them."""
        return not set(self.nodes) & set(self._leader.missing)

    def start(self) -> None:
        """Starts the ranks, after those of an earlier launch have been ended."""
        are_several = len(self.nodes) > 1
        store = (self._leader.address_of(self.nodes[0]), self._store_port) if are_several else ("", 0)
        self._launch = Launch(new_launch_id(), *store, self._front_ends, self._pages_at)
        self._joining = []
        self._pages.begin(self._launch.launch_id)
        self.tell_takers()
        self.start_in(self._launch)

    def tell_takers(self) -> None:
        """Tells the other decode hosts whose pages they take."""
        if self._launch.launch_id:
            self._leader.tell(TakePages(self._launch.launch_id), self._takers)

    def take_back(self, node_rank: int) -> range:
        """Lets a host whose processes have all ended join the launch, once another one has told what it needs; returns
        its ranks, none where there is no other one."""
        if not self._may_tell(node_rank):
            return range(0)
        if node_rank not in self._joining:
            self._joining.append(node_rank)
        self.ask_for_memory()
        return self.ranks_of(node_rank)

    def _may_tell(self, but: int) -> list[int]:
        gone = {but, *self._joining, *self._leader.missing}
        return [node for node in self.nodes if node not in gone]

    def ask_for_memory(self) -> None:
        """Asks one of the hosts that serve what those need that are to join; again, since it may not have heard."""
        if self._joining:
            self._asked = self._may_tell(self._joining[0])[:1]
            self._leader.tell(TellMemory(self.launch_id), self._asked)

    def note_gone(self, gone: Collection[int]) -> None:
        """Asks another host where the one that was asked is gone. gone: node ranks"""
        if set(self._asked) & set(gone):
            self.ask_for_memory()

    def take_memory(self, message: MemoryIs) -> bool:
        """Lets hosts join that wait for this; returns False where they cannot."""
        if message.launch_id != self.launch_id or not self._joining:
            return True
        joining, self._joining = self._joining, []
        if message.memory is None:
            return False
        for node_rank in joining:
            self.join(node_rank, self._launch, message.memory, {})
        return True


def with_port(config: ServeConfig, http_port: int) -> ServeConfig:
    """Returns the configuration with the real port in place of 0."""
    return config.model_copy(update={"server": config.server.model_copy(update={"port": http_port})})


class _PrefillDisplay:
    """Shows prefill ranks behind those that decode. first: the number of the first"""

    def __init__(self, display: StartDisplay, first: int):
        self._display, self._first = display, first

    def phase(self, rank: int, phase: str, fraction: float) -> None:
        """Shows what a rank does."""
        self._display.phase(self._first + rank, phase, fraction)

    def note(self, text: str, style: str = "") -> None:
        """Prints a line about these ranks."""
        self._display.note(f"prefill: {text}", style=style)

    def line(self, who: str, line: str) -> None:
        """Prints what one of them has printed."""
        self._display.line(f"prefill {who}", line)


class _Prefill:
    """The prefill ranks of a system: a launch of their own, without which the others serve on.

    config:   of their role
    begun_s:  when they were started last
    is_wrong: another start would end as the last one did
    """

    def __init__(self, config: ServeConfig, display: _PrefillDisplay, ranks: LocalRanks | PrefillElsewhere):
        self._config, self._display = config, display
        self.ranks = ranks
        self._restarts = Restarts(config.launcher, "the prefill ranks were")
        self._launch: LaunchWatch | None = None  # None: they are not running
        self._starts_at_s: float | None = None
        self.begun_s, self.is_wrong = 0.0, False
        self._has_served = False  # with these settings
        self._tell: Callable[[Message], None] = lambda message: None

    def start(self, tell: Callable[[Message], None]) -> None:
        """Starts the ranks. tell: sends a message to the front ends"""
        self._tell = tell
        self._begin()

    def _begin(self) -> None:
        self._starts_at_s, self.begun_s = None, time.monotonic()
        self.ranks.start()
        self._launch = LaunchWatch(self._config, self._display, self.ranks, self._restarts, self._tell)

    @property
    def computes(self) -> list[Fact]:
        """What decides about their values, as in LaunchWatch."""
        return [] if self._launch is None else self._launch.computes

    def refuse(self, why: str, is_wrong: bool) -> None:
        """Ends ranks that compute other values than the decode ranks. is_wrong: they would again"""
        assert self._launch is not None, "they have said what they compute"
        self._launch.lose(why)
        self.is_wrong = is_wrong

    def take(self, message: ToFrontEnd) -> None:
        """Shows what a rank has reported."""
        if self._launch is not None:
            self._launch.take(message)

    def lose(self, reason: str) -> None:
        """Notes that they are lost with their host."""
        if self._launch is not None:
            self._launch.lose(reason)

    def hear(self, ranks: PrefillElsewhere, node_rank: int, message: HostMessage) -> None:
        """Takes what one of their hosts reports. ranks: these"""
        match message:
            case Died():
                ranks.note_death(message)
            case MemoryIs():
                if not ranks.take_memory(message):
                    self.lose("a host is back, and no other one has what it needs to join")
            case HostIsNew():
                self._host_is_new(ranks, node_rank, message.host)
            case HostIsBack():
                if self._launch is not None and not self._launch.has_served:
                    ranks.start_again_on(node_rank)
                ranks.ask_for_memory()

    def _host_is_new(self, ranks: PrefillElsewhere, node_rank: int, name: str) -> None:
        """Lets a host join whose launcher is a new process. Without others to join, all are started again with it, also
        those that were given up."""
        launch = self._launch
        back = ranks.take_back(node_rank) if launch is not None and launch.goes_on and not launch.is_apart else ()
        if launch is not None and back:
            launch.replaced(back)
            self._display.note(f"{name} is back; its ranks join the others", style="yellow")
            return
        self.lose(f"the launcher of {name} was started again")
        if self._launch is None and self._starts_at_s is None:
            self.is_wrong = self._has_served = False
            self._starts_at_s = time.monotonic()

    def hosts_are_gone(self, ranks: PrefillElsewhere, gone: Mapping[int, str]) -> None:
        """Loses them where nobody can go on: while they start, or without any of their hosts. gone: by node rank"""
        names = [gone[node] for node in ranks.nodes if node in gone]
        if names and (len(names) == len(ranks.nodes) or self._launch is None or not self._launch.has_served):
            self.lose(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} gone")
        else:
            ranks.note_gone(gone)

    @property
    def is_ready(self) -> bool:
        """Whether they serve, or nobody waits for them: they are given up, or their host is not there."""
        if self._launch is not None:
            return self._launch.is_ready
        return self._starts_at_s is None or not self.ranks.are_reached

    def turn(self) -> None:
        """Replaces lost ranks, and restarts all of them where that fails."""
        if self._starts_at_s is not None and time.monotonic() >= self._starts_at_s and self.ranks.are_reached:
            self._begin()
        if self._launch is None:
            return
        loss = self._launch.find_loss()
        if loss is None:
            self._launch.replace_lost_ranks()
            return
        self._launch = None
        for line in (str(loss), *(f"  {line}" for line in loss.last_lines)):
            self._display.note(line, style="red")
        self.ranks.end(0.0 if loss.others_run else _LOSS_GRACE_S)
        self._has_served |= loss.had_served
        self.is_wrong |= loss.is_setting and not self._has_served  # later a rank ends so for want of a network, too
        if not self.is_wrong and self._restarts.note_loss(str(loss), loss.had_served):
            self._starts_at_s = time.monotonic() + self._restarts.pause_s
            again = f"they are started again{in_a_while(self._restarts.pause_s)} ({self._restarts.describe()})"
            self._display.note(f"{again}; the decode ranks serve on meanwhile", style="yellow")
            return
        why = ["a setting or a file must be corrected first"] if self.is_wrong else self._restarts.report()
        for line in (*why, "they are not started again; the decode ranks serve on"):
            self._display.note(line, style="red")


class _System:
    """The system as its launcher sees it.

    hosts:   the others, where there are; ranks is of all then
    prefill: the ranks that compute prompts, beside `ranks` then
    """

    def __init__(
        self,
        config: ServeConfig,
        display: StartDisplay,
        ranks: LocalRanks,
        signals: Signals,
        hosts: Leader | None = None,
        prefill: _Prefill | None = None,
    ):
        self._prefill = prefill
        self.config = config
        self.display = display
        self.ranks = ranks
        self.signals = signals
        self._hosts = hosts
        self._drain_until_s = 0.0
        self._drain_elsewhere: set[int] = set()  # node ranks with front ends that have requests, maybe
        self._front_ends: FrontEnds | None = None
        self._restarts = Restarts(config.launcher)
        self._starts_at_s: float | None = None  # when all ranks, which have ended, are started again
        self._waits_for: list[int] = []  # node ranks without which they cannot
        self._was_ready = False
        self.begin_launch()

    def run(self, listener: socket.socket, running: Running | None = None) -> int:
        """Serves until the end; returns the exit code.

        listener: takes HTTP connections;  running: ranks that serve, and that those of this host are to join
        """
        end = _Ended(0)
        try:
            if running is None:
                self.ranks.start()
            else:
                self._join(running)
            if self._prefill is not None:
                self._prefill.start(self._tell)
            self.start_front_ends(listener.fileno())
            if self.config.num_front_ends == 1:
                listener.close()  # the front end holds it now
            self.watch()
        except _Ended as ended:
            end = ended
        finally:
            self.end(end)
        return end.code

    def _join(self, running: Running) -> None:
        assert isinstance(self.ranks, RanksOfHosts), "there are several hosts"
        self.display.note("other hosts serve without node rank 0; its ranks join them", style="yellow")
        self._was_ready = True
        self._launch.join(self.ranks.join_running(running))

    def begin_launch(self) -> None:
        """Begins to watch ranks that are about to start."""
        self._launch = LaunchWatch(self.config, self.display, self.ranks, self._restarts, self._tell)
        self._launched_s, self._is_announced = time.monotonic(), False

    def start_front_ends(self, http_fd: int) -> None:
        """Starts the front ends with the listening socket, and attaches to them as supervisor."""
        note = partial(self._note, style="red")
        config_file, on_line = self.ranks.config_file, self.display.line
        self._front_ends = FrontEnds(self.config, self.ranks.link, config_file, http_fd, on_line, note)
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
                if self._prefill is not None:
                    self._prefill.take(message)
            if self._prefill is not None and not self.signals.num:
                self._watch_prefill(self._prefill)
            waits = self._prefill is not None and not self._was_ready and not self._prefill.is_ready
            is_ready = self._launch.is_ready and not self._is_announced and not waits
            if is_ready and self._front_ends.serve(self.ranks.launch_id):
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

    def _watch_prefill(self, prefill: _Prefill) -> None:
        """Keeps the prefill ranks running, and lets none serve that compute other values than the decode ranks.

        Raises _Ended where they cannot, as it turns out at the start.
        """
        difference = difference_of_roles(self._launch.computes, prefill.computes)
        if difference is not None and self._was_ready:
            prefill.refuse(difference, is_wrong=prefill.begun_s > self._launched_s)
        elif difference is not None:
            self.display.stop()
            self._note(difference, style="red")
            raise _Ended(2, "the start failed, as said above")
        prefill.turn()
        if prefill.is_wrong and not self._was_ready:
            raise _Ended(2, "the start failed, as said above")

    def _hear(self, hosts: Leader) -> None:
        """Takes what other hosts report."""
        self.ranks.keep_host()
        elsewhere = self._prefill.ranks if self._prefill is not None else None
        for node_rank, message in hosts.turn():
            if isinstance(message, Signalled):
                self.signals.count(message.number)
            elif self._prefill is None or not isinstance(elsewhere, PrefillElsewhere):
                self._hear_of_ranks(node_rank, message)
            elif node_rank in elsewhere.nodes:
                self._prefill.hear(elsewhere, node_rank, message)
            else:
                self._hear_of_ranks(node_rank, message)
                if isinstance(message, HostIsNew | HostIsBack):
                    elsewhere.tell_takers()
        self._drain_elsewhere -= set(hosts.missing)
        gone = hosts.gone(_HOST_GONE_S)
        if self._prefill is not None and isinstance(elsewhere, PrefillElsewhere):
            self._prefill.hosts_are_gone(elsewhere, gone)
        if self._starts_at_s is None and not self._launch.has_served:
            for name in (name for node_rank, name in gone.items() if node_rank in self.config.nodes):
                self._launch.lose(f"{name} is gone")

    def _hear_of_ranks(self, node_rank: int, message: HostMessage) -> None:
        """Takes what another host of these ranks reports."""
        assert isinstance(self.ranks, RanksOfHosts), "there are several hosts"
        own_id = self.ranks.launch_id
        match message:
            case HostIsBack() if self._starts_at_s is None and not self._launch.has_served:
                self.ranks.elsewhere.start_again_on(node_rank)
            case Died():
                self.ranks.elsewhere.note_death(message)
            case FrontEndsEnded():
                self._drain_elsewhere.discard(node_rank)
                if message.code == 2:
                    raise _Ended(2, f"a front end on node rank {node_rank} has ended; its last lines are there")
            case HostIsNew() if message.running is not None and message.running.launch.launch_id == own_id:
                for death in message.running.ended:
                    self.ranks.elsewhere.note_death(Died(own_id, death))
            case HostIsNew() if self._starts_at_s is None:
                back = self.ranks.take_back(node_rank) if self._launch.goes_on else ()
                self._launch.replaced(back)
                if back:
                    self._note(f"{message.host} is back; its ranks join the others", style="yellow")
                else:
                    self._launch.lose(f"the launcher of {message.host} was started again")

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
        if self._front_ends is None or (self._front_ends.have_ended and not self._drain_elsewhere):
            return False
        deadline_s = self.config.server.drain_deadline_s
        if not self._drain_until_s:
            self._drain_until_s = time.monotonic() + deadline_s + _END_GRACE_S
            self._front_ends.signal(signal.SIGTERM)
            if self._hosts is not None and self.config.launcher.front_ends == "every_host":
                self._hosts.tell(Drain())
                self._drain_elsewhere = set(range(1, self.config.launcher.nnodes)) - set(self._hosts.missing)
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
        takes_text = has_tokenizer(self.config)
        prompt = '{"text": "def "}' if takes_text else '{"input_ids": [5, 6, 7]}'
        talk = f"  talk: {address}/chat\n" if takes_text else ""
        self.display.note(
            f"  OpenAI clients: base_url {address}/v1, model {served_name(self.config.model)}\n"
            f"  SGLang's clients: {address}/generate\n"
            f"{talk}"
            f"  watch: {address}/dashboard, /metrics, /server_info (all settings)\n"
            f"  try: curl {address}/generate -H 'content-type: application/json' -d '{prompt}'"
        )

    def _tell(self, message: Message) -> None:
        if self._front_ends is not None:
            self._front_ends.tell(message)
        if self._hosts is not None and isinstance(message, Exited | Fatal):
            self._hosts.tell(TellFrontEnds(message))

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
        others = [] if self._hosts is None else self._hosts.missing
        waited_s, missing = time.monotonic() - starts_at_s, [node for node in others if node in self.config.nodes]
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
        of_prefill = [] if self._prefill is None else self._prefill.ranks.children
        if self._prefill is not None and (not self._prefill.is_ready or front_ends is None or front_ends.have_ended):
            for child in of_prefill:
                child.signal(signal.SIGTERM)
        children = [*self.ranks.children, *of_prefill, *(front_ends.children if front_ends is not None else ())]
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
        if self._prefill is not None:
            self._prefill.ranks.end(grace_s=0.0)


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
