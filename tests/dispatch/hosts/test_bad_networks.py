"""Networks that connect no hosts, or not well enough: one message on every host within the deadline of the start."""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from moe_serve.dispatch.hosts import connections, handshake
from moe_serve.dispatch.hosts.handshake import listen
from moe_serve.dispatch.hosts.link import HostLink, Hosts
from moe_serve.errors import PeerError
from tests.dispatch.hosts.relay import relay
from tests.dispatch.hosts.test_link import KEY, join, until
from tests.launcher.hosts import Host, cut_one_way, make_hosts, mend, needs_hosts, set_cable


@pytest.fixture
def fast_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, handshake):
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.3)


@pytest.mark.usefixtures("fast_handshakes")
def test_a_host_that_never_answers_is_told_from_one_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as fillers:
        for _ in range(2):  # further ones are dropped without a sign, as by a firewall
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        link = HostLink(1, Hosts.of([0, 1]), KEY, listen("127.0.0.1"), 10.0)
        port = full.getsockname()[1]
        with pytest.raises(PeerError, match=rf"no answer from 127.0.0.1 port {port} within 0.3 s: a firewall"):
            link.connect({0: full.getsockname()}, 0.8)
        link.close()


@pytest.mark.usefixtures("fast_handshakes")
def test_another_program_that_listens_there_is_told_from_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        link = HostLink(1, Hosts.of([0, 1]), KEY, listen("127.0.0.1"), 10.0)
        with pytest.raises(PeerError, match="takes connections and says nothing: another program"):
            link.connect({0: other.getsockname()}, 0.8)
        link.close()


@pytest.mark.usefixtures("fast_handshakes")
def test_a_path_that_loses_large_packets_is_found_at_the_start_by_both_ends() -> None:
    listeners = [listen("127.0.0.1") for _ in range(2)]
    with relay(listeners[0].getsockname()[:2]) as between:
        between.largest = 100
        links = [HostLink(rank, Hosts.of([0, 1]), KEY, listeners[rank], 10.0) for rank in range(2)]
        errors = join(links, [between.address, listeners[1].getsockname()[:2]], 2.0)
        for link in links:
            link.close()
    assert all("large ones do not: some MTU on the way is too small" in str(error) for error in errors), errors


@contextlib.contextmanager
def links_of(hosts: list[Host], quiet_s: float = 10.0) -> Iterator[list[HostLink]]:
    """Yields a link on each host, in this process; sockets are made in the network of the thread that connects."""
    links = []
    for rank, host in enumerate(hosts):
        with host.network():
            links.append(HostLink(rank, Hosts.of(range(len(hosts))), KEY, listen(host.address), quiet_s))
    try:
        yield links
    finally:
        for link in links:
            link.close()


def errors_of(hosts: list[Host], links: list[HostLink], deadline_s: float) -> list[str]:
    """Returns what each link says when all connect at once; "": nothing."""
    errors = [""] * len(links)
    addresses = {rank: link.addresses[rank] for rank, link in enumerate(links)}

    def connect(rank: int) -> None:
        with hosts[rank].network():
            try:
                links[rank].connect(addresses, deadline_s)
            except PeerError as error:
                errors[rank] = str(error)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.usefixtures("fast_handshakes")
@pytest.mark.slow
@needs_hosts
def test_a_firewall_that_drops_silently_is_named_on_both_hosts(direction: Literal["in", "out"]) -> None:
    with make_hosts(2) as hosts, links_of(hosts) as links:
        cut_one_way(hosts[0], direction)
        first, second = errors_of(hosts, links, 3.0)
    assert "rank 0 on host 0 has no connection with rank 1 on host 1 after 3 s" in first
    assert f"(it has not connected to {hosts[0].address}" in first
    assert f"(no answer from {hosts[0].address} port " in second
    assert "a firewall drops it, or no such host" in second


@pytest.mark.usefixtures("fast_handshakes")
@pytest.mark.slow
@needs_hosts
def test_an_mtu_on_the_way_that_is_too_small_is_named_on_both_hosts() -> None:
    with make_hosts(2) as hosts, links_of(hosts) as links:
        for host in hosts:  # a switch forwards packets that are not cut into pieces yet, whatever their size
            subprocess.run(["ip", "-n", host.name, "link", "set", "eth0", "gso_max_segs", "1"], check=True)
        subprocess.run(["ip", "-n", hosts[0].switch, "link", "set", hosts[1].name, "mtu", "1000"], check=True)
        errors = errors_of(hosts, links, 3.0)
    assert all("small packets pass and large ones do not" in error for error in errors), errors


@pytest.mark.slow
@needs_hosts
def test_a_cable_that_was_cut_for_seconds_and_mended_carries_a_new_connection_at_once() -> None:
    regions = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    with make_hosts(2) as hosts, links_of(hosts) as links:
        spaces = [link.share(regions) for link in links]
        assert errors_of(hosts, links, 10.0) == ["", ""]
        set_cable(hosts[0], "down")
        for number, space in enumerate(spaces):
            space.write(1 - number, 1 << (1 - number), 8, regions[number].data_ptr(), 0, 0, 7)
        time.sleep(7)  # the kernel sends again after 6.2 s and after 12.6 s
        assert [link.down() for link in links] == [{}, {}]
        set_cable(hosts[0], "up")
        until(lambda: all(link.generation(1 - rank) == 2 for rank, link in enumerate(links)))
        assert [list(link.broken()) for link in links] == [[1], [0]]
        assert [list(link.down()) for link in links] == [[], []]


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "sending"])
def test_a_cut_cable_ends_connections_at_both_ends_and_they_come_back(is_idle: bool) -> None:
    regions = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    with make_hosts(2) as hosts, links_of(hosts, quiet_s=3.0) as links:
        spaces = [link.share(regions) for link in links]
        assert errors_of(hosts, links, 10.0) == ["", ""]
        cut_one_way(hosts[0], "in")
        for number, space in enumerate([] if is_idle else spaces):
            space.write(1 - number, 1 << (1 - number), 8, regions[number].data_ptr(), 0, 0, 7)
        until(lambda: all(link.down() for link in links))
        assert "Connection timed out" in [why for link in links for why in link.down().values()]
        mend(hosts[0])
        until(lambda: not any(link.down() for link in links))


@pytest.mark.slow
@needs_hosts
def test_hosts_of_a_good_network_connect() -> None:
    with make_hosts(3) as hosts, links_of(hosts) as links:
        assert errors_of(hosts, links, 10.0) == ["", "", ""]
