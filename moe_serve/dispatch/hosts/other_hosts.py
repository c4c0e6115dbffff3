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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.dispatch.hosts.handshake import VOTES
from moe_serve.dispatch.hosts.link import HostLink, Space
from moe_serve.dispatch.hosts.stand_in import ANSWER_HEAD, answer_votes
from moe_serve.dispatch.votes import Decision, Electorate, Kind, Log, Proposer, Vote, VoteFormat
from moe_serve.socket_bytes import receive

Int64Array = npt.NDArray[np.int64]
PAGE_WORDS = 16  # of a page that others see; the first one, written last, is the epoch that the rank proposes
_DIAL_S = 1.0  # for a connection for votes, and for an answer
_ATTEMPT_S = 0.5  # at most, before a proposer asks again with a higher ballot
_CATCH_UP_S = 0.2  # between two questions for decisions that were missed


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
        self._asks, self._asked_s = threading.Lock(), 0.0
        self._answering: frozenset[int] = frozenset()
        self._link.take_dialled(VOTES, self._voters.serve)

    def named(self, *ranks: int) -> str:
        """Returns ranks with their hosts, for people."""
        return self._link.hosts.named(*ranks)

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
        return "; ".join(f"{self.named(rank)}: {why}" for rank, why in list(self._link.down().items())[:2])

    def decide(self, epoch: int, wanted: Decision, before: Decision, deadline_s: float) -> Decision | None:
        """Returns what the hosts decide for an epoch; None: no quorum has answered in time.

        wanted: proposed where nothing else may have been decided;  before: who takes part in the epoch before
        """
        proposer = Proposer(epoch, wanted, Electorate(before, self.host_of), secrets.randbits(44))
        decided = self._voters.decide(proposer, time.monotonic() + deadline_s)
        return None if decided is None else self._log.decide(epoch, decided)

    def catch_up(self) -> frozenset[int]:
        """Asks the other hosts for the newest decision, from a thread and not too often; it comes into this host's log.

        Returns the hosts that answered last. Of one whose ranks all start anew, these answer before they take part, and
        before them its launcher. Raises ReplacedError where the others go on with a newer process of this rank.
        """
        self._link.check_not_replaced()
        if time.monotonic() - self._asked_s > _CATCH_UP_S and self._asks.acquire(blocking=False):
            try:
                threading.Thread(target=self._ask, name="newest decision", daemon=True).start()
            except RuntimeError:  # no thread is left now
                self._asks.release()
        return self._answering

    def _ask(self) -> None:
        try:
            self._answering = self._voters.ask_newest()
        finally:
            self._asked_s = time.monotonic()
            self._asks.release()

    def is_said_dead(self, rank: int) -> bool:
        """Returns whether the launcher of a rank's host has said that it has no process, since it last connected."""
        ended, generations = self._voters.ended[self.host_of[rank]]
        return bool(ended >> rank & 1) and generations[rank] == self._link.generation(rank)


@dataclass(frozen=True)
class _Answer:
    host: int
    incarnation: int
    vote: Vote


class Voters:
    """The votes of all hosts: this one's from its log, the others' from whichever of their processes answers.

    ended: as each host has said last: ranks without a process, as bits, and the connections so far with each rank
    """

    def __init__(self, link: HostLink, log: Log):
        self._link, self._log = link, log
        self._own = link.hosts.of_rank[link.rank]
        self._format = VoteFormat(link.hosts.num_hosts)
        self.ended: list[tuple[int, list[int]]] = [(0, [])] * link.hosts.num_hosts

    def serve(self, connected: socket.socket, rank: int) -> None:
        """Answers the requests of a rank of another host, from a thread, until it ends the connection."""
        name = f"votes of rank {rank}"
        try:
            threading.Thread(target=answer_votes, args=(connected, self._log), name=name, daemon=True).start()
        except RuntimeError:  # no thread is left; it asks another rank
            connected.close()

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
                connected = connected or self._link.dial(ranks[failures % len(ranks)], VOTES, _DIAL_S)
                generations = [self._link.generation(rank) for rank in range(len(self._link.hosts.of_rank))]
                connected.sendall(self._format.encode(request))
                size = ANSWER_HEAD.size + self._format.num_bytes
                data = receive(connected, size, until_s=time.monotonic() + _DIAL_S)
                incarnation, ended = ANSWER_HEAD.unpack_from(data)
                self.ended[host] = ended, generations
                for vote in self._format.decode(data[ANSWER_HEAD.size :]):
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


def _newest(requests: "queue.SimpleQueue[Vote | None]", request: Vote | None) -> Vote | None:
    """Returns the last request of those that wait in the queue; this one where none does."""
    with contextlib.suppress(queue.Empty):
        while request is not None:
            request = requests.get_nowait()
    return request
