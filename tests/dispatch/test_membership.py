"""Whatever ranks suspect, and however slow they are: one group goes on, and all in it know the same of it.

A long step shows signs of life, a stopped process does not; the listener counts no time in which it stood.
"""

import gc
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from moe_serve.dispatch.membership import BEAT_S, Heartbeat, Membership
from moe_serve.dispatch.shm.memory import Mappings
from moe_serve.dispatch.shm.region import OWNER_WORDS
from moe_serve.errors import PeerError
from tests.dispatch.shm import faults
from tests.dispatch.shm.regions import empty_log

ROUNDS = 60


def suspect_at_random(rank: int, mappings: Mappings, seed: int) -> list[tuple[int, list[int]]]:
    """Regroups again and again with suspicions of its own; returns (epoch, members) of every group it was in."""
    draw = random.Random(seed * 100 + rank)
    transport = faults.make_transport(rank, mappings, deadline_s=0.01)
    membership = transport.membership
    groups = []
    for _ in range(ROUNDS):
        time.sleep(draw.choice([0, 0, 0.001, 0.03]))  # the last is later than two deadlines
        suspects = {other for other in membership.members if other != rank and draw.random() < 0.2}
        try:
            groups.append((membership.epoch + 1, membership.regroup(suspects)))
        except PeerError:
            return groups
        assert membership.members == groups[-1][1]
    return groups


@pytest.mark.parametrize("seed", range(3))
def test_no_two_groups_share_an_epoch(seed: int) -> None:
    found = faults.run_forked(4, suspect_at_random, faults.regions(4), seed)
    groups: dict[int, list[int]] = {}
    for rank, mine in found.items():
        for epoch, members in mine:
            assert rank in members
            assert groups.setdefault(epoch, members) == members, f"epoch {epoch} has two groups"
    lengths = [len(groups[epoch]) for epoch in sorted(groups)]
    assert lengths == sorted(lengths, reverse=True), "nobody comes back unasked"


def test_a_rank_that_waits_to_rejoin_says_whom_it_does_not_hear_or_that_it_was_not_taken_in() -> None:
    pages = [np.zeros(OWNER_WORDS, dtype=np.int64) for _ in range(3)]
    membership = Membership(2, pages, empty_log(), None, deadline_s=1.0)
    beats = [Heartbeat(rank, pages) for rank in range(2)]
    for _ in range(round(2 / BEAT_S)):
        beats[0].beat()
        membership._heartbeat.beat()
        if not pages[1][8]:
            beats[1].beat()
    assert membership.describe_rejoin() == "it does not hear rank 1"
    beats[1].beat()
    assert membership.describe_rejoin().startswith("it hears ranks 0, 1, which were not shown its wish")
    membership.ask_to_rejoin()
    assert membership.describe_rejoin().startswith("it hears ranks 0, 1, which see its wish")


def give_each_other_up(rank: int, mappings: Mappings) -> str:
    membership = faults.make_transport(rank, mappings, deadline_s=0.2).membership
    while time.monotonic() % 0.1 > 0.001:  # both at one moment
        pass
    try:
        return str(membership.regroup({1 - rank}))
    except PeerError as error:
        return str(error)


def test_two_that_give_each_other_up_do_not_both_go_on() -> None:
    for _ in range(2):
        answers = faults.run_forked(2, give_each_other_up, faults.regions(2))
        assert sum("came too late and was masked" in answer for answer in answers.values()) == 1
        assert sum(answer == f"[{rank}]" for rank, answer in answers.items()) == 1


def come_late_to_two_epochs(rank: int, mappings: Mappings) -> list[int]:
    """Ranks 0 and 1 go through an epoch that rank 2 has not left yet, and lose rank 3 in it."""
    membership = faults.make_transport(rank, mappings, deadline_s=20).membership
    if rank == 3:
        os._exit(0)
    if rank == 2:
        membership._propose(1, 0b1000)  # as one that is about to leave `regroup` and loses its core there
        while membership._proposal(0)[0] < 2:
            time.sleep(0.001)
        assert membership.regroup() == [0, 1, 2]
        assert membership.is_void
        return membership.regroup()
    assert membership.regroup({3}) == [0, 1, 2]
    return membership.regroup()


def test_a_rank_that_leaves_an_epoch_late_finds_the_next_one() -> None:
    found = faults.run_forked(4, come_late_to_two_epochs, faults.regions(4), dies=(3,))
    assert list(found.values()) == [[0, 1, 2]] * 3


def two() -> tuple[Heartbeat, Heartbeat]:
    pages = [np.zeros(OWNER_WORDS, dtype=np.int64) for _ in range(2)]
    return Heartbeat(0, pages), Heartbeat(1, pages)


def test_silence_is_counted_in_beats_of_the_listener_from_the_first_sign_on() -> None:
    listener, other = two()
    for _ in range(5):
        listener.beat()
    assert listener.silent_s(1) == 0, "not started yet"
    other.beat()
    listener.beat()
    for _ in range(7):
        listener.beat()
    assert listener.silent_s(1) == 7 * BEAT_S
    assert listener.silent_s(0) == 0
    other.beat()
    listener.beat()
    assert listener.silent_s(1) == 0


def test_the_thread_ends_with_its_owner() -> None:
    listener, other = two()
    before = threading.active_count()
    listener.start()
    listener.start()
    assert threading.active_count() == before + 1
    del listener
    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    other.beat()


def stop_or_take_long(rank: int, mappings: Mappings, stops: bool) -> tuple[str, list[int]]:
    """Rank 1 stops for longer than the others wait for a sign of life, or only computes for as long."""
    transport = faults.make_transport(rank, mappings, deadline_s=60)
    membership = transport.membership
    membership.begin_heartbeat()
    membership.suspect_after_s = 1.0
    faults.run_step(transport, rank, 0, [0, 1, 2])
    time.sleep(3 * BEAT_S)  # all have given a sign
    if rank == 1 and stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            pass
    try:
        faults.run_step(transport, rank, 1, [0, 1, 2])
    except PeerError as error:
        members = membership.regroup()
        if rank == 0:
            os.kill(int(transport._memory._heads[1][0]), signal.SIGKILL)
        return f"{error.rank} {error}", members
    return "", membership.members


def test_a_stopped_rank_is_suspected_long_before_the_deadline() -> None:
    found = faults.run_forked(3, stop_or_take_long, faults.regions(3), True, dies=(1,))
    for rank in (0, 2):
        message, members = found[rank]
        assert members == [0, 2]
        assert message.startswith("1 rank 1 gave no sign of life for 1 s") or "it misses rank 1" in message


def test_a_long_step_is_waited_for() -> None:
    found = faults.run_forked(3, stop_or_take_long, faults.regions(3), False)
    assert list(found.values()) == [("", [0, 1, 2])] * 3
