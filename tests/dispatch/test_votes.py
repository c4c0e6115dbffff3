"""Hosts that vote: one decision for each epoch under every schedule of faults, and one where a quorum is reached."""

import itertools
import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dispatch.votes import Acceptor, Decision, Electorate, Kind, Log, Proposer, Vote, VoteFormat
from tests.dispatch.shm import faults
from tests.dispatch.shm.regions import empty_log

EPOCH = 3


@dataclass(eq=False)
class Host:
    """A host in the simulation. Its log is a list; each process reads all of it."""

    incarnation: int = 0
    log: list[Vote] = field(default_factory=list)

    def append(self, record: Vote) -> None:
        self.log.append(record)

    def fold(self) -> Acceptor:
        acceptor = Acceptor(self.incarnation)
        for record in self.log:
            acceptor.read(record)
        return acceptor


@dataclass
class World:
    """Hosts, proposers, and all messages that were ever sent: each may come never, late, and more than once."""

    electorate: Electorate
    hosts: list[Host]
    proposers: list[Proposer] = field(default_factory=list)
    requests: list[tuple[int, Vote]] = field(default_factory=list)  # from a proposer
    answers: list[tuple[int, int, int, Vote]] = field(default_factory=list)  # to a proposer, from an incarnation
    decided: set[Decision] = field(default_factory=set)

    def propose(self, masked: int) -> None:
        wanted = Decision(masked, self.electorate.before.incarnations)
        number = len(self.proposers)
        self.proposers.append(Proposer(EPOCH, wanted, self.electorate, mark=number))
        self.requests.append((number, self.proposers[number].begin()))

    def arrive(self, at: int, host: int, answers: bool) -> None:
        """A request arrives. answers: the process that appends it lives long enough to answer"""
        number, request = self.requests[at]
        there = self.hosts[host]
        there.append(request)
        if answers:
            self.answers.append((number, host, there.incarnation, there.fold().answer(request)))

    def return_answer(self, at: int) -> None:
        number, host, incarnation, answer = self.answers[at]
        proposer = self.proposers[number]
        following = proposer.hear(host, incarnation, answer)
        if following is not None:
            self.requests.append((number, following))
        if proposer.decided is not None:
            self.decided.add(proposer.decided)

    def act(self, action: str, which: int, host: int) -> None:
        host %= len(self.hosts)
        number = which % max(1, len(self.proposers))
        newest = [at for at, (whose, _) in enumerate(self.requests) if whose == number]
        match action:
            case "propose" if len(self.proposers) < 4:
                self.propose(len(self.proposers))
            case "try again" if newest:
                self.requests.append((number, self.proposers[number].begin()))
            case "host is lost":  # it comes back without its log
                self.hosts[host] = Host(self.hosts[host].incarnation + 1)
            case "no answer" if newest:
                self.arrive(newest[-1], host, answers=False)
            case "late answer" if newest:
                self.arrive(newest[-1], host, answers=True)
            case "ask" if newest:
                self.arrive(newest[-1], host, answers=True)
                self.return_answer(-1)
            case "old request" if newest:
                self.arrive(which % len(self.requests), host, answers=True)
                self.return_answer(-1)
            case "old answer" if self.answers:
                self.return_answer(which % len(self.answers))
        for each in self.hosts:
            if (decision := each.fold().decided(EPOCH)) is not None:
                self.decided.add(decision)


def world_of(ranks_of: list[int], masked: int) -> World:
    host_of = [host for host, ranks in enumerate(ranks_of) for _ in range(ranks)]
    masked &= (1 << len(host_of)) - 2  # rank 0 at least takes part
    before = Decision(masked, (0,) * len(ranks_of))
    return World(Electorate(before, host_of), [Host() for _ in ranks_of])


hosts_with_ranks = st.lists(st.integers(1, 3), min_size=1, max_size=4)
MANY = ["propose", "try again", "host is lost", "no answer", "late answer", "old request", "old answer", *["ask"] * 10]
actions = st.lists(st.tuples(st.sampled_from(MANY), st.integers(0, 11), st.integers(0, 11)), min_size=15, max_size=60)


@settings(max_examples=400, deadline=None)
@given(hosts_with_ranks, st.integers(0, 255), actions)
def test_no_epoch_has_two_decisions(ranks_of: list[int], masked: int, schedule: list[tuple[str, int, int]]) -> None:
    world = world_of(ranks_of, masked)
    for action in schedule:
        world.act(*action)
        assert len(world.decided) < 2


