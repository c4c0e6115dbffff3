"""Opens the port of the HTTP server, before the server itself is started."""

import errno
import os
import socket

from moe_serve.errors import LaunchError, PortError

_BACKLOG = 2048


def open_port(host: str, port: int, where: str = "server.host", which: str = "--port or server.port") -> socket.socket:
    """Returns a listening socket; port 0 = any free one.

    where, which: the settings of the host and the port, for the error
    Raises LaunchError when the host is not this machine, PortError when the port cannot be opened.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"{where} is {host!r}, which is no address of this machine ({error}); correct it") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise LaunchError(f"{where} is {host!r}, which is no address of this machine; correct it") from None
        raise PortError(
            f"port {port} on {host} cannot be opened ({os.strerror(error.errno or 0)}); "
            f"end the process that uses it, or choose another port with {which}"
        ) from None
    listener.setblocking(False)
    return listener
