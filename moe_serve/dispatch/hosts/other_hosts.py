"""What a rank and the other hosts tell each other of the group: its page goes there, their votes come from there.

A page is copied to each rank of other hosts whenever it changes and with each sign of life, over the connection with
that very rank. Copies may come late or twice, and from several connections out of order; the next one mends that within
a beat. An old page only makes its rank look late: epochs in it are lower, so it proposes nothing and masks nobody.
"""

import contextlib
import queue
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.dispatch.hosts.link import HostLink, Space
from moe_serve.dispatch.votes import Decision, Electorate, Kind, Log, Proposer, Vote, VoteFormat

Int64Array = npt.NDArray[np.int64]
PAGE_WORDS = 16  # of a page that others see; the first one, written last, is the epoch that the rank proposes
_DIAL_S = 1.0  # for a connection for votes, and for an answer
_IDLE_S = 30.0  # a connection without requests ends
_ATTEMPT_S = 0.5  # at most, before a proposer asks again with a higher ballot
_CATCH_UP_S = 0.2  # between two questions for decisions that were missed
_INCARNATION = struct.Struct("<q")


class OtherHosts:
    """The other hosts, as a rank's membership sees them.

    host_of: of each rank;  neighbours: the ranks of this host, this one included
    """

    def __init__(self, rank: int, space: Space, page: Int64Array, log: Log):
        """page: of this rank, at the beginning of its region;  log: of this host"""
        self.host_of: Sequence[int] = space.link.hosts.of_rank
        self.neighbours = space.link.local_ranks
        self._rank, self._space, self._link, self._log = rank, space, space.link, log
        self._page: int = page.__array_interface__["data"][0]
        self._elsewhere = space.link.hosts.elsewhere(rank)
        self._voters = Voters(space.link, log)
        self._caught_up_s = 0.0
        self._answering: frozenset[int] = frozenset()
        self._link.on_votes(self._voters.serve)

    def show_page(self) -> None:
        """Copies this rank's page to all other hosts; whatever is lost comes with the next copy."""
        for rank in self._elsewhere:
            self._space.tell(rank, 1 << self._rank, 8, self._page + 8, 8 * (PAGE_WORDS - 1))
            self._space.tell(rank, 1 << self._rank, 0, self._page, 8)

    def poll(self) -> None:
        """Takes in what has come."""
        self._link.poll()

    def leave_epoch(self, epoch: int, masked: int) -> None:
        """Takes in nothing of epochs before this one; called before this rank proposes it, or begins it.

        masked: ranks, as bits; those of this host take in nothing of these epochs either
        """
        self._link.leave_epoch(epoch, [rank for rank in self.neighbours if masked >> rank & 1])

    def broken(self) -> dict[int, str]:
        """Returns the ranks whose connection has ended in this epoch, and why: something may be lost."""
        return self._link.broken()

    def why_down(self) -> str:
        """Returns a few of the ranks without a connection and why, as text; "": all are connected."""
        return "; ".join(f"rank {rank}: {why}" for rank, why in list(self._link.down().items())[:2])

    def decide(self, epoch: int, wanted: Decision, before: Decision, deadline_s: float) -> Decision | None:
        """Returns what the hosts decide for an epoch; None: no quorum has answered in time.

        wanted: proposed where nothing else may have been decided;  before: who takes part in the epoch before
        """
        proposer = Proposer(epoch, wanted, Electorate(before, self.host_of), secrets.randbits(44))
        decided = self._voters.decide(proposer, time.monotonic() + deadline_s)
        return None if decided is None else self._log.decide(epoch, decided)

    def catch_up(self) -> frozenset[int]:
        """Asks the other hosts for the newest decision, and writes it into the log of this host; not too often.

        Returns the hosts that have answered. Of one whose ranks all start anew, these answer before they take part.
        Raises ReplacedError where the others go on with a newer process of this rank.
        """
        self._link.check_not_replaced()
        if time.monotonic() - self._caught_up_s > _CATCH_UP_S:
            self._answering = self._voters.ask_newest()
            self._caught_up_s = time.monotonic()
        return self._answering


@dataclass(frozen=True)
class _Answer:
    host: int
    incarnation: int
    vote: Vote


