"""Hostile clients: each kind is one connection that does something a server must survive, over a raw socket.

A kind returns the status of what was answered, or None where the server rightly says nothing (or the client left).
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

WAIT_S = 30.0  # for an answer that is due

Kind = Callable[["Socket", random.Random], Awaitable[int | None]]


@dataclass
class Socket:
    """One connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Sends, as far as the server reads. Raises TimeoutError where it neither reads nor ends the connection."""
        self.writer.write(data)
        async with asyncio.timeout(WAIT_S):
            await self.writer.drain()

    async def status(self) -> int:
        """Returns the status of the next response; 100 is skipped. Raises ConnectionError where there is none."""
        async with asyncio.timeout(WAIT_S):
            while True:
                line = await self.reader.readline()
                if not line:
                    raise ConnectionError("closed without an answer")
                status = int(line.split()[1])
                while await self.reader.readline() not in (b"\r\n", b""):
                    pass
                if status >= 200:
                    return status


def request(
    body: bytes, path: str = "/generate", more: str = "", host: str = "localhost", kind: str = "application/json"
) -> bytes:
    """Returns a POST of a body."""
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def valid_body(draw: random.Random, stream: bool = False) -> bytes:
    """Returns a request that is served: one token, so that ranks have little to do."""
    ids = [draw.randrange(2, 2000) for _ in range(draw.randrange(1, 6))]
    return json.dumps({"input_ids": ids, "stream": stream, "sampling_params": {"max_new_tokens": 1}}).encode()


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Returns data with some bytes replaced, dropped, repeated or inserted."""
    for _ in range(draw.randrange(1, 5)):
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.randrange(9))
        pieces = [
            b"",
            b"\x00",
            b"\r\n",
            b"\xff\xfe",
            b"[[[[[[",
            b'":',
            b"9" * 25,
            b"1e999",
            b"\\ud800",
            data[start:end] * 3,
        ]
        data = data[:start] + draw.choice([*pieces, draw.randbytes(draw.randrange(5))]) + data[end:]
    return data


FIELDS = [
    "text", "input_ids", "sampling_params", "stream", "rid", "session_id", "cache_salt", "extra_key", "routed_dp_rank",
    "data_parallel_rank", "priority", "return_logprob", "input_embeds", "lora_path", "timeout", "n", "model", "prompt",
]  # fmt: skip
PARAMS = [
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "n",
    "sampling_seed", "ignore_eos", "logit_bias", "regex", "json_schema", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "bad_words", "bad_words_ids", "allowed_token_ids", "no_stop_trim",
]  # fmt: skip


def random_value(draw: random.Random, depth: int = 0) -> object:
    """Returns any JSON value, of few tokens where it is a length."""
    plain = [None, True, False, 0, 1, -1, 2, 10**30, 0.5, -0.0, 1e308, "", "a", "\u0000", "é" * 40, "x" * 3000]
    if depth > 2 or draw.random() < 0.7:
        return draw.choice(plain)
    if draw.random() < 0.5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice([*PARAMS, "x"]): random_value(draw, depth + 1) for _ in range(draw.randrange(4))}


# --- kinds ------------------------------------------------------------------------------------------------------------


async def garbage(socket: Socket, draw: random.Random) -> int | None:
    await socket.send(draw.randbytes(draw.randrange(1, 400)) + b"\r\n\r\n")
    return await socket.status()


async def mutated_request(socket: Socket, draw: random.Random) -> int | None:
    await socket.send(mutate(request(valid_body(draw)), draw) + b"\r\n\r\n")
    socket.writer.write_eof()
    try:
        return await socket.status()
    except ConnectionError:
        return None  # it looked as if more was to come, and the client closed its side


async def mutated_body(socket: Socket, draw: random.Random) -> int | None:
    await socket.send(request(mutate(valid_body(draw), draw)))
    return await socket.status()


