"""A rank that ends is reported by the collective transport as a lost peer, not in the words of a library."""

import os

import pytest
import torch
import torch.distributed as dist

from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.peer_calls import reason_of
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.engine.step.plan import RankState
from moe_serve.errors import PeerError
from tests.dispatch.shm.faults import run_forked


def lose_a_peer(rank: int, store: str) -> str:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group = EpGroup(rank, 2, torch.device("cpu"), dist.group.WORLD)
    transport = make_all_to_all(group, TransportRequest("collective", BufferLimits(8, 16, 2, 2), torch.float32))
    transport.exchange_counts(torch.tensor([rank])).wait()
    if rank == 1:
        os._exit(0)

    def steps() -> None:
        for _ in range(3):
            transport.dispatch(torch.ones(4, 16), torch.tensor([[0, 3]] * 4)).wait()

    with pytest.raises(PeerError, match=r"a rank went away in .*; look at the last lines of the other ranks") as caught:
        steps()
    return caught.value.phase


def test_a_rank_that_ends_in_a_step_is_a_lost_peer(tmp_path) -> None:
    answers = run_forked(2, lose_a_peer, str(tmp_path / "store"), dies=(1,))
    assert answers[0] in ("the round of sizes or counts", "dispatch")


def lose_a_peer_in_the_exchange(rank: int, store: str) -> str:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    exchange = make_exchange("gloo", dist.group.WORLD, False, 60.0)
    exchange.gather(RankState(0, 0), 0)
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerError) as caught:
        exchange.gather(RankState(0, 1), 1)
    return str(caught.value)


def test_an_exchange_without_a_peer_ends_in_our_words(tmp_path) -> None:
    answers = run_forked(2, lose_a_peer_in_the_exchange, str(tmp_path / "store"), dies=(1,))
    assert answers[0] == (
        "a rank did not arrive at the exchange of step 1 within 60 s, or died (its connection was closed); "
        "look at the other ranks' last lines"
    )


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "[/a/b.cc:5] Connection closed by peer [127.0.0.1]:5. GLHF! \U0001f3d6\ufe0f",
            "its connection was closed",
        ),
        ("[/a/pair.cc:534] Read error [127.0.0.1]:5: Connection reset by peer", "its connection was closed"),
        ("Operation timed out!", "nothing was heard of it in time"),
        ("[/a/buffer.cc:92] Timed out waiting 300ms for recv operation to complete", "nothing was heard of it in time"),
        ("Application timeout caused pair closure", "nothing was heard of it in time"),
        ("invalid device \U0001f525 ordinal. See the manual\nframe #0", "invalid device ordinal"),
        ("", "RuntimeError"),
    ],
)
def test_a_library_s_words_for_a_lost_peer_are_ours(said: str, reason: str) -> None:
    assert reason_of(RuntimeError(said)) == reason
