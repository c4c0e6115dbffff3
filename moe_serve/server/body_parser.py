"""Parses the bodies of `/generate`: small ones here, large ones in a process of their own. Torch-free.

Python parses 16 MiB of JSON in up to three seconds, in which no other thread runs. A process can also be bounded: it
gets one body at a time, so much memory, and so many seconds.
"""

import asyncio
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from moe_serve.errors import RequestError
from moe_serve.server.schemas import GenerateRequest, parse_generate

SMALL_BYTES = 1 << 14  # parsed within some 2 ms, whatever is in them
FRAME = struct.Struct("<II")  # of what the process gets: max_prompts, bytes of the body
REPLY = struct.Struct("<I?")  # of what it answers: bytes of a Parsed, as MessagePack; whether the process ends now
_DEADLINE_S = 15.0  # for one body
_KILLED = (ConnectionError, asyncio.IncompleteReadError)  # what shows that the process has ended


class Parsed(msgspec.Struct):
    """What the process answers: the request, or what is wrong with it."""

    request: GenerateRequest | None
    message: str = ""
    field: str | None = None


class BodyParser:
    """The process, started with the first large body."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def parse(self, body: bytes, max_prompts: int) -> GenerateRequest:
        """Returns the checked request in a body, as parse_generate does. Raises RequestError."""
        if len(body) <= SMALL_BYTES:
            return parse_generate(body, max_prompts)
        async with self._turn:
            parsed = await self._ask(body, max_prompts)
        if parsed.request is None:
            raise RequestError(parsed.message, parsed.field)
        return parsed.request

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def _ask(self, body: bytes, max_prompts: int) -> Parsed:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                try:
                    return await self._ask_once(body, max_prompts)
                except _KILLED:  # perhaps for what it had done before
                    await self.close()
                    return await self._ask_once(body, max_prompts)
        except TimeoutError:
            await self.close()
            return Parsed(None, f"the body takes longer than {_DEADLINE_S:g} s to parse; send a simpler one")
        except _KILLED:
            await self.close()
            return Parsed(None, "the body takes too much memory to parse; send a simpler one")
        except BaseException:  # the caller was cancelled: what the process answers belongs to nobody
            await asyncio.shield(self.close())
            raise

    async def _ask_once(self, body: bytes, max_prompts: int) -> Parsed:
        if self._process is None or self._process.returncode is not None:
            await self.close()
            self._process = await _start()
        parsed, has_ended = await _exchange(self._process, body, max_prompts)
        if has_ended:
            await self.close()
        return parsed


async def _start() -> Process:
    module = "moe_serve.server.body_parser_process"
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, str(os.getpid()), stdin=PIPE, stdout=PIPE)


async def _exchange(process: Process, body: bytes, max_prompts: int) -> tuple[Parsed, bool]:
    """Returns what the process parsed, and whether it has ended after that."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(FRAME.pack(max_prompts, len(body)))
    process.stdin.write(body)
    await process.stdin.drain()
    size, has_ended = REPLY.unpack(await process.stdout.readexactly(REPLY.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Parsed), has_ended
