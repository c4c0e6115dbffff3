"""Shuts out newcomers from listening sockets that a library keeps open, such as gloo's and the store's. Linux only.

Their protocols trust whoever connects. All their connections are made while the ranks join, so nobody has a reason to
connect later: a filter in the kernel drops what arrives for the listening socket. Connections that exist are not
touched.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator

_SO_ATTACH_FILTER = 26
_RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)  # one BPF instruction: keep 0 bytes of the packet


def listening_sockets() -> frozenset[int]:
    """Returns the descriptors of TCP sockets of this process that listen; empty where /proc does not tell."""
    return frozenset(descriptor for descriptor in _descriptors() if _listens(descriptor))


def shut_out_newcomers(descriptors: Iterable[int]) -> None:
    """Makes the kernel drop whatever asks for a new connection to these listening sockets."""
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(_RETURN_0)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _descriptors() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            yield int(name)


def _listens(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # no socket
