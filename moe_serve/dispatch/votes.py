"""How hosts decide, once and for all, who takes part in an epoch: a vote of hosts (single-decree Paxos for each epoch).

    acceptor   a host. Its memory is an append-only log that all processes of the host share, so it survives each of
               them: what a host has promised and accepted is the fold of its log. Nobody holds a lock.
    proposer   any rank. Each of its attempts has a ballot that nobody else ever uses
    quorum     hosts with more than half of the ranks of the epoch before, or with exactly half of them and the lowest
               of these ranks. Two quorums have a host in common

So of the parts into which a broken network cuts the hosts at most one decides: the part with most ranks, at a tie the
part of the lowest rank. Messages may be lost, late, doubled and reordered; no clock counts.

A host whose processes have all died has lost its log. Its next log has another incarnation, and its votes do not count
until a decision names that: whatever the old one had promised cannot be broken by the new one. Where all ranks are on
one host, its log alone is a quorum, and the first decision in it counts.

No thread, socket or clock is in this file. It is checked against schedules of faults (tests/dispatch/test_votes.py),
and as a model under all of them (tests/dispatch/models/).
"""

import os
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

BUFFERS = "low-latency buffers"  # the shared files whose log decides who takes part
LOG_NAME = "decisions"  # the end of the name of a log among shared files


class Decision(NamedTuple):
    """Who takes part in an epoch.

    masked:       ranks, as bits
    incarnations: of the log of each host; 0: the one with which the launch began
    """

    masked: int
    incarnations: tuple[int, ...]


class Kind(IntEnum):
    """What a vote says. The first four stand in logs as well; the others only answer."""

    INCARNATION = 0  # of a log, in place of the ballot; the first record of each log
    PREPARE = 1  # asks a host to promise that it accepts nothing of lower ballots
    ACCEPT = 2  # asks it to accept a decision
    DECIDED = 3
    PROMISED = 4
    ACCEPTED = 5
    REFUSED = 6  # a higher ballot was promised
    NEWEST = 7  # asks for the newest decision that the host knows


class Vote(NamedTuple):
    """A record of a log, a request to a host, or its answer.

    ballot:   of the attempt; of REFUSED the one that was promised
    accepted: of PROMISED the ballot in which the decision was accepted; 0: none was
    """

    kind: Kind
    epoch: int
    ballot: int
    decision: Decision
    accepted: int = 0


@dataclass(frozen=True)
class VoteFormat:
    """Votes as bytes, all of one size. num_hosts: incarnations of a decision"""

    num_hosts: int

    @property
    def num_bytes(self) -> int:
        return 8 * (5 + self.num_hosts)

    def encode(self, vote: Vote) -> bytes:
        """Returns a vote as bytes."""
        words = vote.kind, vote.epoch, vote.ballot, vote.accepted, vote.decision.masked, *vote.decision.incarnations
        return struct.pack(f"<{5 + self.num_hosts}q", *words)

    def decode(self, data: bytes) -> Iterator[Vote]:
        """Returns the votes in some bytes, without one that is not whole. Raises ValueError for another kind."""
        whole = len(data) - len(data) % self.num_bytes
        for kind, epoch, ballot, accepted, masked, *incarnations in struct.iter_unpack(
            f"<{5 + self.num_hosts}q", data[:whole]
        ):
            yield Vote(Kind(kind), epoch, ballot, Decision(masked, tuple(incarnations)), accepted)


@dataclass
class _Epoch:
    """What a host has promised, accepted and learned of one epoch. accepted: a ballot, and the decision"""

    promised: int = 0
    accepted: tuple[int, Decision] | None = None
    decided: Decision | None = None


@dataclass
class Acceptor:
    """What the records of a log amount to, in their order. incarnation: of the log; -1 before its first record"""

    incarnation: int = -1
    epochs: dict[int, _Epoch] = field(default_factory=dict)

    def read(self, record: Vote) -> None:
        """Takes in the next record. One that comes too late for its place in the log changes nothing."""
        if record.kind is Kind.INCARNATION:
            self.incarnation = record.ballot if self.incarnation < 0 else self.incarnation
            return
        of = self.epochs.setdefault(record.epoch, _Epoch())
        if record.kind is Kind.DECIDED and of.decided is None:
            of.decided = record.decision
        elif record.kind is Kind.PREPARE:
            of.promised = max(of.promised, record.ballot)
        elif record.kind is Kind.ACCEPT and record.ballot >= of.promised:
            of.promised, of.accepted = record.ballot, (record.ballot, record.decision)

    def decided(self, epoch: int) -> Decision | None:
        """Returns what was decided for an epoch; None: this host knows of nothing."""
        of = self.epochs.get(epoch)
        return None if of is None else of.decided

    def newest(self) -> tuple[int, Decision] | None:
        """Returns the highest epoch that is decided, and who takes part in it; None: none is."""
        epochs = [epoch for epoch, of in self.epochs.items() if of.decided is not None]
        decided = self.decided(max(epochs)) if epochs else None
        return None if decided is None else (max(epochs), decided)

    def answer(self, asked: Vote) -> Vote:
        """Returns the answer to a request that was appended and has been read."""
        of = self.epochs.get(asked.epoch, _Epoch())
        newest = self.newest()
        if asked.kind is Kind.NEWEST and newest is not None:
            return Vote(Kind.DECIDED, newest[0], 0, newest[1])
        if of.decided is not None:
            return Vote(Kind.DECIDED, asked.epoch, 0, of.decided)
        if asked.kind is Kind.PREPARE and of.promised == asked.ballot:
            ballot, decision = of.accepted or (0, asked.decision)
            return Vote(Kind.PROMISED, asked.epoch, asked.ballot, decision, ballot)
        if asked.kind is Kind.ACCEPT and of.accepted is not None and of.accepted[0] == asked.ballot:
            return Vote(Kind.ACCEPTED, asked.epoch, asked.ballot, asked.decision)
        return Vote(Kind.REFUSED, asked.epoch, of.promised, asked.decision)


