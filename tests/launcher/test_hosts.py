"""Hosts made of network namespaces: the tools of the tests of several hosts."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.launcher.hosts import Host, cut_one_way, make_hosts, mend, needs_hosts, set_rate

pytestmark = needs_hosts


def connected(a: Host, b: Host) -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a connection."""
    with b.network():
        listener = socket.create_server((b.address, 0))
    with listener, a.network():
        near = socket.create_connection(listener.getsockname(), timeout=5)
        far, _ = listener.accept()
    far.settimeout(0.3)
    return near, far


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with make_hosts(3, delay_s=0.02) as made:
        yield made


def test_a_packet_is_delayed_on_its_way_to_another_host(hosts: list[Host]) -> None:
    near, far = connected(hosts[0], hosts[2])
    with near, far:
        far.settimeout(5)
        began_s = time.monotonic()
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        assert time.monotonic() - began_s >= 0.02


@pytest.mark.parametrize(("direction", "arrives"), [("in", False), ("out", True)])
def test_a_one_way_cut_keeps_the_other_direction(hosts: list[Host], direction: str, arrives: bool) -> None:
    near, far = connected(hosts[0], hosts[1])
    with near, far:
        cut_one_way(hosts[1], direction)
        near.sendall(b"x")
        if arrives:
            assert far.recv(1) == b"x"
        else:
            with pytest.raises(TimeoutError):
                far.recv(1)
        mend(hosts[1])
        far.settimeout(5)
        near.sendall(b"y")
        assert far.recv(1) == (b"y" if arrives else b"x"), "sent again by TCP"


def test_a_rate_holds_for_what_a_host_receives(hosts: list[Host]) -> None:
    near, far = connected(hosts[1], hosts[2])
    num_bytes = 1 << 20
    with near, far:
        far.settimeout(10)
        set_rate(hosts[2], "20mbit")
        sender = threading.Thread(target=near.sendall, args=(bytes(num_bytes),))
        began_s, left = time.monotonic(), num_bytes
        sender.start()
        while left:
            left -= len(far.recv(1 << 16))
        sender.join()
        mend(hosts[2])
    assert 0.5 * num_bytes * 8 / 20e6 < time.monotonic() - began_s
