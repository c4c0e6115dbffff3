"""A server with OpenAI's streams and known delays, in a thread: what a load tool reports of it can be checked."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Fake:
    """first_s: until the first token;  gap_s: between tokens

    refuses, cuts, breaks, silent: numbers of such requests; the last are never answered
    in_pieces: whether its events are sent in pieces of a few bytes
    metrics:  sent in two pieces, some time apart
    """

    first_s: float = 0.05
    gap_s: float = 0.01
    has_usage: bool = True
    in_pieces: bool = False
    metrics: bytes = b""
    refuses: frozenset[int] = frozenset()
    cuts: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_open: int = 0
    num_open: int = 0
    url: str = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)
        self.num_open -= 1
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        if head[0].startswith("GET /metrics"):
            await self._metrics(writer)
            return
        if head[0].startswith("GET"):
            _plain(writer, 200, {"object": "list", "data": [{"id": "fake"}]})
            return
        self.most_open = max(self.most_open, self.num_open)
        number = len(self.bodies)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        self.keys.append(headers.get("authorization"))
        if number in self.refuses:
            _plain(writer, 429, {"error": {"message": "the queue is full"}}, "Retry-After: 1\r\n")
            return
        path = head[0].split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.first_s)
        if number in self.silent:
            await asyncio.sleep(60)
        params = body.get("sampling_params") or body
        num_tokens = params.get("max_new_tokens") or params.get("max_completion_tokens") or params["max_tokens"]
        for token in range(num_tokens):
            if token:
                await asyncio.sleep(self.gap_s)
            if token == 2 and number in self.cuts:
                return  # without the last chunk
            if token == 2 and number in self.breaks:
                await self._event(writer, {"error": {"message": "rank 1 was lost"}})
                break
            for event in _events(path, token, num_tokens, self.has_usage):
                await self._event(writer, event)
        await self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _metrics(self, writer: asyncio.StreamWriter) -> None:
        half = len(self.metrics) // 2
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(self.metrics)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + self.metrics[:half])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(self.metrics[half:])
        await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, value: object) -> None:
        data = b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"
        for piece in [data[i : i + 7] for i in range(0, len(data), 7)] if self.in_pieces else [data]:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            if self.in_pieces:
                await asyncio.sleep(0)


def _events(path: str, token: int, num_tokens: int, has_usage: bool) -> Iterator[dict[str, Any]]:
    reason = "length" if token + 1 == num_tokens else None
    if path == "/generate":
        finish = None if reason is None else {"type": "length", "length": num_tokens}
        counts = {"prompt_tokens": 10, "completion_tokens": token + 1, "cached_tokens": 4}
        yield {"text": "x" * (token + 1), "meta_info": {**counts, "finish_reason": finish}}
        return
    if path == "/v1/chat/completions":
        if token == 0:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": reason}]}
    else:
        yield {"choices": [{"index": 0, "text": "x", "finish_reason": reason}]}
    if reason is not None and has_usage:
        details = {"cached_tokens": 4}
        usage = {"prompt_tokens": 10, "completion_tokens": num_tokens, "prompt_tokens_details": details}
        yield {"choices": [], "usage": usage}


def _plain(writer: asyncio.StreamWriter, status: int, value: object, more: str = "") -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)


@contextlib.contextmanager
def running(fake: Fake) -> Iterator[Fake]:
    """Runs a fake server until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(fake.answer, "127.0.0.1", 0)

    async def end(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
