"""The process that tries constraints: `python -m …_process PARENT_PID NICENESS`.

It reads the vocabulary with its first job. A constraint is compiled in a fork, which has bounded time and memory and
may end in any way. A fork costs more than most constraints do, so one fork tries many, until a hostile one ends it or
it has grown. It runs while nobody else wants the core; where that is never, another fork runs at a low priority for a
moment.
"""

import contextlib
import functools
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BufferedRWPair
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.child_process import die_with_parent
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.process_facts import core_seconds
from moe_serve.server.workers.grammar_check import Checked, Model, TrialJob
from moe_serve.server.workers.helper_process import serve_jobs
from moe_serve.structured.grammar import FormTooComplex, Matcher, to_grammar
from moe_serve.structured.json_schema import largest_parts
from moe_serve.structured.vocabulary import Vocabulary

_WALK_TOKENS = 64  # of each output that is tried
_FEWEST_WALKS, _MOST_WALKS = 4, 64
_CHARS_PER_WALK = 1024  # of a grammar: a long one has more places that an output may come to
_WALKS_S = 0.15  # of CPU time, of the whole form, and of all parts: what comes after it is left out
_LARGE_PART, _MOST_PARTS = 48, 8  # properties or alternatives of a part that is tried by itself; parts of one schema
_MOST_MASK_S = 0.01  # of CPU time, of a mask on the average: ordinary ones take 0.01 to 0.5 ms
_FEWEST_MASKS = 16  # for an average
# Drawn freely, an output soon is inside a long text. So most tokens are drawn from those that lead out of one.
_ONWARD, _SEEKS = b'"{[,:(', 0.75


def answer(data: bytes) -> bytes:
    """Returns the Checked of a TrialJob; both as MessagePack."""
    job = msgspec.msgpack.decode(data, type=TrialJob)
    try:
        return _trials_of(job.model).answer(msgspec.msgpack.encode(job.constraint))
    except TooMuchTime:
        reason, busy = "takes more than a second to compile; send a simpler one", False
    except TooMuchMemory:
        reason, busy = "takes too much memory to compile; send a simpler one", False
    except Busy:
        reason, busy = "cannot be compiled now, since the machine is too busy; try again later", True
    name = job.constraint.name
    return msgspec.msgpack.encode(Checked(None, f"{name} {reason}", name, busy))


@functools.cache
def _trials_of(model: Model) -> "Trials":
    """Returns what tries the constraints of a model, whose vocabulary is read once."""
    walks: Walks | MoeServeError
    try:
        tokens = Tokenizer.from_folder(model.folder).token_bytes(model.vocab_size)
        walks = Walks(Vocabulary(tokens, model.eos_token_ids))
    except MoeServeError as error:
        walks = error
    return Trials(functools.partial(_check_encoded, walks))


def _check_encoded(walks: "Walks | MoeServeError", data: bytes) -> bytes:
    return msgspec.msgpack.encode(check(msgspec.msgpack.decode(data, type=Constraint), walks))


class Walks:
    """Draws outputs by the masks of a form, as ranks do, to measure what the masks cost."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        first = np.array([token[:1] for token in vocabulary.tokens], "S1")
        self._onward = _packed(np.isin(first, [bytes([byte]) for byte in _ONWARD]))
        ends = np.zeros(vocabulary.size, bool)
        ends[vocabulary.eos_token_ids] = True
        self._ends = _packed(ends)

    def take(self, matcher: Matcher, num: int, until_s: float, begin: str = "") -> None:
        """Draws outputs, fewer than `num` if this thread has used until_s of CPU time before.

        begin: of all outputs but the first

        Raises FormTooComplex if a mask is too complex or masks take too long on average, and RequestError as masks do.
        """
        masks_s, num_masks = 0.0, 0
        for number in range(num):
            draw, walk = random.Random(number), matcher.copy()
            first = self.vocabulary.tokenizer.tokenize_str(begin) if number > 0 else []
            for index in range(len(first) + _WALK_TOKENS):
                begin_s = time.thread_time()
                if num_masks >= _FEWEST_MASKS and begin_s > until_s:
                    break
                allowed = walk.mask().view(np.uint32) & ~self._ends
                masks_s += time.thread_time() - begin_s
                num_masks += 1
                token = first[index] if index < len(first) else self._drawn(allowed, draw, seeks=number > 0)
                if token is None:
                    break
                walk.advance([token])
        if num_masks >= _FEWEST_MASKS and masks_s > num_masks * _MOST_MASK_S:
            raise FormTooComplex(
                f"{matcher.name} cannot be served: it takes {1e3 * masks_s / num_masks:.0f} ms to say which tokens may "
                f"come next, on the average, and at most {1e3 * _MOST_MASK_S:g} are taken; send a simpler one",
                field=matcher.name,
            )

    def _drawn(self, allowed: NDArray[np.uint32], draw: random.Random, seeks: bool) -> int | None:
        """Returns one of the allowed tokens; None if there is none. seeks: prefer one that leads out of a text"""
        if seeks and draw.random() < _SEEKS:
            onward = allowed & self._onward
            allowed = onward if onward.any() else allowed
        words = np.flatnonzero(allowed)
        if not words.size:
            return None
        word = int(words[draw.randrange(words.size)])
        return 32 * word + draw.choice([bit for bit in range(32) if int(allowed[word]) >> bit & 1])


def _packed(flags: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Returns bits in the order of Matcher.mask."""
    return np.packbits(np.pad(flags, (0, -len(flags) % 32)), bitorder="little").view("<u4")


