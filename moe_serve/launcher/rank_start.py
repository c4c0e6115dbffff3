"""The way of one rank to its first step: with all the others, or beside them as the replacement of a lost rank."""

import contextlib
import gc
import importlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from moe_serve.config import ServeConfig
from moe_serve.dispatch.hosts.handshake import PAGES, PAGES_TAKER, Party, key_of_launch
from moe_serve.dispatch.hosts.speed import Speed
from moe_serve.dispatch.shared_files import WEIGHTS, FileMark, SharedFiles, weights_of
from moe_serve.dispatch.votes import BUFFERS, LOG_NAME, Log
from moe_serve.engine.protocol.mailbox import ZmqMailbox
from moe_serve.engine.protocol.messages import Hello, Progress, Pulse, Ready, Refused
from moe_serve.engine.watchdog import Watchdog, WatchLimits
from moe_serve.errors import ConfigError, LaunchError, MoeServeError, PeerError
from moe_serve.launcher.facts import Fact, facts_of, facts_of_values, first_difference, front_end_facts
from moe_serve.launcher.rank_env import RankEnv, host_name
from moe_serve.links.link import find_link
from moe_serve.links.listeners import refuse_new_connections
from moe_serve.log import get_logger
from moe_serve.process_facts import own_node, runs

if TYPE_CHECKING:
    from moe_serve.attention_dp.page_ring import PageFiles
    from moe_serve.dispatch.base import EpGroup
    from moe_serve.dispatch.hosts.link import HostLink
    from moe_serve.dispatch.peer_streams import PeerStreams
    from moe_serve.engine.engine import Engine
    from moe_serve.engine.step.exchange import Exchange
    from moe_serve.launcher.rendezvous import Groups

_DIAL_S = 5.0  # for one attempt to connect
log = get_logger(__name__)


class RefusedError(MoeServeError):
    """The front end did not take this rank."""


