"""Both exchanges keep one contract: the rows of all ranks, in rank order, however fast or slow a rank is."""

import os
import signal
import time

import numpy as np
import pytest
import torch.distributed as dist

from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.step.exchange import GlooExchange, ShmExchange, make_exchange
from moe_serve.engine.step.plan import RankState
from moe_serve.errors import PeerError
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
