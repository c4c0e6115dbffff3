"""The rendezvous of ranks: they meet in the store of the launch, compare what they are, and join process groups.

Groups of ranks with different settings would wait for each other without end. So before any group exists, every rank
writes what it is, reads what the others are, and compares; a rank that does not come is named. torchelastic's own
rendezvous joins agents, not ranks, and only under torchrun.

`rank` is a process of the launch, `dp_rank` says whose requests it owns, `ep_rank` whose experts: today one number.
"""

import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from moe_serve.c_library import find_compiler
from moe_serve.config import ServeConfig
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.hosts.handshake import key_of_launch, listen
from moe_serve.dispatch.hosts.link import HostLink, Hosts
from moe_serve.dispatch.hosts.speed import Speed
from moe_serve.dispatch.peer_calls import barrier, gather_bytes, reason_of
from moe_serve.dispatch.shared_files import SharedFiles
from moe_serve.dispatch.shm.memory import STORE_ORDER, host_mark
from moe_serve.errors import ConfigError, LaunchError, MoeServeError
from moe_serve.launcher.facts import Fact, first_difference
from moe_serve.launcher.rank_env import RankEnv, host_name, interface_towards, new_launch_id, own_host
from moe_serve.links.link import find_link
from moe_serve.log import get_logger
from moe_serve.server.edge.ports import open_port

log = get_logger(__name__)
_POLL_S = 0.02
_FAILED = "failed"  # under this key a rank says that it will not come
_MOST_SAID = 2000  # characters
_WARN_S = 5.0  # a rank that is not there by then is named in the log, and again whenever the wait has doubled
_MEASURE_S = 5.0  # for a connection over which the network is measured
_LEAVE_S = 5.0  # how long rank 0 waits for the others to have read


def open_store(env: RankEnv, deadline_s: float) -> Store:
    """Returns the store of the launch: a file of our own launcher, rank 0's, or that of torchrun's agent.

    Rank 0's listens at the master's address alone, not at all addresses of its machine.
    Raises LaunchError where it cannot be reached in time.
    """
    if env.num_ranks == 1:
        return HashStore()
    if env.launch_files and not env.master_port:
        store = FileStore(env.store_path, env.num_ranks)
        store.set_timeout(timedelta(seconds=deadline_s))
        return store
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = env.rank == 0 and not of_agent
    listener = None
    if env.store_fd is not None:
        listener = socket.socket(fileno=env.store_fd)
    elif is_master:
        listener = open_port(env.master_addr, env.master_port, "MASTER_ADDR", "MASTER_PORT")
    try:
        return TCPStore(
            env.master_addr,
            env.master_port,
            env.num_ranks,
            is_master=is_master,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,  # `gather` waits for them, and names who is missing
            multi_tenant=not of_agent,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {env.rank} of {env.num_ranks} could not reach the store of the launch at "
            f"{env.store} within {deadline_s:g} s ({reason_of(error)}); check that "
            "rank 0 was started, and that this address is reachable from here"
        ) from None


def agree_on_launch(store: Store, env: RankEnv, deadline_s: float) -> int:
    """Returns the id of this launch: drawn by rank 0, unless the launcher has given one. The same on all ranks.

    torchrun keeps its store when it starts ranks again, and its agents count restarts each for themselves. So what lies
    in the store may be left of an earlier launch, and nothing but fresh random numbers tells: every rank writes one,
    rank 0 answers with the id and the numbers that it has read, and a rank believes an answer that has its own number.
    Raises LaunchError naming the ranks that have not come in time.
    """
    if env.launch_id or env.num_ranks == 1:
        return env.launch_id or new_launch_id()
    at = PrefixStore("moe_serve/launch", store)
    try:
        return _lead(at, env, deadline_s) if env.rank == 0 else _follow(at, env, deadline_s)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(_lost_store(env, error)) from None


def _lead(at: Store, env: RankEnv, deadline_s: float) -> int:
    launch_id, others = new_launch_id(), range(1, env.num_ranks)
    told = ""
    wait = _Wait(env, deadline_s)
    while True:
        come = [rank for rank in others if at.check([f"number {rank}"])]
        answer = msgspec.json.encode((launch_id, {rank: at.get(f"number {rank}").decode() for rank in come})).decode()
        if answer != told:
            at.set("answer", answer)
            told = answer
        missing = [rank for rank in others if _text(at, f"agreed {rank}") != str(launch_id)]
        if not missing:
            at.set("go", str(launch_id))
            return launch_id
        wait.for_ranks(missing)