class RankStart:
    """The way of one rank to its first step, phase by phase; each is shown to the front end and watched.

    env: with the id of the launch, once the ranks have met
    """

    def __init__(self, config: ServeConfig, env: RankEnv, mailbox: ZmqMailbox):
        self.env = env
        self._config = config
        self._mailbox = mailbox
        self._watchdog = _start_watchdog(config, env)
        self._wakes: list[str] = []  # the addresses of all ranks for wakes
        self._link_ports: frozenset[int] = frozenset()  # of connections between hosts, which are made anew when cut
        self._computes: list[tuple[str, str, str]] = []  # of Ready

    def report(self, phase: str, fraction: float) -> None:
        """Shows what this rank does. Raises RefusedError where the front end has refused it by now."""
        self._watchdog.enter(phase)
        self._look_for_refusal()
        if self.env.launch_id:  # before the ranks meet, the front end cannot know whose phase this is
            self._mailbox.send(Progress(self.env.rank, self.env.launch_id, phase, fraction))

    def run(self) -> "Engine":
        """Returns the engine, ready to run: groups joined, weights loaded, one empty step done."""
        started_s = time.monotonic()
        if self.env.launch_id:
            self._say_hello()
        self.report("importing torch", 0.0)
        import_engine()
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        engine = self._join_serving_ranks() if self.env.num_before else self._begin_together()
        refuse_new_connections(self._mailbox.wake_ports | self._link_ports)
        engine.served.info["start_s"] = round(time.monotonic() - started_s, 3)
        _end_on_signals(engine)
        self._watchdog.leave()
        engine.watchdog.start()
        rank, launch_id = self.env.rank, self.env.launch_id
        self._mailbox.start_pulse(lambda: Pulse(rank, launch_id, engine.step, engine.watchdog.phase))
        self._mailbox.send(Ready(rank, launch_id, engine.served.limits, engine.served.info, self._computes))
        return engine

    def _look_for_refusal(self) -> None:
        for message in self._mailbox.poll(0.0):
            if isinstance(message, Refused):
                raise RefusedError(f"the front end refused this rank: {message.reason}")

    def _begin_together(self) -> "Engine":
        from moe_serve.dispatch.peer_calls import barrier
        from moe_serve.engine.step.exchange import make_exchange

        groups, facts = self._meet()
        engine_config, files = self._config.engine, groups.ep.files
        exchange = make_exchange(
            engine_config.exchange,
            groups.control,
            groups.one_host,
            engine_config.step_deadline_s,
            files,
            groups.ep.link,
        )
        group = replace(groups.ep, streams=self._streams(groups.ep.link) if groups.ep.device.type == "cpu" else None)
        engine = _build_engine(self._config, group, exchange, self._mailbox, self.env, self.report)
        self._note_values(engine, facts)
        self._leave_handover(group, facts)
        self.report("waiting for the other ranks", 1.0)
        barrier(groups.patient)
        self.report("warming up", 0.0)
        engine.served.warm_up()
        barrier(groups.patient)  # by now every rank has made all connections of its groups, and to the store
        return engine

    def _join_serving_ranks(self) -> "Engine":
        """Returns the engine of a replacement rank; its `run` joins the others."""
        from moe_serve.dispatch.base import EpGroup
        from moe_serve.dispatch.hosts.link import Hosts
        from moe_serve.engine.step.exchange import open_exchange
        from moe_serve.launcher.rendezvous import count_nodes, device_of, rejoin_hosts

        self.report("joining the ranks that serve", 0.0)
        config, env, link = self._config, self.env, find_link(self._config.server)
        theirs, device = find_handover(env), device_of(env, config)
        facts = facts_of(config, device.type)
        check_like(theirs, facts, env)
        elsewhere, between = theirs.elsewhere, None
        self._wakes = [link.wakes_of(rank, "") for rank in range(env.num_ranks)]
        if elsewhere is not None:
            hosts = Hosts(tuple(elsewhere.hosts), tuple(elsewhere.names))
            between = rejoin_hosts(env, config, hosts, elsewhere.addresses, elsewhere.speed)
            self._wakes = elsewhere.wakes
        self._mailbox.connect_peers([each for rank, each in enumerate(self._wakes) if rank != env.rank])
        files = SharedFiles(theirs.pid, theirs.files, theirs.kernels)
        exchange = open_exchange(files, env.rank, env.num_ranks, config.engine.step_deadline_s, between)
        num_nodes = 1 if elsewhere is None else count_nodes(elsewhere.hosts)
        streams = self._streams(between)
        group = EpGroup(
            env.rank, env.num_ranks, device, num_nodes=num_nodes, files=files, link=between, streams=streams
        )
        engine = _build_engine(config, group, exchange, self._mailbox, env, self.report)
        self._note_values(engine, facts)
        self._leave_handover(group, facts)
        return engine

    def _note_values(self, engine: "Engine", facts: Sequence[Fact]) -> None:
        """Notes what decides about values, where ranks of another role are to compute the same."""
        if self._config.parallel.role == "both":
            return
        served, names = engine.served, ("numerics", "kernels", "dtype", "kv_cache_dtype", "expert_weights")
        arithmetic = ", ".join(f"{name} {served.info[name]}" for name in names)
        values = facts_of_values(facts, arithmetic, served.kv_key)
        self._computes = [(fact.key, fact.value, fact.note) for fact in values]

    def _streams(self, link: "HostLink | None") -> "PeerStreams | None":
        """Returns this rank's streams with others; None where no rank is started anew alone."""
        from moe_serve.dispatch.peer_streams import PeerStreams

        env = self.env

        def name_of(rank: int) -> str | None:
            left = read_handover(env.handover_file(rank), env.launch_id)
            return None if left is None else left.streams

        return None if env.num_before is None else PeerStreams(name_of, link)

    def _leave_handover(self, group: "EpGroup", facts: Sequence[Fact]) -> None:
        files, env, link, elsewhere = group.files, self.env, group.link, None
        if link is not None:
            self._link_ports = frozenset([link.addresses[env.rank][1]])
            hosts = link.hosts
            elsewhere = Elsewhere(list(hosts.of_rank), list(hosts.names), dict(link.addresses), self._wakes, link.speed)
        if files is not None:
            marks = files.marks()
            streams = "" if group.streams is None else group.streams.name
            handover = Handover(env.launch_id, os.getpid(), marks, files.kernels, list(facts), elsewhere, streams)
            leave_handover(env.handover_file(env.rank), handover)

    def _meet(self) -> "tuple[Groups, Sequence[Fact]]":
        """Agrees with the other ranks on the launch and on what all must have in common, and joins them.

        Returns the groups, and what all have in common.
        """
        from moe_serve.dispatch.peer_calls import gather_bytes
        from moe_serve.launcher.rendezvous import (
            agree_on_launch,
            check_facts,
            device_of,
            join_groups,
            open_store,
            store_of_launch,
        )

        self.report("joining the ranks", 0.0)
        config, deadline_s = self._config, self._config.server.attach_deadline_s
        device = device_of(self.env, config)
        store = open_store(self.env, deadline_s)
        launch_id = agree_on_launch(store, self.env, deadline_s)
        if not self.env.launch_id:
            self.env = replace(self.env, launch_id=launch_id)
            self._say_hello()
            self.report("joining the ranks", 0.5)
        env, store = self.env, store_of_launch(store, launch_id)
        facts = check_facts(store, env, lambda: facts_of(config, device.type), deadline_s)
        groups = join_groups(env, config, device, store)
        self._wakes = [each.decode() for each in gather_bytes(self._mailbox.wake_address.encode(), groups.patient)]
        self._mailbox.connect_peers([each for rank, each in enumerate(self._wakes) if rank != env.rank])
        return groups, facts

    def _say_hello(self) -> None:
        env = self.env
        hello = Hello(
            env.rank,
            env.num_ranks,
            env.launch_id,
            os.getpid(),
            host_name(env),
            restarts_left=env.restarts_left,
            num_before=env.num_before or 0,
        )
        self._mailbox.send(hello)