async def random_body(socket: Socket, draw: random.Random) -> int | None:
    fields = {name: random_value(draw) for name in draw.sample(FIELDS, draw.randrange(5))}
    if draw.random() < 0.5:
        params = {name: random_value(draw) for name in draw.sample(PARAMS, draw.randrange(4))}
        fields |= {"text": "a", "sampling_params": {"max_new_tokens": 1, **params}}
        if not fields["sampling_params"]["max_new_tokens"]:  # type: ignore[index]
            fields["sampling_params"]["max_new_tokens"] = 1  # type: ignore[index]
    await socket.send(request(json.dumps(fields).encode()))
    return await socket.status()


async def wrong_route(socket: Socket, draw: random.Random) -> int | None:
    path = draw.choice(
        ["/", "/../etc/passwd", "/v1/models/%00", "/generate/", "//", "/%ff", "/eplb/placement", "/a" * 900]
    )
    method = draw.choice(["GET", "DELETE", "TRACE", "POST", "X-Y", "OPTIONS"])
    host = draw.choice(["localhost", "evil.example", "[::1", "127.0.0.1:1", "a" * 300])
    await socket.send(f"{method} {path} HTTP/1.1\r\nhost: {host}\r\norigin: http://evil.example\r\n\r\n".encode())
    return await socket.status()


async def nested(socket: Socket, draw: random.Random) -> int | None:
    depth = draw.choice([9, 200, 5000])
    await socket.send(
        request(draw.choice([b"[" * depth, b'{"a":' * depth, b'{"text":"a","text":"b"}', b"[[]," * depth]))
    )
    return await socket.status()


async def large_body(socket: Socket, draw: random.Random) -> int | None:
    mib = draw.choice([1, 2, 17])
    unit, end = draw.choice([(b"[],", b"[]"), (b"7,", b"7"), (b"{},", b"{}"), (b'"a",', b'"a"')])
    body = b'{"input_ids":[' + unit * ((mib << 20) // len(unit)) + end + b"]}"
    with contextlib.suppress(ConnectionError):  # refused by its length; the answer is there
        await socket.send(request(body))
    return await socket.status()


async def tiny_chunks(socket: Socket, draw: random.Random) -> int | None:
    head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    await socket.send(head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * draw.randrange(300, 20_000))
    return await socket.status()


async def large_header(socket: Socket, draw: random.Random) -> int | None:
    line = draw.choice([b"a: b\r\n" * 3000, b"x: " + b"y" * 100_000 + b"\r\n"])
    await socket.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n" + line + b"\r\n")
    return await socket.status()


async def pipeline(socket: Socket, draw: random.Random) -> int | None:
    await socket.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n" * draw.randrange(2, 100))
    return await socket.status()


async def silent(socket: Socket, draw: random.Random) -> int | None:
    await socket.send(draw.choice([b"", b"GET /ping HTTP/1.1\r\nhost: loc"]) or b"")
    await asyncio.sleep(draw.uniform(0.5, 3))
    return None


async def leaves_a_stream(socket: Socket, draw: random.Random) -> int | None:
    body = json.dumps({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 40}}).encode()
    await socket.send(request(body))
    await asyncio.sleep(draw.uniform(0, 0.05))
    return None


async def half_closed(socket: Socket, draw: random.Random) -> int | None:
    await socket.send(request(valid_body(draw, stream=draw.random() < 0.5)))
    socket.writer.write_eof()
    return await socket.status()


async def form(socket: Socket, draw: random.Random) -> int | None:
    kind = draw.choice(["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ";"])
    await socket.send(request(valid_body(draw), kind=kind))
    return await socket.status()


KINDS: dict[Kind, int] = {  # and how often each comes, in proportion
    garbage: 10, mutated_request: 20, mutated_body: 25, random_body: 20, wrong_route: 10, nested: 5, large_body: 1,
    tiny_chunks: 2, large_header: 3, pipeline: 2, silent: 3, leaves_a_stream: 1, half_closed: 2, form: 3,
}  # fmt: skip