class Voters:
    """The votes of all hosts: this one's from its log, the others' from whichever of their ranks answers."""

    def __init__(self, link: HostLink, log: Log):
        self._link, self._log = link, log
        self._own = link.hosts.of_rank[link.rank]
        self._format = VoteFormat(link.hosts.num_hosts)

    def serve(self, connected: socket.socket, rank: int) -> None:
        """Answers the requests of a rank of another host, from a thread, until it ends the connection."""
        run = threading.Thread(target=self._serve, args=(connected,), name=f"votes of rank {rank}", daemon=True)
        try:
            run.start()
        except RuntimeError:  # no thread is left; it asks another rank
            connected.close()

    def _serve(self, connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError, ValueError):
            connected.settimeout(_IDLE_S)
            while True:
                for request in self._format.decode(_receive(connected, self._format.num_bytes)):
                    answer = self._log.answer(request)
                    connected.sendall(_INCARNATION.pack(self._log.incarnation) + self._format.encode(answer))

    def decide(self, proposer: Proposer, until_s: float) -> Decision | None:
        """Returns the decision that a proposer finds; None: no quorum has answered by then."""
        answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        with self._asked(answers) as ask:
            while proposer.decided is None and time.monotonic() < until_s:
                request: Vote | None = proposer.begin()
                attempt_s = min(until_s, time.monotonic() + random.uniform(0.2, 1.0) * _ATTEMPT_S)
                while request is not None or proposer.decided is None:
                    if request is not None:
                        ask(request)
                        request = proposer.hear(self._own, self._log.incarnation, self._log.answer(request))
                        continue
                    try:
                        answer = answers.get(timeout=max(attempt_s - time.monotonic(), 0.0))
                    except queue.Empty:
                        break
                    request = proposer.hear(answer.host, answer.incarnation, answer.vote)
        return proposer.decided

    def ask_newest(self) -> frozenset[int]:
        """Writes the newest decision of the other hosts into the log; returns those that answer within a second."""
        answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        until_s = time.monotonic() + _DIAL_S
        with self._asked(answers) as ask:
            ask(Vote(Kind.NEWEST, 0, 0, self._log.begin))
            heard: set[int] = set()
            while len(heard) < len(self._link.others):
                try:
                    answer = answers.get(timeout=max(until_s - time.monotonic(), 0.0))
                except queue.Empty:
                    break
                heard.add(answer.host)
                if answer.vote.kind is Kind.DECIDED:
                    self._log.decide(answer.vote.epoch, answer.vote.decision)
        return frozenset(heard)

    @contextlib.contextmanager
    def _asked(self, answers: "queue.SimpleQueue[_Answer]") -> Iterator[Callable[[Vote], None]]:
        """Yields a function that sends a request to all other hosts; what they answer comes into the queue."""
        requests: list[queue.SimpleQueue[Vote | None]] = [queue.SimpleQueue() for _ in self._link.others]
        for host, its in zip(self._link.others, requests, strict=True):
            with contextlib.suppress(RuntimeError):  # no thread is left: this host is not asked
                threading.Thread(target=self._ask, args=(host, its, answers), name="votes", daemon=True).start()

        def ask(request: Vote) -> None:
            for its in requests:
                its.put(request)

        try:
            yield ask
        finally:
            for its in requests:
                its.put(None)

    def _ask(
        self, host: int, requests: "queue.SimpleQueue[Vote | None]", answers: "queue.SimpleQueue[_Answer]"
    ) -> None:
        """Sends the newest request to a host, to another rank of it where one does not answer, until told to end."""
        ranks = self._link.hosts.ranks(host)
        connected: socket.socket | None = None
        request = requests.get()
        failures = 0
        while request is not None:
            try:
                connected = connected or self._link.dial_votes(ranks[failures % len(ranks)], _DIAL_S)
                connected.settimeout(_DIAL_S)
                connected.sendall(self._format.encode(request))
                data = _receive(connected, _INCARNATION.size + self._format.num_bytes)
                (incarnation,) = _INCARNATION.unpack_from(data)
                for vote in self._format.decode(data[_INCARNATION.size :]):
                    answers.put(_Answer(host, incarnation, vote))
                request = requests.get()
            except (OSError, ValueError):
                failures += 1
                if connected is not None:
                    connected.close()
                connected = None
                time.sleep(0.01 if failures <= len(ranks) else 0.1)
                request = _newest(requests, request)
        if connected is not None:
            connected.close()


def _receive(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise OSError("it closed the connection")
        data += part
    return data


def _newest(requests: "queue.SimpleQueue[Vote | None]", request: Vote | None) -> Vote | None:
    """Returns the last request of those that wait in the queue; this one where none does."""
    with contextlib.suppress(queue.Empty):
        while request is not None:
            request = requests.get_nowait()
    return request