def import_engine() -> None:
    """Imports torch and the engine, and lets no collection of garbage look at what that leaves: it stays for good.

    On the way collections would take a seventh of the time, and each full one later would hold a step up by 0.1 s.
    """
    gc.disable()
    importlib.import_module("moe_serve.engine.build")
    gc.freeze()
    gc.enable()


def _start_watchdog(config: ServeConfig, env: RankEnv) -> Watchdog:
    """Starts a watchdog that names a phase of the start that takes long, and ends this rank where one stands still."""

    def give_up(text: str) -> None:
        log.error("%s, longer than server.attach_deadline_s; this rank ends", text)
        os._exit(1)

    # The waits for other ranks end by themselves at the deadline, and say more.
    deadline_s = config.server.attach_deadline_s
    limits = WatchLimits(min(30.0, deadline_s / 4), deadline_s / 2, deadline_s + 10)
    watchdog = Watchdog(f"rank {env.rank}", limits, give_up=give_up)
    watchdog.start()
    return watchdog


def memory_for_pages(size_gb: float) -> int:
    """Returns a descriptor of memory for pages of the KV cache, which is taken as it is written. size_gb: in GB"""
    descriptor = os.memfd_create("moe_serve_pages")
    os.ftruncate(descriptor, int(size_gb * 1e9))
    return descriptor


def _page_files(config: ServeConfig, env: RankEnv) -> "PageFiles | None":
    """Returns the memory for pages on their way, and how a prefill rank reaches decode ranks of other hosts."""
    from moe_serve.attention_dp.page_ring import PageFiles

    if not env.page_files:
        return None
    if config.parallel.role == "decode":
        return PageFiles(env.page_files, are_copies=bool(env.pages_at))
    own_file = env.page_files[env.local_rank]
    key = key_of_launch(find_link(config.server).token, env.launch_id)
    own = Party(env.rank, env.num_before or 0, key, ("", 0))
    takers = [
        (host.removeprefix("[").removesuffix("]"), int(port))
        for host, _, port in (each.rpartition(":") for each in env.pages_at)
    ]
    dials = {
        at: partial(own.dial, PAGES_TAKER, taker, 0, PAGES, _DIAL_S)
        for at, taker in zip(env.pages_at, takers, strict=True)
    }
    return PageFiles([own_file], dials)


