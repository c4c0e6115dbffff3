"""Ranks on pretended hosts that lose each other: forked processes whose hosts meet over relays, which stand for cables.

Each rank runs steps as the engine does: all tell what they see, then rows go to experts and back, and each is checked.
"""

import contextlib
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from moe_serve.dispatch.base import TransportRequest
from moe_serve.dispatch.hosts.handshake import listen
from moe_serve.dispatch.hosts.link import HostLink, Hosts
from moe_serve.dispatch.shm.memory import Mappings, ShmMemory
from moe_serve.dispatch.shm.region import region_shape
from moe_serve.dispatch.shm.transport import ShmAllToAll
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import PeerError
from tests.dispatch.hosts.relay import Relay, relay
from tests.dispatch.hosts.test_link import KEY
from tests.dispatch.shm import faults
from tests.dispatch.shm.regions import map_anonymous

SUSPECT_S = 2.0  # cores are busy with other tests
_CABLES, _ENDS, _STEPS, _PIDS = 0, 1, 64, 512  # bytes of the board, and where steps and process ids of ranks begin
OPEN, RESET, CUT, SILENT = range(4)  # silent: what is sent vanishes, and no connection ends


@dataclass
class Network:
    """Hosts, a relay in front of each rank, and a board that all processes see."""

    host_of: Sequence[int]
    relays: list[Relay]
    listeners: list[socket.socket]
    mappings: list[Mappings]
    board: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 4096))

    def set_cables(self, state: int) -> None:
        """Called by any process; returns once it is so."""
        self.board[_CABLES] = 16 + state
        until(lambda: self.board[_CABLES] < 16)

    def obey(self) -> None:
        """Runs in a thread of the process that has the relays."""
        while not self.board[_ENDS] & 0x80:
            if self.board[_CABLES] >= 16:
                state = self.board[_CABLES] - 16
                for each in self.relays:
                    each.refuses = state == CUT
                    each.swallows = {"out", "back"} if state == SILENT else set()
                    if state != SILENT:
                        each.reset()  # what was swallowed is missing in the middle of a stream
                self.board[_CABLES] = state
            time.sleep(0.001)

    def num_steps(self, rank: int) -> int:
        return self._word(_STEPS + 8 * rank)

    def count_step(self, rank: int) -> None:
        at = _STEPS + 8 * rank
        self.board[at : at + 8] = (self.num_steps(rank) + 1).to_bytes(8, "little")

    def show_pid(self, rank: int) -> None:
        at = _PIDS + 8 * rank
        self.board[at : at + 8] = os.getpid().to_bytes(8, "little")

    def pid(self, rank: int) -> int:
        return self._word(_PIDS + 8 * rank)

    def _word(self, at: int) -> int:
        return int.from_bytes(self.board[at : at + 8], "little")

    def end(self) -> None:
        self.board[_ENDS] |= 1

    @property
    def ends(self) -> bool:
        return bool(self.board[_ENDS] & 1)


def until(done: Callable[[], object], timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.002)


@contextlib.contextmanager
def network(host_of: Sequence[int]) -> Iterator[Network]:
    """host_of: of each rank"""
    num_hosts = max(host_of) + 1
    size = region_shape(len(host_of), faults.LIMITS, make_wire("auto", torch.float32)).num_bytes
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listen("127.0.0.1")) for _ in host_of]
        relays = [stack.enter_context(relay(each.getsockname()[:2])) for each in listeners]
        mappings = [map_anonymous(len(host_of), size, num_hosts) for _ in range(num_hosts)]
        made = Network(host_of, relays, listeners, mappings)
        thread = threading.Thread(target=made.obey)
        thread.start()
        try:
            yield made
        finally:
            made.board[_ENDS] |= 0x80
            thread.join()


def connect(rank: int, net: Network, is_replacement: bool = False) -> HostLink:
    listener = listen("127.0.0.1") if is_replacement else net.listeners[rank]
    link = HostLink(rank, Hosts.of(net.host_of), KEY, listener, quiet_s=5.0)
    if not is_replacement:
        connections = link._connections
        connections.own = replace(connections.own, address=net.relays[rank].address)  # others dial the relay
    addresses = {peer: each.address for peer, each in enumerate(net.relays)}
    link.connect(addresses, 20, is_replacement)
    return link


def make_transport(
    rank: int, net: Network, deadline_s: float, is_replacement: bool = False, is_spareable: bool = True
) -> ShmAllToAll:
    """is_spareable: whether the others go on without a rank that gives no sign of life; else only deadlines count"""
    link = connect(rank, net, is_replacement)
    memory = ShmMemory(rank, net.mappings[net.host_of[rank]])
    memory.join(link)
    if not is_replacement:
        until(lambda: all(link.generation(peer) for peer in link.hosts.elsewhere(rank)))
        time.sleep(0.2)  # the others have shared their regions
    request = TransportRequest("shm", faults.LIMITS, torch.float32, deadline_s=deadline_s)
    transport = ShmAllToAll(memory, request)
    membership = transport.membership
    membership.suspect_after_s = SUSPECT_S if is_spareable else None
    membership.apart_after_s = SUSPECT_S
    if is_replacement:
        membership.begin_masked()
    membership.begin_heartbeat()
    return transport


@dataclass
class Story:
    """What a rank went through. groups: of each epoch that it was in;  apart, masked: how often it was"""

    groups: dict[int, list[int]] = field(default_factory=dict)
    apart: int = 0
    masked: int = 0
    steps: int = 0
    said: list[str] = field(default_factory=list)


def serve(rank: int, transport: ShmAllToAll, net: Network, story: Story) -> None:
    """Runs steps until the network ends, whatever happens to the others."""
    membership = transport.membership
    step = 0
    while True:
        try:
            if membership.is_masked:
                raise PeerError("it is a new process", rank, "start", 0)
            members = membership.members
            story.groups[membership.epoch] = members
            shown = torch.tensor([step, sum(1 << each for each in membership.waiting_to_rejoin()), net.ends])
            table = transport.exchange_counts(shown).wait()[members]
            step = int(table[:, 0].max())
            if table[:, 2].any():
                return
            joining = [other for other in membership.masked if all(int(asked) >> other & 1 for asked in table[:, 1])]
            if joining:
                membership.regroup(joining=joining)
                continue
            faults.run_step(transport, rank, step, members)
            step += 1
            story.steps += 1
            net.count_step(rank)
            time.sleep(0.002)
        except PeerError as error:
            story.said.append(str(error))
            if not recover(transport, net, story):
                return


def recover(transport: ShmAllToAll, net: Network, story: Story) -> bool:
    membership = transport.membership
    if not (membership.is_masked or membership.is_apart):
        assert membership.is_void, story.said[-1]
        try:
            membership.regroup()
        except PeerError as error:
            story.said.append(str(error))
    if membership.is_apart:
        story.apart += 1
        while not membership.try_return():
            if net.ends:
                return False
            time.sleep(0.01)
    if membership.is_masked:
        story.masked += 1
        membership.ask_to_rejoin(is_new="it is a new process" in story.said)
        while not membership.try_rejoin():
            if net.ends:
                return False
            time.sleep(0.005)
    return True


def stop(pid: int, for_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(for_s)
    os.kill(pid, signal.SIGCONT)
