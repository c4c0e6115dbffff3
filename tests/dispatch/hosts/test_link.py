"""The connections between hosts: what crosses them, who may make them, and what is said when one ends."""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.hosts.handshake import _HELLO, _MAGIC, ROWS
from moe_serve.dispatch.hosts.link import HostLink, Hosts
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.engine.step.plan import RankState
from moe_serve.errors import PeerError
from tests.dispatch.hosts.pretended import on_hosts
from tests.ranks import run_ranks

KEY = b"key of the launch"
HIDDEN = 4096  # of rows, float32


def test_ranks_of_hosts_of_unequal_size_meet_the_ranks_of_their_number_counted_round() -> None:
    hosts = Hosts.of(["a", "b", "a", "a"])
    assert hosts.of_rank == (0, 1, 0, 0)
    assert [hosts.entry(rank, 1, range(4)) for rank in (0, 2, 3)] == [1, 1, 1]
    assert hosts.entry(1, 0, range(4)) == 0


def test_what_goes_to_a_host_goes_to_one_of_its_ranks_that_take_part() -> None:
    hosts = Hosts.of([0, 0, 0, 1, 1, 1])
    assert [hosts.entry(rank, 1, range(6)) for rank in range(3)] == [3, 4, 5]
    assert [hosts.entry(rank, 1, {0, 1, 2, 3, 5}) for rank in range(3)] == [3, 5, 3]
    assert [hosts.entry(rank, 1, {0, 2, 3, 4, 5}) for rank in (0, 2)] == [3, 4]
    assert hosts.entry(0, 1, {0, 1, 2}) is None


def two_links(
    keys: Sequence[bytes] = (KEY, KEY), deadline_s: float = 5.0, before: Sequence[bytes] = ()
) -> tuple[list[HostLink], list[BaseException | None]]:
    """Returns the links of two ranks on two pretended hosts, and what each raised. before: sent by others first"""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in keys]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    unauthenticated = [socket.create_connection(address) for address in addresses for _ in before]
    for peer, data in zip(unauthenticated, [*before, *before], strict=True):
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
    links = [HostLink(rank, Hosts.of([0, 1]), keys[rank], listeners[rank], 10.0) for rank in range(2)]
    errors = join(links, addresses, deadline_s)
    for peer in unauthenticated:
        peer.close()
    return links, errors


def join(
    links: Sequence[HostLink], addresses: Sequence[tuple[str, int]], deadline_s: float = 5.0
) -> list[BaseException | None]:
    """Connects links with each other, and returns what each raised. addresses: where the others reach each rank"""
    errors: list[BaseException | None] = [None] * len(links)

    def connect(number: int) -> None:
        try:
            links[number].connect(dict(enumerate(addresses)), deadline_s)
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=connect, args=(number,)) for number in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def until(done: object) -> None:
    assert callable(done)
    deadline_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline_s, "nothing came within 60 s"
        time.sleep(0.001)


def test_bytes_written_on_one_host_lie_in_the_region_of_another_before_their_flag() -> None:
    links, errors = two_links()
    assert errors == [None, None]
    regions = [[torch.zeros(1 << 21, dtype=torch.uint8) for _ in range(2)] for _ in links]
    spaces = [link.share(mine) for link, mine in zip(links, regions, strict=True)]
    flag = regions[1][1][:8].view(torch.int64)
    for size in (0, 1, 100, 70_000, (1 << 21) - 64):
        data = torch.randint(0, 255, (max(size, 1),), dtype=torch.uint8)
        spaces[0].write(1, 0b10, 64, data.data_ptr(), size, 0, size + 7)
        until(lambda size=size: int(flag) == size + 7)  # no poll: the thread of the other rank takes it in
        assert torch.equal(regions[1][1][64 : 64 + size], data[:size])
    assert not regions[1][0].any(), "a region that was not named"
    assert not regions[0][1].any(), "memory of the sender"


def test_a_peer_without_the_key_joins_nobody_and_the_message_says_so() -> None:
    links, errors = two_links((KEY, b"another key"), deadline_s=1.0)
    for rank, error in enumerate(errors):
        assert isinstance(error, PeerError)
        assert str(error).startswith(f"rank {rank} on host {rank} has no connection with rank {1 - rank} on host")
    assert "another launch" in str(errors[1])
    assert "without the key of this launch" in str(errors[0])
    del links


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(_HELLO.size),
        _HELLO.pack(_MAGIC, 1, 0, 1, 0, 0, b"", 1, b"") + bytes(40),
    ],
    ids=["closed", "http", "zeros", "guessed proof"],
)
def test_unauthenticated_peers_do_not_keep_ranks_from_joining(data: bytes) -> None:
    links, errors = two_links(before=[data] * 3, deadline_s=20.0)
    assert errors == [None, None]
    del links


def test_a_rank_that_does_not_come_is_named_with_its_address_at_the_deadline() -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    address = gone.getsockname()[:2]
    gone.close()
    link = HostLink(1, Hosts.of([0, 1]), KEY, socket.create_server(("127.0.0.1", 0)), 10.0)
    with pytest.raises(PeerError, match=rf"rank 1 .* rank 0 on host 0 .*{address[1]}: Connection refused.*; open"):
        link.connect({0: address}, 0.5)
    link = HostLink(0, Hosts.of([0, 1]), KEY, socket.create_server(("127.0.0.1", 0)), 10.0)
    with pytest.raises(PeerError, match=r"rank 0 .* rank 1 on host 1 .*has not connected to 127.0.0.1 port"):
        link.connect({1: address}, 0.2)