def _build_engine(
    config: ServeConfig,
    group: "EpGroup",
    exchange: "Exchange",
    mailbox: ZmqMailbox,
    env: RankEnv,
    report: Callable[[str, float], None],
) -> "Engine":
    from moe_serve.engine.build import build_engine

    pages_fd, host_gb = env.pages_fd, config.cache.host_gb
    if pages_fd is None and host_gb is not None:  # other launchers share no memory among their ranks
        pages_fd = memory_for_pages(host_gb / env.num_local_ranks)
    memory = _page_files(config, env), pages_fd, env.weight_files
    engine = build_engine(config, group, exchange, mailbox, env.launch_id, report, *memory)
    engine.served.info |= {"role": config.parallel.role, "exchange": type(exchange).__name__, "launched_by": env.source}
    engine.served.info["shared_with_front_end"] = front_end_facts(config)
    if config.cache.disk_gb is not None or env.pages_fd is not None:  # of one host with the same: they share
        engine.served.info["pages"] = config.cache.path or "cache.host_gb"
    return engine


def _end_on_signals(engine: "Engine") -> None:
    """Makes SIGTERM end all ranks when open requests have ended, and SIGINT, or another SIGTERM, at the next step.

    One more signal ends this rank at once.
    """

    def ask(signum: int, frame: FrameType | None) -> None:
        if engine.stopping:
            os._exit(128 + signum)
        if signum == signal.SIGTERM and not engine.draining:
            engine.request_drain()
        else:
            engine.request_stop()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


class Elsewhere(msgspec.Struct, frozen=True):
    """How a replacement rank finds the ranks of other hosts.

    hosts: of all ranks;  names: of the hosts
    addresses: where a rank and those of other hosts listen;  wakes: addresses of all ranks
    speed: of the network between hosts; None: unknown
    """

    hosts: list[int]
    names: list[str]
    addresses: dict[int, tuple[str, int]]
    wakes: list[str]
    speed: Speed | None = None


class Handover(msgspec.Struct, frozen=True):
    """What a rank that serves leaves for a replacement rank: how to find its shared memory, and what must be equal.

    It lies in the files that a launcher shares with its ranks. These are in memory, and no other process has them: a
    rank comes back where no disk has room for a byte.

    pid: of the process that has the files open: a rank, or the launcher, which keeps those of ranks that have ended
    files, kernels: as in SharedFiles;  facts: what all ranks have in common;  elsewhere: None: all are on one host
    streams: the name under which ranks of this host ask the rank for experts; "": nobody answers
    """

    launch_id: int
    pid: int
    files: dict[str, FileMark]
    kernels: str
    facts: list[Fact]
    elsewhere: Elsewhere | None = None
    streams: str = ""


def leave_handover(file: int, handover: Handover) -> None:
    """Writes what replacement ranks need. A reader that comes meanwhile finds nothing. file: one of the launch"""
    os.ftruncate(file, 0)
    os.pwrite(file, msgspec.json.encode(handover), 0)


