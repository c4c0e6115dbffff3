"""Refuses new connections to listening sockets that libraries keep open: gloo, the store, MPI. Linux only.

Their protocols trust every peer. All their connections are made while the ranks join, and no peer has a reason to
connect later, so a filter in the kernel drops what arrives for the listening socket. Existing connections stay.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Collection

_SO_ATTACH_FILTER = 26
_RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)  # one BPF instruction: keep 0 bytes of the packet


def refuse_new_connections(spared_ports: Collection[int] = ()) -> None:
    """Makes the kernel drop requests for new connections to all TCP ports of this process but these."""
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(_RETURN_0)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _copy_of(int(name)) as found:
            if _listens(found) and found.getsockname()[1] not in spared_ports:
                found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _copy_of(descriptor: int) -> socket.socket:
    """Returns a socket of its own to close. Raises OSError, with nothing left open, where the descriptor is none."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _listens(found: socket.socket) -> bool:
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