def check(given: Constraint, walks: Walks | MoeServeError) -> Checked:
    """Compiles a constraint and draws some outputs by it. walks: an error if the model has no vocabulary"""
    try:
        if isinstance(walks, MoeServeError):
            raise RequestError(f"{given.name} cannot be served: {walks}", field=given.name)
        grammar = to_grammar(given)
        matcher = Matcher.compiled(replace(given, text=grammar, is_compiled=True), walks.vocabulary, tries=True)
        num_walks = min(_MOST_WALKS, _FEWEST_WALKS + len(grammar) // _CHARS_PER_WALK)
        walks.take(matcher, num_walks, time.thread_time() + _WALKS_S)
        parts_end_s = time.thread_time() + _WALKS_S
        for schema, begin in _parts(given):
            if time.thread_time() > parts_end_s:
                break
            _try_part(schema, begin, given, walks, parts_end_s)
    except RequestError as error:
        return Checked(None, str(error), error.field)
    return Checked(grammar, not_held=matcher.not_held)


def _try_part(schema: Any, begin: str, given: Constraint, walks: Walks, until_s: float) -> None:
    """Raises FormTooComplex if a part of a form is. Other faults of the part alone need not be faults in the whole."""
    part = replace(given, kind="json_schema", text=json.dumps(schema, ensure_ascii=False))
    try:
        walks.take(Matcher.compiled(part, walks.vocabulary, tries=True), _FEWEST_WALKS, until_s, begin)
    except FormTooComplex:
        raise
    except RequestError:
        pass


def _parts(given: Constraint) -> Iterator[tuple[Any, str]]:
    """Yields parts of a form that random outputs rarely reach (after a tag, large objects), and how each may begin."""
    if given.kind == "structural_tag":
        for each in json.loads(given.text)["structures"]:
            schema = each.get("schema", {})
            yield schema, ""
            yield from largest_parts(schema, _LARGE_PART, _MOST_PARTS)
    elif given.kind == "json_schema":
        yield from largest_parts(json.loads(given.text), _LARGE_PART, _MOST_PARTS)


CPU_S = 1.0  # for one constraint
_ADDRESS_BYTES = 512 << 20  # of addresses, beyond what the fork begins with
_GROWN_BYTES = 64 << 20  # of addresses; a fork that grows beyond it ends after its answer
_SOON_S = 0.1  # most constraints take a few ms
_STARVED_S = 0.02  # of CPU: a fork that has had less after _SOON_S waits for the core
_PATIENCE_S = 10.0  # for an answer on a busy machine
_TASK = struct.Struct("<I")  # before a constraint: its bytes
_REPLY = struct.Struct("<I?")  # before an answer: its bytes; whether the fork ends now

Check = Callable[[bytes], bytes]


class TooMuchTime(Exception):
    """The constraint has used up its CPU time."""


class TooMuchMemory(Exception):
    """The fork ended in another way over the constraint: usually for want of memory."""


class _Killed(Exception):
    """The fork was killed, as by the kernel when memory runs out."""


class Busy(Exception):
    """The machine gave the fork too little time for a verdict."""


class Trials:
    """Tries constraints in a fork, made with the first one. check: from an encoded constraint to an encoded answer"""

    def __init__(self, check: Check):
        self._check = check
        self._fork: _Fork | None = None

    def answer(self, task: bytes) -> bytes:
        """Returns the answer to a constraint. Raises TooMuchTime, TooMuchMemory or Busy."""
        try:
            return self._try(task)
        except _Killed:  # perhaps for memory that others needed
            pass
        try:
            return self._try(task)
        except _Killed:
            raise TooMuchMemory from None

    def _try(self, task: bytes) -> bytes:
        if self._fork is not None and self._fork.has_ended():
            self.close()
        fork = self._fork = self._fork or _Fork(self._check, gives_way=True)
        try:
            fork.send(task)
            if not fork.answers_within(_SOON_S) and fork.gives_way and fork.cpu_s() < _STARVED_S:
                fork.end()
                fork = self._fork = _Fork(self._check, gives_way=False)
                fork.send(task)
            if not fork.answers_within(_SOON_S):
                fork.give_way()  # it may well be hostile
            reply, ends = fork.reply(_PATIENCE_S)
        except BaseException:
            self.close()
            raise
        if ends:
            self.close()
        return reply

    def close(self) -> None:
        """Ends the fork."""
        fork, self._fork = self._fork, None
        if fork is not None:
            fork.end()


class _Fork:
    """A process that tries one constraint after another. gives_way: it runs only on an otherwise idle core"""

    def __init__(self, check: Check, gives_way: bool):
        ours, its = socket.socketpair()
        self.gives_way = False
        parent_pid = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:  # the machine has no process or no memory left
            ours.close()
            its.close()
            raise Busy from None
        if self._pid == 0:
            ours.close()
            with contextlib.suppress(BaseException):
                _try_all(its.makefile("rwb"), check, parent_pid)
            os._exit(1)
        its.close()
        self._ours, self._stream = ours, ours.makefile("rwb")
        self._began_s = 0.0
        if gives_way:
            self.give_way()

    def send(self, task: bytes) -> None:
        """Sends a constraint; `cpu_s` counts from now on."""
        self._began_s = core_seconds(self._pid)
        try:
            self._stream.write(_TASK.pack(len(task)) + task)
            self._stream.flush()
        except ConnectionError:
            raise _Killed from None

    def answers_within(self, seconds: float) -> bool:
        """Returns whether an answer begins, or the fork ends, within so many seconds."""
        return bool(select.select([self._ours], [], [], seconds)[0])

    def cpu_s(self) -> float:
        """Returns the CPU time since the constraint was sent."""
        return core_seconds(self._pid) - self._began_s

    def give_way(self) -> None:
        """Lets the fork run only on an otherwise idle core."""
        if not self.gives_way:
            os.sched_setscheduler(self._pid, os.SCHED_IDLE, os.sched_param(0))
            self.gives_way = True

    def has_ended(self) -> bool:
        """Returns whether the fork has ended, and reaps it then."""
        if os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
        return not self._pid

    def reply(self, seconds: float) -> tuple[bytes, bool]:
        """Returns the answer, and whether the fork ends after it. Raises as `Trials.answer` does."""
        if not self.answers_within(seconds):
            raise Busy
        with contextlib.suppress(ConnectionError):  # it ended before it had read the whole constraint
            head = self._stream.read(_REPLY.size)
            if len(head) == _REPLY.size:
                size, ends = _REPLY.unpack(head)
                answer = self._stream.read(size)
                if len(answer) == size:
                    return answer, ends
        code = os.waitstatus_to_exitcode(self._wait())
        raise {-signal.SIGPROF: TooMuchTime, -signal.SIGKILL: _Killed}.get(code, TooMuchMemory)

    def end(self) -> None:
        """Kills and reaps the fork."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()
        with contextlib.suppress(OSError):  # of what it did not read
            self._stream.close()
        self._ours.close()

    def _wait(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return status


def _try_all(stream: BufferedRWPair, check: Check, parent_pid: int) -> None:
    """Answers constraints in the fork until the stream ends, each within its bounds of time and memory."""
    die_with_parent(parent_pid)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the parent's pipes; and where Rust says why it aborts
        os.dup2(null, number)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of a process that does not close it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    held = _addresses()
    resource.setrlimit(resource.RLIMIT_AS, (held + _ADDRESS_BYTES, held + _ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := stream.read(_TASK.size):
        task = stream.read(*_TASK.unpack(head))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = check(task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(_REPLY.pack(len(answer), _addresses() > held + _GROWN_BYTES) + answer)
        stream.flush()
    os._exit(0)


def _addresses() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    serve_jobs(answer, None)  # its forks have bounds of their own
