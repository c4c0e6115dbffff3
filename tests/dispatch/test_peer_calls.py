"""Calls of torch.distributed that carry bytes."""

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import gather_bytes
from tests.ranks import run_ranks


def check_bytes(rank: int, group: EpGroup) -> None:
    assert gather_bytes(b"%d\0\xff" % rank * rank + b"\0", group.process_group) == [b"", b"1\0\xff", b"2\0\xff" * 2]


def test_every_rank_gets_the_bytes_of_every_rank_without_zeros_at_the_end() -> None:
    run_ranks(3, check_bytes)
