"""A client that writes bytes to a socket and may break every rule of HTTP."""

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import Any, Self

from tests.server.served import Served


@dataclass
class Answer:
    """One response. body: as received, without the framing of chunks"""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    interim: list[int] = field(default_factory=list)  # statuses of 1xx responses before it

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, served: Served, receive_buffer: int | None = None, ssl: Any = None) -> Self:
        """Returns a client with a new connection. receive_buffer: bytes of its kernel, for slow readers"""
        plain = socket.socket()
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.setblocking(False)
        url = served.client.base_url
        await asyncio.get_running_loop().sock_connect(plain, (url.host, url.port))
        reader, writer = await asyncio.open_connection(
            sock=plain, limit=1 << 12, ssl=ssl, server_hostname=url.host if ssl else None
        )
        return cls(reader, writer)

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
        await self.writer.drain()

    async def post(self, fields: Any, path: str = "/generate", headers: str = "") -> None:
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        await self.send(header(f"POST {path}", f"content-length: {len(body)}\r\n{headers}"), body)

    async def answer(self) -> Answer:
        """Returns the next response."""
        interim: list[int] = []
        while True:
            status, headers = await self._head()
            if status >= 200:
                break
            interim.append(status)
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif "transfer-encoding" in headers:
            body = await self._chunks()
        else:
            body = await self.reader.read()  # until the server closes: a stream of HTTP/1.0
        return Answer(status, headers, body, interim)

    async def _head(self) -> tuple[int, dict[str, str]]:
        line = await self.reader.readline()
        if not line:
            raise EOFError("the server has closed the connection")
        headers = {}
        while (field_line := await self.reader.readline()) not in (b"\r\n", b""):
            name, _, value = field_line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()
        return body

    async def closed(self) -> bytes:
        """Returns what comes until the server closes the connection."""
        try:
            return await self.reader.read(-1)
        except ConnectionError:
            return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def header(what: str, more: str = "", host: str = "localhost") -> bytes:
    """Returns the header of a request. what: method and path"""
    json_type = "" if "content-type" in more.lower() else "content-type: application/json\r\n"
    return f"{what} HTTP/1.1\r\nhost: {host}\r\n{json_type}{more}\r\n".encode()
