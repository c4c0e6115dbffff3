"""Checks the header of a request before any route sees it: host, site, key, content type.

A tag of each route says who may call it: OPEN: anybody; ADMIN: holders of the admin key; none: holders of an API key.
If the server has no admin key, ADMIN routes are open only while it listens on this machine alone.

A browser lets any page send requests to a server on the same machine. A page whose name resolves to 127.0.0.1 (DNS
rebinding) may even read the answers; its name is then in `Host`, and browsers let no page change that.
"""

import base64
import functools
import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.config import ServerConfig
from moe_serve.server.edge.client_limits import Client, ClientLimits
from moe_serve.server.edge.errors import error_json
from moe_serve.server.edge.keys import Key, KeyRing

OPEN = "open"
ADMIN = "admin"

_READS = ("GET", "HEAD", "OPTIONS")


class Guard:
    """An ASGI middleware that lets allowed requests through."""

    def __init__(self, app: ASGIApp, access: "Access"):
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the start and the end of the server
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin1"): value.decode("latin1") for name, value in scope["headers"]}
        refusal = self._access.refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Access:
    """Decides by the header of a request who may do what."""

    def __init__(self, server: ServerConfig, keys: KeyRing):
        """has_limits: whether any client has limits"""
        self._server = server
        self._keys = keys
        self._is_local = is_loopback(server.host)
        self._limits = ClientLimits.of(server)
        self.has_limits = self._limits.exist or keys.have_limits
        self._tagged: dict[str, frozenset[tuple[str, str]]] | None = None

    def refusal(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """Returns the answer to a refused request; None lets it through.

        Sets `request.state.client`: the caller, a Client. headers: by lower-case name
        """
        if not is_served_host(headers.get("host"), self._server.host, self._server.allowed_hosts):
            name = headers.get("host", "")[:100]
            return error_json(421, f"this server does not answer as {name!r}; add the name to server.allowed_hosts")
        is_admin = self._has_tag(scope, ADMIN)
        is_read = scope["method"] in _READS
        if (not is_read or is_admin) and is_foreign_page(headers, self._server.cors_origins):
            return error_json(403, "a page of another site may not do this; add its origin to server.cors_origins")
        refusal = self._check_key(scope, headers, is_admin)
        if refusal is not None:
            return refusal
        if not is_read and _has_body(headers) and not _is_json(headers.get("content-type", "")):
            return error_json(415, "a body is JSON here; send the header content-type: application/json")
        coding = headers.get("content-encoding", "")
        if coding.lower() not in ("", "identity"):
            return error_json(
                415,
                f"the body's content-encoding is {coding[:100]!r}, and only identity is accepted; send plain JSON",
                {"accept-encoding": "identity"},
            )
        return None

    def _check_key(self, scope: Scope, headers: dict[str, str], is_admin: bool) -> Response | None:
        # The second is how Anthropic's clients send it.
        key = self._keys.identify(_secret(headers.get("authorization", "")) or headers.get("x-api-key"))
        client = key.client if key is not None else Client.at((scope.get("client") or ("unknown",))[0], self._limits)
        scope.setdefault("state", {})["client"] = client
        if self._has_tag(scope, OPEN):
            return None
        if is_admin:
            return self._check_admin(key, scope)
        if self._keys.has_api_keys and key is None:
            return _unauthorized("this server needs an API key; send the header authorization: Bearer KEY", scope)
        return None

    def _check_admin(self, key: Key | None, scope: Scope) -> Response | None:
        if self._keys.has_admin_keys:
            if key is None:
                return _unauthorized("this needs the admin key; send the header authorization: Bearer KEY", scope)
            return (
                None if key.is_admin else error_json(403, "this needs the admin key, and the given one is an API key")
            )
        if not self._is_local:
            return error_json(
                403,
                "this is closed: other machines reach this server, and it has no admin key; start it with "
                "MOE_SERVE_ADMIN_API_KEY or server.admin_api_key_file",
            )
        if self._keys.has_api_keys and key is None:
            return _unauthorized("this server needs an API key; send the header authorization: Bearer KEY", scope)
        return None

    def _has_tag(self, scope: Scope, tag: str) -> bool:
        if self._tagged is None:
            self._tagged = tagged_routes(scope["app"])
        return (scope["method"], scope["path"]) in self._tagged[tag]


def tagged_routes(app: FastAPI) -> dict[str, frozenset[tuple[str, str]]]:
    """Returns (method, path) of the routes with each tag."""

    def those_with(tag: str) -> Iterable[tuple[str, str]]:
        for route in app.routes:
            if isinstance(route, APIRoute) and tag in route.tags:
                assert "{" not in route.path, (
                    f"{route.path} has a parameter: {tag} routes are found by their whole path"
                )
                yield from ((method, route.path) for method in route.methods or ())

    return {tag: frozenset(those_with(tag)) for tag in (OPEN, ADMIN)}


def _has_body(headers: dict[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def _secret(authorization: str) -> str | None:
    """Returns the key in an `Authorization` header: a bearer token, or the password that a browser asked for."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except ValueError:  # also what b64decode and decode raise
            return None
    return None


def _unauthorized(message: str, scope: Scope) -> Response:
    """Returns a 401. On our pages it makes a browser ask for the key as a password."""
    is_page = scope["path"].startswith(("/dashboard", "/docs"))
    return error_json(401, message, {"WWW-Authenticate": 'Basic realm="moe_serve"' if is_page else "Bearer"})


ANY = "*"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a server bound to this name or address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_served_host(header: str | None, bind_host: str, allowed: Collection[str]) -> bool:
    """Returns whether a request may be answered under the name in its `Host` header.

    bind_host: server.host;  allowed: server.allowed_hosts; if empty and other machines can connect, any name is fine
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
    """Returns the name in a `Host` header, without its port; None if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
