"""Hosts on one machine: network namespaces, each with a cable to a switch and a /dev/shm of its own."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

from tests.launcher.running import Running, eventually

_NETWORK = "10.77.81"
_PORT = "eth0"  # of each host
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def _can_make_hosts() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ms{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made


needs_hosts = pytest.mark.skipif(not _can_make_hosts(), reason="needs root and ip netns")


@dataclass(frozen=True)
class Host:
    """name: of its namespace;  address: on the network;  switch: the namespace that its cable ends in"""

    name: str
    address: str
    switch: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns a command that runs there, with an own /dev/shm."""
        script = 'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", script, "sh", *words]

    def start(self, module: str, *arguments: str) -> Running:
        """Starts a Python module there."""
        return Running.of(self.command([sys.executable, "-m", module, *arguments]))

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Lets the calling thread make sockets there; a socket stays in the network in which it was made."""
        with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{self.name}") as there:
            _set_network(there.fileno())
            try:
                yield
            finally:
                _set_network(own.fileno())

    def ask(self, url: str, body: str = "", timeout_s: float = 60.0) -> tuple[int, str]:
        """Returns status and text of an HTTP call from there; 0 where nothing answers."""
        call = urllib.request.Request(url, body.encode() or None, {"content-type": "application/json"})
        try:
            with self.network(), urllib.request.urlopen(call, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def kill_all(self) -> None:
        """Kills all processes there, as a power cut does."""
        for pid in _words("netns", "pids", self.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        assert eventually(lambda: not _words("netns", "pids", self.name), 10)


@contextlib.contextmanager
def make_hosts(number: int, delay_s: float = 0.0) -> Iterator[list[Host]]:
    """Yields hosts, whose processes and network are gone afterwards. delay_s: of a packet from a host to another

    Packets are delayed by a process that lies in each cable (tests/launcher/cable.py), a half at either end.
    """
    name = f"ms{os.getpid()}"
    hosts = [Host(f"{name}{letter}", f"{_NETWORK}.{1 + i}", name) for i, letter in enumerate("abcdefgh"[:number])]
    with contextlib.ExitStack() as made:
        for each in [name, *(host.name for host in hosts)]:
            _ip("netns", "add", each)
            made.callback(_ip, "netns", "del", each)
        for host in hosts:
            made.callback(host.kill_all)
        _ip("-n", name, "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        _ip("-n", name, "link", "set", "switch", "up")
        for host in hosts:
            into_switch = host.name
            _ip("-n", name, "link", "add", host.name, "type", "veth", "peer", "name", _PORT, "netns", host.name)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", _PORT)
            if delay_s:
                into_switch = f"{host.name}s"
                _ip("-n", name, "link", "add", into_switch, "type", "veth", "peer", "name", f"{host.name}r")
                _ip("-n", name, "link", "set", f"{host.name}r", "up")
            _ip("-n", name, "link", "set", into_switch, "master", "switch")
            _ip("-n", name, "link", "set", into_switch, "up")
            _ip("-n", name, "link", "set", host.name, "up")
            for link in (_PORT, "lo"):
                _ip("-n", host.name, "link", "set", link, "up")
        if delay_s:
            ends = [f"{host.name}:{host.name}r" for host in hosts]
            relay = [sys.executable, "-m", "tests.launcher.cable", str(delay_s / 2), *ends]
            made.enter_context(Running.of(["ip", "netns", "exec", name, *relay])).wait_for("carries")
        yield hosts


def set_cable(host: Host, state: str) -> None:
    """Cuts or mends the cable at one end. state: "down" or "up" """
    _ip("-n", host.name, "link", "set", _PORT, state)


def cut_one_way(host: Host, direction: Literal["in", "out"]) -> None:
    """Drops silently all that goes to a host, or all that it sends; `mend` ends it."""
    _queue(host, direction, "blackhole")


def set_rate(host: Host, bits_per_s: str) -> None:
    """Limits the rate of a host's cable in both directions. bits_per_s: as `tc` writes it, such as "1gbit" """
    for direction in ("in", "out"):
        _queue(host, direction, "tbf", "rate", bits_per_s, "burst", "256k", "latency", "20ms")


def mend(host: Host) -> None:
    """Ends what `cut_one_way` and `set_rate` did."""
    for namespace, port in ((host.switch, host.name), (host.name, _PORT)):
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", port, "root"], capture_output=True, check=False)


def _queue(host: Host, direction: str, *words: str) -> None:
    namespace, port = (host.switch, host.name) if direction == "in" else (host.name, _PORT)
    subprocess.run(
        ["tc", "-n", namespace, "qdisc", "replace", "dev", port, "root", *words], check=True, capture_output=True
    )


def _set_network(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _words(*words: str) -> list[str]:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout.split()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