@settings(max_examples=150, deadline=None)
@given(hosts_with_ranks, st.integers(0, 255), actions)
def test_whoever_reaches_a_quorum_decides_and_finds_what_was_decided(
    ranks_of: list[int], masked: int, schedule: list[tuple[str, int, int]]
) -> None:
    world = world_of(ranks_of, masked)
    for action in schedule:
        world.act(*action)
    reached = [host for host, each in enumerate(world.hosts) if each.incarnation == 0]
    proposer = Proposer(EPOCH, Decision(5, world.electorate.before.incarnations), world.electorate, mark=99)
    for _ in range(2):  # the first attempt may only learn how high ballots are
        requests = [proposer.begin()]
        for request in requests:
            for there in (world.hosts[host] for host in reached):
                there.append(request)
                answer = there.fold().answer(request)
                following = proposer.hear(world.hosts.index(there), there.incarnation, answer)
                requests += [] if following is None else [following]
    if world.electorate.is_quorum(reached):
        assert proposer.decided is not None
    assert proposer.decided is None or world.decided <= {proposer.decided}


@pytest.mark.parametrize("ranks_of", [[2, 2], [1, 1, 1], [3, 1], [1, 2, 1], [2, 1, 1, 2]], ids=str)
def test_of_the_parts_of_a_broken_network_the_one_with_most_ranks_decides_or_that_of_the_lowest(
    ranks_of: list[int],
) -> None:
    host_of = [host for host, ranks in enumerate(ranks_of) for _ in range(ranks)]
    for masked in range(0, 1 << len(host_of), 2):
        electorate = Electorate(Decision(masked, (0,) * len(ranks_of)), host_of)
        members = electorate.members
        for cut in itertools.product((0, 1), repeat=len(ranks_of)):
            parts = [{host for host, side in enumerate(cut) if side == each} for each in (0, 1)]
            sizes = [sum(host_of[rank] in part for rank in members) for part in parts]
            best = (0 if host_of[members[0]] in parts[0] else 1) if sizes[0] == sizes[1] else sizes.index(max(sizes))
            assert [electorate.is_quorum(part) for part in parts] == [best == 0, best == 1]


def test_votes_are_the_same_after_a_way_as_bytes() -> None:
    votes = VoteFormat(2)
    sent = [Vote(kind, 7, 1 << 61, Decision(1 << 61, (-1, 1 << 62)), 5) for kind in Kind]
    data = b"".join(map(votes.encode, sent))
    assert list(votes.decode(data + b"part of one")) == sent
    with pytest.raises(ValueError, match="99"):
        list(votes.decode((99).to_bytes(8, "little") + bytes(votes.num_bytes - 8)))


def test_processes_of_a_host_see_one_log() -> None:
    log = empty_log(num_hosts=2)
    again = Log(os.dup(log._descriptor), 2, incarnation=9)
    assert again.read().incarnation == 0, "the first record counts"
    wanted = Decision(2, (0, 0))
    assert log.answer(Vote(Kind.PREPARE, 1, 50, wanted)).kind is Kind.PROMISED
    refused = again.answer(Vote(Kind.PREPARE, 1, 40, wanted))
    assert (refused.kind, refused.ballot) == (Kind.REFUSED, 50)
    assert again.answer(Vote(Kind.ACCEPT, 1, 50, wanted)).kind is Kind.ACCEPTED
    promised = log.answer(Vote(Kind.PREPARE, 1, 60, Decision(1, (0, 0))))
    assert (promised.kind, promised.accepted, promised.decision) == (Kind.PROMISED, 50, wanted)
    assert log.decide(1, wanted) == again.decide(1, Decision(1, (0, 0))) == wanted
    assert log.answer(Vote(Kind.NEWEST, 0, 0, wanted)) == Vote(Kind.DECIDED, 1, 0, wanted)
    assert log.read().newest() == (1, wanted)


def decide_all(rank: int, log: Log, num_epochs: int) -> list[int]:
    return [log.decide(epoch, Decision(10 * epoch + rank, (0,))).masked for epoch in range(num_epochs)]


def test_all_processes_of_the_one_host_read_the_same_decisions() -> None:
    answers = faults.run_forked(4, decide_all, empty_log(), 500)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert all(answer // 10 == epoch for epoch, answer in enumerate(answers[0]))