def read_handover(file: int, launch_id: int) -> Handover | None:
    """Returns what was left in a file for ranks of a launch; None: nothing."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode(os.pread(file, os.fstat(file).st_size, 0), type=Handover)
        return found if found.launch_id == launch_id else None
    return None


def find_handover(env: RankEnv) -> Handover:
    """Returns what a living rank of this host has left, or else the launcher. Raises LaunchError where neither has.

    One with a copy of the weights for this process's NUMA node comes first.
    """
    others = [env.handover_file(rank) for rank in env.local_ranks if rank != env.rank]
    left = (read_handover(file, env.launch_id) for file in (*others, env.launch_files[-1]))
    living = [found for found in left if found is not None and runs(found.pid)]
    if not living:
        raise LaunchError(
            f"rank {env.rank} was restarted alone, but no other rank of its launch serves; start all ranks again"
        )
    return next((found for found in living if weights_of(own_node()) in found.files), living[0])


def wakes_before(env: RankEnv) -> str:
    """Returns the address for wakes of the process that was this rank before; "" where that does not matter."""
    found = read_handover(env.handover_file(env.rank), env.launch_id) if env.num_before else None
    return "" if found is None or found.elsewhere is None else found.elsewhere.wakes[env.rank]


def keep_open(files: Sequence[int], launch_id: int) -> SharedFiles | None:
    """Keeps the shared memory of this host's ranks open in the launcher, and hands it on when none of them is left.

    files: of the launch, as in LAUNCH_FILES
    Returns what is kept; None where no rank has left it yet, or other hosts have no part in it.
    """
    for file in files[1:-1]:
        found = read_handover(file, launch_id)
        if found is None or found.elsewhere is None:
            continue
        kept = SharedFiles(found.pid, found.files, found.kernels)
        with contextlib.suppress(PeerError):  # the rank has ended
            for name in found.files:
                os.close(kept.open(name, os.O_RDONLY if name.startswith(WEIGHTS) else os.O_RDWR))
            leave_handover(files[-1], msgspec.structs.replace(found, pid=os.getpid(), files=kept.marks(), streams=""))
            return kept
    return None


def log_of_host(files: Sequence[int], launch_id: int, kept: SharedFiles) -> Log:
    """Returns the log in which this host votes. files: as for keep_open;  kept: what that or make_memory returns"""
    found = read_handover(files[-1], launch_id)
    assert found is not None
    assert found.elsewhere is not None, "there are several hosts"
    descriptor = kept.open_again(f"{BUFFERS} {LOG_NAME}", os.O_RDWR | os.O_APPEND)
    return Log(descriptor, max(found.elsewhere.hosts) + 1)


class HostMemory(msgspec.Struct, frozen=True):
    """What a host whose processes have all ended needs to join a launch that goes on. sizes: of its files, by name"""

    handover: Handover
    sizes: dict[str, int]

    @property
    def addresses(self) -> dict[int, tuple[str, int]]:
        """Where ranks listen, and where those of the lost host did."""
        return {} if self.handover.elsewhere is None else self.handover.elsewhere.addresses


def describe_memory(files: Sequence[int], launch_id: int, kept: SharedFiles) -> HostMemory | None:
    """Returns what another host needs, from what the ranks of this one have left; None: they have left nothing.

    files: as for keep_open;  kept: what that has returned
    """
    found = [each for file in files[1:-1] if (each := read_handover(file, launch_id)) is not None]
    addresses = {rank: at for each in found if each.elsewhere for rank, at in each.elsewhere.addresses.items()}
    if not found or found[0].elsewhere is None:
        return None
    elsewhere = msgspec.structs.replace(found[0].elsewhere, addresses=addresses)
    # Of the weights it reads its own.
    sizes = {name: size for name, size in kept.sizes().items() if not name.startswith(WEIGHTS)}
    return HostMemory(msgspec.structs.replace(found[0], elsewhere=elsewhere), sizes)


def make_memory(files: Sequence[int], memory: HostMemory) -> SharedFiles:
    """Makes the memory that the ranks of this host share anew, and leaves it to all of them. files: as for keep_open

    Its log has another incarnation than the one before: what that had promised is forgotten.
    """
    assert memory.handover.elsewhere is not None
    num_hosts = max(memory.handover.elsewhere.hosts) + 1
    kept = SharedFiles()
    for name, size in memory.sizes.items():
        descriptor = os.memfd_create("moe_serve_memory")
        if name.endswith(LOG_NAME):
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            Log(own, num_hosts, 1 + secrets.randbits(61))
        else:
            os.ftruncate(descriptor, size)
        kept.keep(name, descriptor)
        os.close(descriptor)
    for file in files[1:]:
        leave_handover(file, msgspec.structs.replace(memory.handover, pid=os.getpid(), files=kept.marks(), streams=""))
    return kept


def check_like(theirs: Handover, own: list[Fact], env: RankEnv) -> None:
    """Raises ConfigError naming the first fact in which this rank differs from those that serve."""
    message = first_difference([own if rank == env.rank else theirs.facts for rank in range(env.num_ranks)])
    if message is not None:
        raise ConfigError(message)
