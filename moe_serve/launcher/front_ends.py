"""The front ends of one host: processes that accept from one listening socket.

One, or as many as server.api_workers says. The socket is the launcher's, so connections that wait to be accepted
outlive a front end. Where a system has several, one that ends is started again, as often as `launcher` says (after a
pause where it had not served), and is left out after that while others serve; requests of its clients are lost with
their connections, and the ranks drop them.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from moe_serve.child_process import describe_exit
from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import (
    SUPERVISOR,
    Apart,
    Fatal,
    Hello,
    Members,
    Message,
    Progress,
    Ready,
    ToFrontEnd,
    decode_to_front_end,
    encode,
)
from moe_serve.launcher.children import Child, OnLine, Program
from moe_serve.launcher.local import Restarts, child_environment, in_a_while, left_out
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.server.edge.client_limits import Ledger, shared_memory


class FrontEnds:
    """Starts the front ends, attaches to each as supervisor, and watches their processes.

    config_file: the effective configuration, which they read
    http_fd:     the listening socket
    on_line:     gets each line that they print
    note:        prints a line of this process

    num_before: by rank, processes that were this rank before, as the ranks have said
    """

    def __init__(
        self, config: ServeConfig, link: Link, config_file: Path, http_fd: int, on_line: OnLine,
        note: Callable[[str], None],
    ):  # fmt: skip
        self._config = config
        self._link = link
        self._config_file = config_file
        self._http_fd = http_fd
        self._on_line = on_line
        self._note = note
        self._sockets = LinkSockets(link)
        num = config.server.api_workers
        self._first = config.launcher.node_rank * num  # number of the first, among those of all hosts
        self._are_several = config.num_front_ends > 1
        numbers = range(num)  # here
        self._clients_fd = shared_memory(num, config.server.max_connections) if num > 1 else None
        self._clients = None if self._clients_fd is None else Ledger.shared(self._clients_fd, num, 0)
        self._restarts = [
            Restarts(config.launcher, f"the processes of front end {self._first + number} were") for number in numbers
        ]
        self._started_again: set[int] = set()
        self._starts_at_s: dict[int, float] = {}  # of those that have ended
        self._left: list[int] = list(numbers)  # those that are not given up
        addresses = [link.front_end_at(self._first + number) for number in numbers]
        self._links = [self._sockets.connected(zmq.DEALER, address, linger_ms=200) for address in addresses]
        self._prefill_links: list[zmq.Socket[bytes]] = []  # where they take reports about prefill ranks
        if config.parallel.num_prefill_ranks:
            of_prefill = link.of_prefill()
            addresses = [of_prefill.front_end_at(self._first + number) for number in numbers]
            self._prefill_links = [self._sockets.connected(zmq.DEALER, each, linger_ms=200) for each in addresses]
        self._poller = zmq.Poller()
        for each in (*self._links, *self._prefill_links):
            self._poller.register(each, zmq.POLLIN)
        self._by_age: list[int] = []
        self._ready: set[tuple[int, int, int]] = set()  # (front end, launch, rank)
        self._over: set[int] = set()  # launches
        self._apart: tuple[int, int] | None = None  # of the ranks here: launch, and epoch of the group
        self.num_before: dict[int, int] = {}
        self.children: list[Child] = []

    def start(self) -> None:
        """Starts all of them."""
        self.children = [self._start(number) for number in range(len(self._links))]

    def _start(self, number: int) -> Child:
        own, shared = self._first + number, [] if self._clients_fd is None else [self._clients_fd]
        clients = [each for fd in shared for each in ("--clients-fd", str(fd))]
        child = Program(
            f"front end {own}" if self._are_several else "front end",
            "moe_serve.launcher.frontend",
            ["--http-fd", str(self._http_fd), *clients, "--worker", str(own), "--config", str(self._config_file)],
            child_environment(self._link),
            self._on_line,
            pass_fds=[self._http_fd, *shared],
        )
        self._by_age = [*(each for each in self._by_age if each != number), number]
        hello = Hello(SUPERVISOR, self._config.parallel.num_ranks, 0, os.getpid(), os.uname().nodename)
        for link in self._of(number):
            link.send(encode(hello))
        return child

    def _of(self, number: int) -> Sequence[zmq.Socket[bytes]]:
        """Returns the sockets of a front end."""
        return [each[number] for each in (self._links, self._prefill_links) if each]

    @property
    def have_ended(self) -> bool:
        """Whether none of them runs."""
        return all(child.code is not None for child in self.children)

    def serve(self, launch_id: int) -> bool:
        """Returns whether every one that is not left out knows that all ranks of a launch are ready."""
        self._ready = {each for each in self._ready if each[1] == launch_id}
        return len(self._ready) == len(self._left) * self._config.parallel.num_ranks

    def goes_on(self, launch_id: int) -> bool:
        """Returns whether ranks have served in a launch, and none has said that it is over or is apart."""
        serves = any(each[1] == launch_id for each in self._ready)
        return serves and launch_id not in self._over and (self._apart is None or self._apart[0] != launch_id)

    def watch(self) -> int | None:
        """Restarts a front end that has ended, unless it keeps failing or a setting must be corrected first.

        Returns the exit code of the system where none is left here, or one ends at its first start for a setting.
        """
        for number in list(self._left):
            child = self.children[number]
            code = child.code
            if code is None:
                continue
            if number in self._starts_at_s:
                self._start_when_due(number)
                continue
            ended = f"the {child.who} {describe_exit(code)}"
            is_wrong = code == 2 and (len(self._left) == 1 or number not in self._started_again)
            if is_wrong or not self._are_several:
                self._note(ended)
                return 2 if code == 2 else 1
            child.finish()
            if self._clients is not None:
                self._clients.forget(number)
            had_served = any(each[0] == number for each in self._ready)
            self._ready = {each for each in self._ready if each[0] != number}
            restarts = self._restarts[number]
            if code != 2 and restarts.note_loss(ended, had_served):
                self._note(f"{ended}; it is started again{in_a_while(restarts.pause_s)} ({restarts.describe()})")
                self._starts_at_s[number] = time.monotonic() + restarts.pause_s
                self._start_when_due(number)
            elif len(self._left) == 1:
                for line in (ended, *restarts.report()):
                    self._note(line)
                return 1
            else:
                self._note(f"{ended}; {left_out('it', code)}")
                self._left.remove(number)
                self._by_age.remove(number)
        return None

    def _start_when_due(self, number: int) -> None:
        if time.monotonic() >= self._starts_at_s[number]:
            del self._starts_at_s[number]
            self._started_again.add(number)
            self.children[number] = self._start(number)

    def receive(self, timeout_ms: int) -> Iterator[ToFrontEnd]:
        """Yields what the ranks have reported, waiting for it.

        All front ends pass on the same. Progress is taken from the oldest alone; all else from any of them, since the
        oldest may die before it has passed it on.
        """
        ready = dict(self._poller.poll(timeout_ms))
        oldest = self._by_age[0] if self._by_age else None
        own = [(number, link) for number in range(len(self._links)) for link in self._of(number)]
        for number, link in own:
            if link not in ready:
                continue
            while link.poll(0):
                data = link.recv()
                with contextlib.suppress(msgspec.DecodeError):  # Alive and Shutdown are for ranks
                    message = decode_to_front_end(data)
                    self._note_state(number, message, link in self._prefill_links)
                    if number == oldest or not isinstance(message, Progress):
                        yield message

    def _note_state(self, number: int, message: ToFrontEnd, is_of_prefill: bool) -> None:
        match message:
            case _ if is_of_prefill:  # what follows is about those that decode
                return
            case Hello():
                self.num_before[message.rank] = message.num_before
            case Ready():
                self._ready.add((number, message.launch_id, message.rank))
            case Fatal():
                self._over.add(message.launch_id)
            case Apart():
                self._apart = message.launch_id, message.group_epoch
            case Members() if self._apart is not None and message.group_epoch > self._apart[1]:
                self._apart = None

    def tell(self, message: Message) -> None:
        """Sends a message to all of them."""
        for number in self._left:
            for link in self._of(number):
                link.send(encode(message))

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all of them."""
        for each in self._left:
            self.children[each].signal(number)

    def close(self) -> None:
        """Kills what is left of them."""
        for number in self._left:
            self.children[number].finish()
        self._sockets.close()
        if self._clients_fd is not None:
            os.close(self._clients_fd)
