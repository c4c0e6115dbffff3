"""The port of the HTTP server, which is opened before the server is started, and its TLS."""

import errno
import os
import socket
import ssl
from pathlib import Path

from moe_serve.config import ServerConfig
from moe_serve.errors import ConfigError, LaunchError, PortError

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


def make_tls(server: ServerConfig) -> ssl.SSLContext | None:
    """Returns the context for HTTPS, TLS 1.2 and later; None where no certificate is configured.

    Raises ConfigError naming the file that is missing or does not fit.
    """
    if server.ssl_certfile is None:
        return None
    files = {
        "server.ssl_certfile": server.ssl_certfile,
        "server.ssl_keyfile": server.ssl_keyfile,
        "server.ssl_ca_certs": server.ssl_ca_certs,
    }
    paths = {setting: Path(path).expanduser() for setting, path in files.items() if path is not None}
    for setting, path in paths.items():
        if not path.is_file():
            raise ConfigError(f"{setting} is {path}, which is no file; give a PEM file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise ConfigError("server.ssl_keyfile is encrypted, and nobody can be asked here; give a key without password")

    certificate = paths["server.ssl_certfile"]
    try:
        context.load_cert_chain(certificate, paths.get("server.ssl_keyfile"), no_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"server.ssl_certfile and server.ssl_keyfile do not fit ({error.strerror or error}); give the certificate "
            "and its own private key, as PEM files that this user may read"
        ) from None
    if "server.ssl_ca_certs" in paths:
        try:
            context.load_verify_locations(paths["server.ssl_ca_certs"])
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"server.ssl_ca_certs is no PEM file of certificates ({error}); correct it") from None
        context.verify_mode = ssl.CERT_REQUIRED  # clients without a certificate of these are refused
    return context
