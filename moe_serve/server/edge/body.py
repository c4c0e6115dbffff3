"""Reads the bodies of requests: each bounded in size; those of a client, and all, in the bytes that they hold."""

import ctypes
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from moe_serve.config import ServerConfig
from moe_serve.errors import QueueFullError, RequestError

_FREE_BYTES = 1 << 16  # of each body: small ones must get through while others hold all that large ones may


class BodyTooLarge(RequestError):
    """A request body beyond server.max_body_mib."""


class Bodies:
    """The bodies that are being received and parsed.

    num_bytes: what they hold, beyond the first 64 KiB of each;  by_client: the same of each client with such a body
    """

    def __init__(self, server: ServerConfig):
        self._max_bytes = int(server.max_body_mib * 2**20)
        self._max_all_bytes = int(server.max_bodies_mib * 2**20)
        self._max_own_bytes = int((server.max_bodies_mib_per_client or server.max_bodies_mib / 2) * 2**20)
        self._max_own_bytes = max(self._max_own_bytes, self._max_bytes)
        self.num_bytes = 0
        self.by_client: Counter[str] = Counter()

    @asynccontextmanager
    async def read(self, request: Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Yields the body of a request; it counts until the block ends. max_bytes: where less is of use

        Raises BodyTooLarge as soon as the size is known, QueueFullError where too many bytes are held already. How long
        a client may take is up to its connection.
        """
        client = str(request.state.client)
        most = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
        announced = request.headers.get("content-length", "")
        if announced.isdigit():
            self._check(int(announced), most, client)
        body = bytearray()
        counted = 0
        try:
            async for part in request.stream():
                body += part
                self._check(len(body), most, client, counted)
                if len(body) > _FREE_BYTES:
                    self._count(client, len(body) - _FREE_BYTES - counted)
                    counted = len(body) - _FREE_BYTES
            yield bytes(body)
        finally:
            self._count(client, -counted)

    def _count(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.by_client[client] += num_bytes
        if not self.by_client[client]:
            del self.by_client[client]

    def _check(self, size: int, most: int, client: str, counted: int = 0) -> None:
        """Raises an error for a body of this size, of which some bytes are counted already."""
        if size > most:
            why = "server.max_body_mib" if most == self._max_bytes else "no more are of use here"
            raise BodyTooLarge(f"the body has {size} bytes or more, at most {most} are allowed ({why}); send less")
        own_bytes = self.by_client[client]
        if size > _FREE_BYTES and own_bytes - counted + size - _FREE_BYTES > self._max_own_bytes:
            raise QueueFullError(
                f"other large bodies of {client} hold {own_bytes - counted >> 20} MiB, at most "
                f"{self._max_own_bytes >> 20} are held of one client "
                "(server.max_bodies_mib_per_client); try again later"
            )
        if size > _FREE_BYTES and self.num_bytes - counted + size - _FREE_BYTES > self._max_all_bytes:
            raise QueueFullError(
                f"large bodies of other requests hold {self.num_bytes >> 20} MiB, at most "
                f"{self._max_all_bytes >> 20} are held at a time (server.max_bodies_mib); try again later"
            )


_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20


def give_large_blocks_back() -> bool:
    """Makes malloc take each block of a megabyte or more from the kernel, to which it returns when it is freed.

    glibc raises that bound to the largest block that was freed, so after one body of 16 MiB later ones come from the
    heap, and four at a time left 50 MiB there. Returns False where malloc has no such bound (not glibc).
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except (AttributeError, OSError):
        return False