@pytest.mark.parametrize("change", ["magic", "kind", "space", "rank", "offset", "length", "flag"])
def test_a_frame_that_would_write_elsewhere_ends_the_connection(change: str) -> None:
    links, _ = two_links()
    region = torch.zeros(4096, dtype=torch.uint8)
    for link in links:
        link.share([region.clone(), region])
    frame = {"magic": 0x6C6E6B32, "kind": 1, "space": 0, "mask": 2, "offset": 0, "length": 8, "rows": 0, "flag_at": 8}
    wrong = {
        "magic": {"magic": 1}, "kind": {"kind": 9}, "space": {"space": 70}, "rank": {"mask": 4},
        "offset": {"offset": -8}, "length": {"length": 5000}, "flag": {"flag_at": 4092},
    }  # fmt: skip
    with links[0]._connections.dial(1, ROWS, 5.0) as connected:
        connected.sendall(struct.pack("<IHHQqqqqq", *(frame | wrong[change]).values(), 1) + bytes(8))
        until(lambda: connected.recv(1) == b"")
    assert not region.any()
    until(lambda: not links[1].down())


def request(num_tokens: int) -> TransportRequest:
    return TransportRequest("low_latency", BufferLimits(num_tokens, HIDDEN, 8, 4), torch.float32, deadline_s=20)


def sent_bytes(rank: int, group: EpGroup) -> tuple[int, int]:
    """Returns the bytes that a dispatch of 64 tokens to all experts has sent to the other host, and in all."""
    linked = on_hosts(group, [0, 0, 1, 1])
    transport = make_all_to_all(linked, request(64))
    link = linked.link
    assert link is not None
    hidden = torch.randn(64, HIDDEN)
    ids = torch.arange(16).repeat(64, 1)[:, ::2].contiguous()  # two slots of each rank
    before = link.sent_bytes
    arrived = transport.dispatch(hidden, ids).wait()
    after = link.sent_bytes
    assert arrived.rows.x.shape[0] == 4 * 64 * 2
    transport.combine(arrived.rows.x, torch.ones(ids.shape), arrived.handle).wait()
    return after - before, link.sent_bytes - after


def test_a_row_crosses_once_for_each_host_however_many_ranks_want_it() -> None:
    row_bytes = 64 * HIDDEN * 4
    for dispatched, combined in run_ranks(4, sent_bytes):
        assert row_bytes <= dispatched <= 1.03 * row_bytes
        results = 2 * 2 * 2 * 64 * HIDDEN * 4 // 2  # of two slots here, for 64 tokens of each rank there
        assert results <= combined <= 1.03 * results


def gathered(rank: int, group: EpGroup) -> list[list[tuple[int, int]]]:
    linked = on_hosts(group, [0, 1, 0])
    assert linked.process_group is not None
    exchange = make_exchange("auto", linked.process_group, False, 20.0, link=linked.link)
    assert type(exchange).__name__ == "ShmExchange"
    steps = [exchange.gather(RankState(rank, 10 * rank + step), step) for step in range(30)]
    dist.barrier(linked.process_group)
    return [[(state[0], state[1]) for state in states] for states in steps]


def test_ranks_of_several_hosts_exchange_their_states_step_after_step() -> None:
    expected = [[(rank, 10 * rank + step) for rank in range(3)] for step in range(30)]
    assert run_ranks(3, gathered) == [expected] * 3


def error_of_a_lost_rank(rank: int, group: EpGroup) -> str:
    linked = on_hosts(group, [0, 1])
    transport = make_all_to_all(linked, request(4))
    assert linked.link is not None
    if rank == 1:
        linked.link.close()  # as the kernel does when its process dies
        time.sleep(1.0)
        return ""
    try:
        transport.exchange_counts(torch.ones(1, dtype=torch.int64)).wait()
    except PeerError as error:
        return str(error)
    return "no error"


def test_a_lost_connection_is_reported_at_once_with_the_rank_and_the_call() -> None:
    assert "the connection with rank 1 on host 1 ended before counts" in run_ranks(2, error_of_a_lost_rank)[0]


def bits_of_results(rank: int, group: EpGroup, hosts: Sequence[int]) -> Tensor:
    transport = make_all_to_all(on_hosts(group, hosts), replace(request(64), wire_dtype="float32"))
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(50 - 7 * rank, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(16, generator=generator)[:8] for _ in range(hidden.shape[0])])
    weights = torch.rand(ids.shape, generator=generator)
    for _ in range(5):
        arrived = transport.dispatch(hidden, ids).wait()
        combined = transport.combine(arrived.rows.x * 1.25, weights, arrived.handle).wait()
    return combined


def test_results_have_the_same_bits_on_one_two_three_and_four_hosts() -> None:
    one, *others = [
        run_ranks(4, bits_of_results, hosts) for hosts in ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2, 3))
    ]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def results_of_rows_that_change(rank: int, group: EpGroup) -> bool:
    transport = make_all_to_all(on_hosts(group, [0, 1]), replace(request(512), wire_dtype="bf16"))
    ids = torch.arange(8).repeat(512, 1)
    for step in range(5):
        hidden = torch.full((512, HIDDEN), float(rank + 2 * step))
        arrived = transport.dispatch(hidden, ids).wait()
        hidden.fill_(-1.0)  # the caller may, once its own rows have come
        x = arrived.rows.x.clone()
        transport.combine(x, torch.ones(ids.shape), arrived.handle).wait()
        expected = torch.tensor([2.0 * step, 2.0 * step + 1]).repeat_interleave(512).repeat(4)
        if not torch.equal(x, expected[:, None].expand_as(x)):
            return False
    return True


def test_rows_may_change_once_a_dispatch_was_waited_for() -> None:
    assert run_ranks(2, results_of_rows_that_change) == [True, True]
