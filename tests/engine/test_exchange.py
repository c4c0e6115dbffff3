"""Both exchanges keep one contract: the rows of all ranks, in rank order, however fast or slow a rank is."""

import mmap
import os
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.step.exchange import GlooExchange, ShmExchange, make_exchange, page_bytes
from moe_serve.engine.step.plan import RankState
from moe_serve.errors import PeerError
from tests.dispatch.shm import faults
from tests.ranks import RankFailure, run_ranks

KINDS = ["gloo", "shm"]


def state_of(rank: int, step: int) -> RankState:
    return RankState(launch_id=1, step=step, decode_tokens=100 * rank + step, has_work=rank % 2)


def gather_many(rank: int, group: EpGroup, kind: str, num_steps: int) -> bool:
    exchange = make_exchange(kind, group.process_group, True, 20.0)
    pauses = np.random.default_rng(rank).random(num_steps)
    for step in range(num_steps):
        if pauses[step] < 0.02:
            time.sleep(0.003)
        states = exchange.gather(state_of(rank, step), step)
        assert list(states) == [state_of(peer, step) for peer in range(group.num_ranks)]
    exchange.close()
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_sees_all_rows_of_the_same_step(kind: str, num_ranks: int) -> None:
    assert all(run_ranks(num_ranks, gather_many, kind, 200))


def wait_for_a_missing_rank(rank: int, group: EpGroup, kind: str) -> str:
    own = dist.new_group(backend="gloo")  # a collective that timed out leaves its group unusable
    exchange = make_exchange(kind, own, True, 0.3)
    if rank == 1:
        dist.barrier(group=group.process_group)  # stays away from the exchange until the other one has given it up
        return "late"
    with pytest.raises(PeerError) as caught:
        exchange.gather(RankState(0, 5), 5)
    dist.barrier(group=group.process_group)
    assert caught.value.phase == "exchange"
    assert caught.value.step == 5
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_ends_the_wait_by_the_deadline(kind: str) -> None:
    message = run_ranks(2, wait_for_a_missing_rank, kind)[0]
    assert "did not arrive at the exchange of step 5" in message
    assert kind == "gloo" or message.startswith("rank 1")


AN_HOUR_S = 3600.0  # a deadline that no test waits for


def die_in_the_exchange(rank: int, group: EpGroup) -> str:
    exchange = make_exchange("shm", group.process_group, True, AN_HOUR_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError, match="rank 1 died") as caught:
        exchange.gather(RankState(0, 0), 0)
    assert caught.value.rank == 1
    raise AssertionError("named the dead rank")


def test_a_dead_rank_is_named_before_the_deadline() -> None:
    with pytest.raises(RankFailure, match="named the dead rank"):
        run_ranks(2, die_in_the_exchange)


def choose(rank: int, group: EpGroup) -> tuple[str, str]:
    one = make_exchange("auto", group.process_group, True, 1.0)
    many = make_exchange("auto", group.process_group, False, 1.0)
    return type(one).__name__, type(many).__name__


def test_auto_uses_shared_memory_on_one_host_only() -> None:
    assert run_ranks(2, choose)[0] == (ShmExchange.__name__, GlooExchange.__name__)


def test_rows_that_a_rank_reads_after_it_was_masked_are_not_used() -> None:
    """Rank 1 is stopped before it reads. Rank 0 goes on without it, and writes its next row where that one reads."""
    mappings, page = faults.regions(2), mmap.mmap(-1, page_bytes(2))
    groups = [faults.make_transport(rank, mappings, deadline_s=5).membership for rank in range(2)]
    ends = [ShmExchange(page, rank, 2, 5.0) for rank in range(2)]
    for end, group in zip(ends, groups, strict=True):
        end.follow(group)

    def go_on() -> None:
        ends[0].gather(state_of(0, 1), 1)
        groups[0].regroup({1})
        assert ends[0].gather(state_of(0, 2), 2)[0] == state_of(0, 2)

    def wait_and_stop(*arguments: object) -> None:
        wait(*arguments)
        other.join()

    wait, other = ends[1]._wait, threading.Thread(target=go_on)
    other.start()
    with mock.patch.object(ends[1], "_wait", wait_and_stop), pytest.raises(PeerError, match="came too late"):
        ends[1].gather(state_of(1, 1), 1)
