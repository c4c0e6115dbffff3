"""Compiles and tries each constraint in a process of its own, and refuses those that no rank should see.

A rank compiles again what has passed here. So a schema that explodes costs its client a 400 and others nothing: time
and memory of the process are bounded, and it gives way to all others.
"""

import hashlib
from collections import OrderedDict
from dataclasses import replace

import msgspec

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import QueueFullError, RequestError
from moe_serve.server.workers.fair_queue import FairQueue
from moe_serve.server.workers.helper_process import HelperEnded, HelperProcess, TooLongError

_DEADLINE_S = 60.0  # for one constraint, and the start of the process, which reads the vocabulary, on a busy machine
_NICENESS = 10  # ranks and the front end may need the same core
_MAX_WAITING = 64  # of one client
_KEPT = 256  # answers
_KEPT_CHARS = 1 << 24  # of them together


class Model(msgspec.Struct, frozen=True):
    """What the process must know of the model."""

    folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class TrialJob(msgspec.Struct):
    """A job of the process."""

    model: Model
    constraint: Constraint


class Checked(msgspec.Struct):
    """The answer of the process: the grammar for ranks, or what is wrong with the constraint.

    busy:     nothing is wrong, but the machine had no time to compile it
    not_held: what of a lenient schema the grammar leaves out
    """

    grammar: str | None
    message: str = ""
    field: str | None = None
    busy: bool = False
    not_held: str = ""


class GrammarCheck:
    """Asks the process, which starts with the first constraint, and keeps its last answers."""

    def __init__(self, folder: str | None):
        """folder: of the model; None: without a tokenizer"""
        self._folder = folder
        module = "moe_serve.server.workers.grammar_check_process"
        self._process = HelperProcess(module, _DEADLINE_S, core_s=_DEADLINE_S, niceness=_NICENESS)
        self._queue = FairQueue("new schemas or grammars", _MAX_WAITING)
        self._answers: OrderedDict[bytes, Checked] = OrderedDict()
        self._kept_chars = 0

    async def checked(self, params: SamplingParams, limits: ModelLimits, client: str = "") -> SamplingParams:
        """Returns the parameters with their constraint compiled for ranks.

        Raises RequestError if the constraint is wrong, or takes too much time or memory; QueueFullError if too many of
        the client's wait, or if the machine has no time to compile it.
        """
        given = params.constraint
        assert given is not None, "parameters without a constraint need no check"
        if self._folder is None:
            raise RequestError(
                f"{given.name} needs a tokenizer, but this server has none; leave it out", field=given.name
            )
        answer = await self._answer(given, Model(self._folder, limits.vocab_size, tuple(limits.eos_token_ids)), client)
        if answer.busy:
            raise QueueFullError(answer.message)
        if answer.grammar is None:
            raise RequestError(answer.message, answer.field)
        return replace(
            params, constraint=replace(given, text=answer.grammar, is_compiled=True, not_held=answer.not_held)
        )

    async def close(self) -> None:
        """Ends the process."""
        await self._process.close()

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
        job = msgspec.msgpack.encode(TrialJob(model, given))
        try:
            return msgspec.msgpack.decode(await self._process.ask("", job), type=Checked)
        except (HelperEnded, TooLongError, TimeoutError):  # hostile constraints end forks of the process, not itself
            raise QueueFullError(
                f"{given.name} cannot be compiled now, since the process for it was killed or is stuck; try again later"
            ) from None