def _follow(at: Store, env: RankEnv, deadline_s: float) -> int:
    number = secrets.token_hex(8)
    at.set(f"number {env.rank}", number)
    wait = _Wait(env, deadline_s)
    agreed = 0
    while True:
        answer = _text(at, "answer")
        launch_id, numbers = msgspec.json.decode(answer, type=tuple[int, dict[int, str]]) if answer else (0, {})
        if numbers.get(env.rank) == number and launch_id != agreed:
            agreed = launch_id
            at.set(f"agreed {env.rank}", str(agreed))
        if agreed and _text(at, "go") == str(agreed):
            return agreed
        wait.for_ranks([0])  # which waits for the others, and names them


def _text(at: Store, key: str) -> str:
    return at.get(key).decode() if at.check([key]) else ""


def store_of_launch(store: Store, launch_id: int) -> Store:
    """Returns the part of the store in which nothing of another launch lies."""
    return PrefixStore(f"moe_serve/{launch_id}", store)


def check_facts(store: Store, env: RankEnv, find: Callable[[], Sequence[Fact]], deadline_s: float) -> Sequence[Fact]:
    """Returns the facts that all ranks have in common.

    Raises ConfigError on every rank, naming the first fact in which ranks differ, unless all have the same ones.

    find: returns this rank's facts; where it raises, the other ranks end with its error too, and do not wait
    """
    try:
        facts = find()
    except MoeServeError as error:
        PrefixStore("moe_serve/facts", store).set(_FAILED, f"rank {env.rank} ended: {error}"[:_MOST_SAID])
        raise
    rows = gather(store, env, "facts", msgspec.json.encode(facts).decode(), deadline_s)
    try:
        message = first_difference([msgspec.json.decode(row, type=list[Fact]) for row in rows])
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"what a rank wrote into the store of the launch at {env.store} cannot be read "
            f"({error}); are ranks of another version, or another program, using that port?"
        ) from None
    if message is not None:
        leave(store, env, "facts")
        raise ConfigError(message)
    return facts


def gather(store: Store, env: RankEnv, name: str, data: str, deadline_s: float) -> list[bytes]:
    """Returns every rank's text as bytes, in rank order.

    name: of this exchange; each is used once in a launch
    Raises LaunchError naming the ranks that have not come in time.
    """
    at = PrefixStore(f"moe_serve/{name}", store)
    try:
        at.set(str(env.rank), data)
        _wait_for_all(at, env, deadline_s)
        gathered = [at.get(str(rank)) for rank in range(env.num_ranks)]
        at.set(f"read {env.rank}", "")
    except RuntimeError as error:
        raise LaunchError(_lost_store(env, error)) from None
    return gathered


def _wait_for_all(at: Store, env: RankEnv, deadline_s: float) -> None:
    wait = _Wait(env, deadline_s)
    missing = list(range(env.num_ranks))
    while missing := [rank for rank in missing if not at.check([str(rank)])]:
        if at.check([_FAILED]):
            raise LaunchError(at.get(_FAILED).decode(errors="replace"))
        wait.for_ranks(missing)


def leave(store: Store, env: RankEnv, name: str) -> None:
    """Keeps rank 0, which may hold the store, until all have read what was written in an exchange, or some seconds."""
    at = PrefixStore(f"moe_serve/{name}", store)
    deadline_s = time.monotonic() + _LEAVE_S
    while env.rank == 0 and time.monotonic() < deadline_s:
        if at.check([f"read {rank}" for rank in range(env.num_ranks)]):
            return
        time.sleep(_POLL_S)


