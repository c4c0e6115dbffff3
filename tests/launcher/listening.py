"""Which TCP ports a process listens on, and whether they take new connections."""

import contextlib
import os
import socket


def listening(pid: int) -> list[tuple[str, int]]:
    """Returns (address, port) of the TCP ports that a process listens on."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry.path).removeprefix("socket:[").rstrip("]"))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with open(f"/proc/{pid}/net/{table}", encoding="ascii") as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    address, _, number = fields[1].partition(":")
                    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                    found.add((socket.inet_ntop(family, b"".join(words)), int(number, 16)))
    return sorted(found, key=lambda each: each[1])


def takes_connections(address: tuple[str, int]) -> bool:
    """Returns whether a connection to an address can be made."""
    try:
        socket.create_connection(address, 0.3).close()
    except OSError:
        return False
    return True
