"""A rank that ends is reported by the collective transport as a lost peer, not in the words of a library."""

import os

import pytest
import torch
import torch.distributed as dist

from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.make import make_all_to_all
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