class _Wait:
    """One wait for other ranks: each turn pauses a little longer; names who is missing, and ends at the deadline."""

    def __init__(self, env: RankEnv, deadline_s: float):
        self._env = env
        self._deadline_s = deadline_s
        self._started_s = time.monotonic()
        self._next_warning_s = _WARN_S

    def for_ranks(self, missing: Sequence[int]) -> None:
        """Pauses before the next look. Raises LaunchError naming the missing ranks once the deadline has passed."""
        env, waited_s = self._env, time.monotonic() - self._started_s
        ranks = list_ranks(missing)
        if waited_s > self._deadline_s:
            raise LaunchError(
                f"{ranks} of {env.num_ranks} had not joined after {self._deadline_s:g} s; look at their last "
                f"lines, check that they were started and reach {env.store}, or raise "
                "server.attach_deadline_s"
            )
        if waited_s > self._next_warning_s:
            self._next_warning_s = 2 * waited_s
            if env.rank == min(set(range(env.num_ranks)) - set(missing), default=0):  # one rank says it for all
                log.warning("not joined after %.0f s: %s", waited_s, ranks)
        time.sleep(min(_POLL_S * (1 + waited_s), 0.5))


def list_ranks(ranks: Sequence[int]) -> str:
    """Returns such as "ranks 0, 2"; of many, the first eight and how many more there are."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _lost_store(env: RankEnv, error: Exception) -> str:
    return (
        f"rank {env.rank} lost the store of the launch at {env.store} while the ranks joined "
        f"({reason_of(error)}); look at the last lines of rank 0"
    )


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank.

    ep:       carries token rows (gloo on CPU, NCCL on GPU); a collective that takes longer than the step deadline fails
    control:  gloo, for the exchange before each step and for small host tensors
    patient:  gloo, with the longer deadline of the start, since ranks differ in how long they read weights
    one_host: whether all ranks share one machine and its shared memory
    """

    ep: EpGroup
    control: dist.ProcessGroup
    patient: dist.ProcessGroup
    one_host: bool


def join_groups(env: RankEnv, config: ServeConfig, device: torch.device, store: Store) -> Groups:
    """Returns this rank's groups; blocks until all ranks have joined.

    Raises LaunchError when they do not join within server.attach_deadline_s.
    """
    choose_interface(env)
    start_timeout = timedelta(seconds=config.server.attach_deadline_s)
    try:
        dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.num_ranks, timeout=start_timeout)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {env.rank} of {env.num_ranks} could not join the others at {env.store} "
            f"within {config.server.attach_deadline_s:g} s ({reason_of(error)}); "
            "check that all ranks were started and can reach that address"
        ) from None
    step_timeout = timedelta(seconds=config.engine.step_deadline_s)
    control = dist.new_group(backend="gloo", timeout=step_timeout)
    rows = control if device.type == "cpu" else dist.new_group(backend="nccl", timeout=step_timeout)
    patient = dist.group.WORLD
    assert patient is not None
    hosts, link = _join_hosts(env, config, device, patient)
    process_group = rows if env.num_ranks > 1 else None
    files = None if env.num_before is None else SharedFiles()
    return Groups(
        ep=EpGroup(env.rank, env.num_ranks, device, process_group, count_nodes(hosts), files, link),
        control=control,
        patient=patient,
        one_host=len(set(hosts)) == 1,
    )


def _join_hosts(
    env: RankEnv, config: ServeConfig, device: torch.device, group: dist.ProcessGroup
) -> tuple[Sequence[bytes], HostLink | None]:
    """Returns the mark of each rank's host, and this rank's connections with other hosts where CPU ranks use them."""
    able = device.type == "cpu" and platform.machine() in STORE_ORDER and find_compiler() is not None
    found = [
        each.split(maxsplit=2) for each in gather_bytes(f"{host_mark()} {int(able)} {host_name(env)}".encode(), group)
    ]
    hosts = [each[0] for each in found]
    most = TRANSPORTS["hosts"].max_ranks or len(hosts)
    asked = config.dispatch.backend in ("auto", "low_latency")
    if len(set(hosts)) == 1 or len(hosts) > most or not asked or not all(each[1] == b"1" for each in found):
        return hosts, None
    listener = _listener(env)
    of_hosts = Hosts.of(hosts, [each[2].decode() for each in found])
    deadlines_s = config.server.attach_deadline_s, _quiet_s(config)
    link = connect_hosts(env.rank, of_hosts, group, listener, _key_of_hosts(env, config), *deadlines_s)
    link.speed = _measure_speed(link, group)
    return hosts, link


