"""Refuses constraints that no rank should see: each is compiled and tried in a process of its own first.

A rank compiles what has passed here once more. So a schema that explodes costs its client a 400, and others nothing:
the process has so much time and memory, and gives way to all others.
"""

import asyncio
import hashlib
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from dataclasses import replace

import msgspec

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import QueueFullError, RequestError
from moe_serve.server.workers.fair_queue import FairQueue

FRAME = struct.Struct("<I")  # before each message of both sides: its bytes
_DEADLINE_S = 20.0  # for one constraint, where the machine is busy
_START_S = 60.0  # for the process, which reads the vocabulary
_MAX_WAITING = 64  # of one client
_KEPT = 256  # answers
_KEPT_CHARS = 1 << 24  # of them together
_KILLED = (ConnectionError, asyncio.IncompleteReadError)


class Model(msgspec.Struct):
    """What the process must know of the model."""

    folder: str
    vocab_size: int
    eos_token_ids: list[int]


class Checked(msgspec.Struct):
    """What the process answers: the grammar for ranks, or what is wrong with the constraint.

    busy: nothing is wrong with it, but the machine had no time to compile it
    """

    grammar: str | None
    message: str = ""
    field: str | None = None
    busy: bool = False


class GrammarCheck:
    """The process, started with the first constraint. It keeps its last answers."""

    def __init__(self, folder: str | None):
        """folder: of the model; None: without a tokenizer"""
        self._folder = folder
        self._process: Process | None = None
        self._queue = FairQueue("new schemas or grammars", _MAX_WAITING)
        self._answers: OrderedDict[bytes, Checked] = OrderedDict()
        self._kept_chars = 0

    async def checked(self, params: SamplingParams, limits: ModelLimits, client: str = "") -> SamplingParams:
        """Returns parameters that ranks can take: those given, which have a constraint, with it compiled.

        Raises RequestError for a constraint that is wrong, or takes too much time or memory; QueueFullError where too
        many of the client wait for an answer, or the machine has no time to compile it.
        """
        given = params.constraint
        assert given is not None, "parameters without a constraint need no check"
        if self._folder is None:
            raise RequestError(
                f"{given.name} needs a tokenizer, but this server has none; leave it out", field=given.name
            )
        answer = await self._answer(given, Model(self._folder, limits.vocab_size, limits.eos_token_ids), client)
        if answer.busy:
            raise QueueFullError(answer.message)
        if answer.grammar is None:
            raise RequestError(answer.message, answer.field)
        return replace(params, constraint=replace(given, text=answer.grammar, is_compiled=True))

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def _answer(self, given: Constraint, model: Model, client: str) -> Checked:
        key = hashlib.blake2b(
            f"{given.kind}\0{given.path}\0{given.text}".encode(errors="surrogatepass"), digest_size=32
        ).digest()
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        async with self._queue.turn(client):
            answer = self._answers.get(key) or await self._ask(given, model)
        if not answer.busy:
            self._keep(key, answer)
        return answer

    def _keep(self, key: bytes, answer: Checked) -> None:
        if key not in self._answers:
            self._answers[key] = answer
            self._kept_chars += len(answer.grammar or "")
        while len(self._answers) > _KEPT or self._kept_chars > _KEPT_CHARS:
            _, dropped = self._answers.popitem(last=False)
            self._kept_chars -= len(dropped.grammar or "")

    async def _ask(self, given: Constraint, model: Model) -> Checked:
        for _ in range(2):
            try:
                return await self._ask_once(given, model)
            except _KILLED:  # not over this constraint: those end forks of the process
                await self.close()
            except TimeoutError:  # the process bounds the time of a core itself, so it had none, or is stopped
                await self.close()
                return _busy(given, "the machine is too busy")
            except OSError as error:
                return _busy(given, f"no process can be started for it ({error.strerror})")
            except BaseException:  # the caller was cancelled: what the process answers belongs to nobody
                await asyncio.shield(self.close())
                raise
        return _busy(given, "the process for it was killed twice")

    async def _ask_once(self, given: Constraint, model: Model) -> Checked:
        async with asyncio.timeout(_START_S):
            if self._process is None or self._process.returncode is not None:
                await self.close()
                self._process = await _start()
                await _greet(self._process, model)
        async with asyncio.timeout(_DEADLINE_S):
            return await _exchange(self._process, given)


def _busy(given: Constraint, why: str) -> Checked:
    return Checked(None, f"{given.name} cannot be compiled now, since {why}; try again later", given.name, busy=True)


async def _start() -> Process:
    module = "moe_serve.server.workers.grammar_check_process"
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, str(os.getpid()), stdin=PIPE, stdout=PIPE)


async def _greet(process: Process, model: Model) -> None:
    """Returns when the process has read the vocabulary."""
    assert process.stdin is not None
    _write(process.stdin, msgspec.msgpack.encode(model))
    await _read(process)


async def _exchange(process: Process, given: Constraint) -> Checked:
    assert process.stdin is not None
    _write(process.stdin, msgspec.msgpack.encode(given))
    await process.stdin.drain()
    return msgspec.msgpack.decode(await _read(process), type=Checked)


def _write(sink: asyncio.StreamWriter, data: bytes) -> None:
    sink.write(FRAME.pack(len(data)) + data)


async def _read(process: Process) -> bytes:
    assert process.stdout is not None
    (size,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
    return await process.stdout.readexactly(size)
