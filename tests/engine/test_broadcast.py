"""One rank tells all ranks something inside a step."""

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, EpGroup, Pending, TransportRequest
from moe_serve.dispatch.base import Ready as Arrived
from moe_serve.dispatch.local import LocalAllToAll
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.engine.step.broadcast import broadcast
from moe_serve.errors import PeerError
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SIZES = (0, 1, 7, 8, 9, 4096 * 8, 4096 * 8 + 1, 100_000)


def speak(rank: int, group: EpGroup, backend: str) -> list[bytes]:
    limits = BufferLimits(max_tokens_per_rank=4, hidden=8, topk=2, slots_per_rank=2)
    all_to_all = make_all_to_all(group, TransportRequest(backend, limits, torch.float32))
    heard = []
    for number, size in enumerate(SIZES):
        source = number % group.num_ranks
        data = bytes(index * 31 % 251 for index in range(size)) if rank == source else None
        heard.append(broadcast(all_to_all, source, data, CPU))
    all_to_all.close()
    return heard


@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "auto"), (2, "low_latency"), (3, "collective")])
def test_all_ranks_hear_what_one_says(num_ranks: int, backend: str) -> None:
    said = [bytes(index * 31 % 251 for index in range(size)) for size in SIZES]
    assert run_ranks(num_ranks, speak, backend) == [said] * num_ranks


class Damaging(LocalAllToAll):
    """Changes a bit of everything but the length and the checksum."""

    def exchange_counts(self, counts: Tensor) -> Pending[Tensor]:
        arrived = super().exchange_counts(counts).wait()
        return Arrived(arrived if counts.shape[0] == 3 else arrived ^ 1)


def test_a_damaged_message_is_no_message() -> None:
    limits = BufferLimits(max_tokens_per_rank=4, hidden=8, topk=2, slots_per_rank=2)
    request = TransportRequest("local", limits, torch.float32)
    plain = make_all_to_all(EpGroup(0, 1, CPU), request)
    plain.__class__ = Damaging
    with pytest.raises(PeerError, match="a message of rank 0 arrived damaged"):
        broadcast(plain, 0, bytes(100), CPU)