def _measure_speed(link: HostLink, group: dist.ProcessGroup) -> Speed | None:
    """Returns the rate of the slowest connection between hosts, and the longest delay; a collective call."""
    own = link.measure(_MEASURE_S) if link.rank == link.local_ranks[0] else None
    found = gather_bytes(b"" if own is None else f"{own.delay_s} {own.bytes_per_s}".encode(), group)
    speeds = [Speed(*map(float, each.split())) for each in found if each]
    if not speeds:
        return None
    speed = Speed(max(each.delay_s for each in speeds), min(each.bytes_per_s for each in speeds))
    if link.rank == 0:
        text = "the network between %d hosts: %.0f MB/s, %.0f µs one way (the slowest way from a host to the next)"
        log.info(text, link.hosts.num_hosts, speed.bytes_per_s / 1e6, 1e6 * speed.delay_s)
    return speed


def _listener(env: RankEnv) -> socket.socket:
    """Returns where this rank listens for ranks of other hosts: made by our own launcher, or now."""
    if env.link_fd is not None:
        return socket.socket(fileno=env.link_fd)
    return listen(own_host(env.master_addr) or env.master_addr)


def _key_of_hosts(env: RankEnv, config: ServeConfig) -> bytes:
    return key_of_launch(find_link(config.server).token, env.launch_id)


def _quiet_s(config: ServeConfig) -> float:
    return config.dispatch.deadline_s or config.engine.step_deadline_s


def rejoin_hosts(
    env: RankEnv,
    config: ServeConfig,
    hosts: Hosts,
    addresses: Mapping[int, tuple[str, int]],
    speed: Speed | None,
) -> HostLink:
    """Returns the connections of a replacement rank with the ranks of other hosts that serve.

    addresses: where they listen;  speed: as the others measured it
    """
    number = env.num_before or 0
    link = HostLink(env.rank, hosts, _key_of_hosts(env, config), _listener(env), _quiet_s(config), number)
    link.speed = speed
    link.connect(addresses, _quiet_s(config), is_replacement=True)
    return link


def connect_hosts(
    rank: int,
    hosts: Hosts,
    group: dist.ProcessGroup,
    listener: socket.socket,
    key: bytes,
    deadline_s: float,
    quiet_s: float,
) -> HostLink:
    """Returns a rank's connections with the other hosts; a collective call.

    listener: at an IP address of this host that the others reach;  key: known to the ranks of this launch only
    quiet_s: a connection ends when the other host's kernel gives no sign for so long
    Raises PeerError where a rank cannot be reached within deadline_s.
    """
    address, port = listener.getsockname()[:2]
    found = gather_bytes(f"{port} {address}".encode(), group)
    words = [each.decode().split() for each in found]
    link = HostLink(rank, hosts, key, listener, quiet_s)
    link.connect({peer: (host, int(port)) for peer, (port, host) in enumerate(words)}, deadline_s)
    barrier(group)
    link.begin_epoch(0, range(len(words)))  # a connection that was replaced before anything was sent lost nothing
    return link


def choose_interface(env: RankEnv) -> None:
    """Makes gloo and NCCL listen at one interface, unless the user has chosen: the loopback one on a single host."""
    alone = env.num_local_ranks == env.num_ranks
    interface = interface_towards("127.0.0.1" if alone else env.master_addr)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def count_nodes(hosts: Sequence[object]) -> int:
    """Returns how many nodes the ranks are on: equal ones, numbered one after the other.

    Where hosts hold unequal numbers of ranks, or ranks alternate between them, each rank counts as a node of its own.
    hosts: of each rank, something that is equal for ranks of one host
    """
    num_nodes = len(set(hosts))
    per_node = len(hosts) // num_nodes
    regular = len(hosts) % num_nodes == 0 and all(host == hosts[r - r % per_node] for r, host in enumerate(hosts))
    return num_nodes if regular else len(hosts)


def device_of(env: RankEnv, config: ServeConfig) -> torch.device:
    """Returns the device of this rank. Raises LaunchError where it is missing."""
    kind = config.parallel.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("parallel.device is cuda but torch sees no GPU here; set parallel.device: cpu")
    if env.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {env.local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start at most that "
            "many ranks here"
        )
    torch.cuda.set_device(env.local_rank)
    return torch.device("cuda", env.local_rank)