class Log:
    """The log of a host: a file that its processes append to.

    Any of them may die or stop at any instruction, and nobody waits for anybody. The kernel puts appended records
    behind each other, whole, also when several processes append at once; so the log is the same for whoever reads it.
    Plain loads and stores of shared memory cannot give that: of two ranks that give each other up at one moment, both
    would go on.
    """

    def __init__(self, descriptor: int, num_hosts: int = 1, incarnation: int = 0):
        """descriptor: of a file that was opened for reading and appending; closed with this object

        incarnation: of this log, where it has none yet
        """
        self._descriptor = descriptor
        self.format = VoteFormat(num_hosts)
        self._acceptor = Acceptor()
        self._num_read = 0
        self._reading = threading.Lock()
        # Also takes a page now: there may be none when it is needed.
        self._append(Vote(Kind.INCARNATION, 0, incarnation, self.begin))

    @property
    def begin(self) -> Decision:
        """Who takes part in the first epoch: all."""
        return Decision(0, (0,) * self.format.num_hosts)

    def read(self) -> Acceptor:
        """Returns what all records so far amount to."""
        with self._reading:
            data = os.pread(self._descriptor, 1 << 20, self._num_read)
            for record in self.format.decode(data):
                self._acceptor.read(record)
            self._num_read += len(data) - len(data) % self.format.num_bytes
        return self._acceptor

    @property
    def incarnation(self) -> int:
        """Of this log, among those that the host has had."""
        return self.read().incarnation

    def answer(self, asked: Vote) -> Vote:
        """Returns this host's answer to a request. Raises ValueError for what is none."""
        if asked.kind not in (Kind.PREPARE, Kind.ACCEPT, Kind.DECIDED, Kind.NEWEST):
            raise ValueError(f"{asked.kind} is no request")
        if asked.kind is not Kind.NEWEST and self.read().decided(asked.epoch) is None:
            self._append(asked)
        return self.read().answer(asked)

    def decide(self, epoch: int, decision: Decision) -> Decision:
        """Returns what was decided for an epoch: this, if nothing was. For facts, and for the only host."""
        if self.read().decided(epoch) is None:
            self._append(Vote(Kind.DECIDED, epoch, 0, decision))
        decided = self.read().decided(epoch)
        assert decided is not None, "what was appended can be read"
        return decided

    def _append(self, record: Vote) -> None:
        os.write(self._descriptor, self.format.encode(record))

    def __del__(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class Electorate:
    """Whose votes count in an epoch: those of the hosts with ranks that take part in the one before.

    before: what was decided for that;  host_of: of each rank
    """

    before: Decision
    host_of: Sequence[int]

    @property
    def members(self) -> list[int]:
        return [rank for rank in range(len(self.host_of)) if not self.before.masked >> rank & 1]

    def counts(self, host: int, incarnation: int) -> bool:
        """Whether votes of this incarnation of a host count."""
        return self.before.incarnations[host] == incarnation

    def is_quorum(self, hosts: Collection[int]) -> bool:
        """Whether these hosts decide without the others."""
        members = self.members
        present = [rank for rank in members if self.host_of[rank] in hosts]
        return 2 * len(present) > len(members) or (2 * len(present) == len(members) and members[0] in present)


class Proposer:
    """One rank's way to the decision of an epoch. It sends what `begin` and `hear` give back to all hosts.

    decided: the decision, once it is known
    """

    def __init__(self, epoch: int, wanted: Decision, electorate: Electorate, mark: int):
        """wanted: proposed where nothing else may have been decided

        mark: below 1 << 44, of this proposer alone: no other one ever proposes in this epoch with the same
        """
        self.decided: Decision | None = None
        self._epoch, self._wanted, self._electorate, self._mark = epoch, wanted, electorate, mark
        self._ballot = 0
        self._highest = 0
        self._asked = Kind.PREPARE
        self._answered: set[int] = set()
        self._accepted = 0

    def begin(self) -> Vote:
        """Returns the first request of another attempt, with a ballot above all that were heard of."""
        self._ballot = ((self._highest >> _MARK_BITS) + 1) << _MARK_BITS | self._mark
        self._highest = self._ballot
        self._asked, self._accepted = Kind.PREPARE, 0
        self._answered.clear()
        return Vote(Kind.PREPARE, self._epoch, self._ballot, self._wanted)

    def hear(self, host: int, incarnation: int, answer: Vote) -> Vote | None:
        """Takes in the answer of a host; returns the next request, if this answer was what it waited for."""
        if answer.epoch != self._epoch or self.decided is not None:
            return None
        if answer.kind is Kind.DECIDED:
            self.decided = answer.decision
        if answer.kind is Kind.REFUSED:
            self._highest = max(self._highest, answer.ballot)
        awaited = Kind.PROMISED if self._asked is Kind.PREPARE else Kind.ACCEPTED
        if (answer.kind, answer.ballot) != (awaited, self._ballot) or not self._electorate.counts(host, incarnation):
            return None
        self._answered.add(host)
        if awaited is Kind.PROMISED and answer.accepted > self._accepted:
            self._accepted, self._wanted = answer.accepted, answer.decision
        if not self._electorate.is_quorum(self._answered):
            return None
        if awaited is Kind.ACCEPTED:
            self.decided = self._wanted
            return Vote(Kind.DECIDED, self._epoch, 0, self._wanted)
        self._asked = Kind.ACCEPT
        self._answered.clear()
        return Vote(Kind.ACCEPT, self._epoch, self._ballot, self._wanted)


_MARK_BITS = 44
