"""Signs of life: a long step shows them, a stopped process does not; the listener counts no time in which it stood."""

import gc
import os
import signal
import threading
import time

import numpy as np

from moe_serve.dispatch.shm.heartbeat import BEAT_S, Heartbeat
from moe_serve.dispatch.shm.memory import Mappings
from moe_serve.dispatch.shm.region import OWNER_WORDS
from moe_serve.errors import PeerError
from tests.dispatch.shm import faults


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
            os.kill(int(transport._memory._pids[1][0]), signal.SIGKILL)
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
