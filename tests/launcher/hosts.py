"""Two hosts on one machine: network namespaces joined by a cable, each with a /dev/shm of its own."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launcher.running import Running

ADDRESSES = ("10.77.81.1", "10.77.81.2")
_ASK = """
import sys, urllib.error, urllib.request as requests
address, body = sys.argv[1:]
call = requests.Request(address, body.encode() or None, {"content-type": "application/json"})
try:
    with requests.urlopen(call, timeout=60) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print(0, error)
"""


def can_make_hosts() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "ms_try"], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", "ms_try"], check=False)
    return made


@dataclass(frozen=True)
class Host:
    """name: of its namespace;  address: on the cable"""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns a command that runs there, with an own /dev/shm."""
        script = 'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", script, "sh", *words]

    def start(self, module: str, *arguments: str) -> Running:
        """Starts a Python module there."""
        return Running.of(self.command([sys.executable, "-m", module, *arguments]))

    def ask(self, url: str, body: str = "") -> tuple[int, str]:
        """Returns status and text of an HTTP call from there; 0 where nothing answers."""
        command = self.command([sys.executable, "-c", _ASK, url, body])
        answer = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
        status, _, text = answer.partition(" ")
        return int(status), text


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yields two hosts; both are gone afterwards."""
    name = f"ms{os.getpid()}"
    hosts = tuple(Host(f"{name}{letter}", address) for letter, address in zip("ab", ADDRESSES, strict=True))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        for host in hosts:
            _ip("link", "set", host.name, "netns", host.name)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.name)
            for link in (host.name, "lo"):
                _ip("-n", host.name, "link", "set", link, "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            if Path(f"/run/netns/{host.name}").exists():
                _ip("netns", "del", host.name)


def set_cable(host: Host, state: str) -> None:
    """Cuts or mends the cable at one end. state: "down" or "up" """
    _ip("-n", host.name, "link", "set", host.name, state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
