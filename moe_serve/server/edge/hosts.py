"""Which names a request may give this server, and whether a page of another site made it. Pure functions, torch-free.

A browser lets any page send requests to a server on the same machine. A page whose name resolves to 127.0.0.1 (DNS
rebinding) may even read the answers; its name is then in `Host`, and browsers let no page change that.
"""

import functools
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

ANY = "*"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a server bound to this name or address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_served_host(header: str | None, bind_host: str, allowed: Collection[str]) -> bool:
    """Returns whether a request may be answered under the name in its `Host` header.

    bind_host: server.host;  allowed: server.allowed_hosts. Without them, any name where other machines can connect
    An address is always fine: only names can be made to point elsewhere. So is no header: browsers always send one.
    """
    if header is None or ANY in allowed or (not allowed and not is_loopback(bind_host)):
        return True
    name = _name(header)
    if name is None:
        return False
    if _address(name) is not None or name == "localhost" or name.endswith(".localhost"):
        return True
    return name == bind_host.lower() or name in {host.lower() for host in allowed}


def is_foreign_page(headers: dict[str, str], allowed_origins: Collection[str]) -> bool:
    """Returns whether a browser sent this request for a page of another site. headers: by lower-case name"""
    origin = headers.get("origin")
    if origin is not None and (origin in allowed_origins or ANY in allowed_origins):
        return False
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return True
    return origin is not None and _netloc(origin) != headers.get("host", "").lower()


@functools.lru_cache(maxsize=1024)  # the same few names come with every request
def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def _name(host: str) -> str | None:
    """Returns the name in a `Host` header, without its port; None where it is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
