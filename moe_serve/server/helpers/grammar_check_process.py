"""The process that tries constraints: `python -m …_process PARENT_PID`. Torch-free.

It reads the vocabulary once, then constraints from stdin, and writes answers to stdout. Each constraint is compiled in
a fork, which may take so much time and memory, and end as it likes.
"""

import os
import random
import resource
import select
import signal
import sys
from typing import BinaryIO

import msgspec
import numpy as np

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.child_process import die_with_parent
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.helpers.grammar_check import CPU_S, FRAME, Checked, Model
from moe_serve.structured.grammar import Matcher, to_grammar
from moe_serve.structured.vocabulary import Vocabulary

_MORE_MEMORY_BYTES = 512 << 20  # of addresses, beyond what the vocabulary takes
_TRIED_TOKENS = 48
_SOON_S = 0.1  # most constraints take a few ms
_PATIENCE_S = 10.0  # on a busy machine


def main() -> None:
    """Answers until stdin ends."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.nice(10)  # ranks and the front end may need the same core
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    model = msgspec.msgpack.decode(_read(source), type=Model)
    vocabulary: Vocabulary | MoeServeError
    try:
        tokens = Tokenizer.from_folder(model.folder).token_bytes(model.vocab_size)
        vocabulary = Vocabulary(tokens, model.eos_token_ids)
    except MoeServeError as error:
        vocabulary = error
    _write(sink, b"ready")
    while data := _read(source):
        _write(sink, _forked(msgspec.msgpack.decode(data, type=Constraint), vocabulary))


def check(given: Constraint, vocabulary: Vocabulary | MoeServeError) -> Checked:
    """Compiles a constraint and draws some tokens by it, as a rank will."""
    try:
        if isinstance(vocabulary, MoeServeError):
            raise RequestError(f"{given.kind} cannot be served: {vocabulary}", field="constraint")
        grammar = to_grammar(given)
        matcher = Matcher.compiled(grammar, vocabulary, given.kind)
        draw = random.Random(0)
        for _ in range(_TRIED_TOKENS):
            allowed = np.unpackbits(matcher.mask().view(np.uint8), count=vocabulary.size, bitorder="little")
            allowed[vocabulary.eos_token_ids] = 0
            ids = np.flatnonzero(allowed)
            if not ids.size:
                break
            matcher.advance([int(ids[draw.randrange(ids.size)])])
    except RequestError as error:
        return Checked(None, str(error), error.field)
    return Checked(grammar)


def _forked(given: Constraint, vocabulary: Vocabulary | MoeServeError) -> bytes:
    """Returns the encoded answer for one constraint."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        with open(sink, "wb") as pipe:
            _limit()
            pipe.write(msgspec.msgpack.encode(check(given, vocabulary)))
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        if not select.select([pipe], [], [], _SOON_S)[0]:
            # It may well be hostile: from now on it gets what nobody else needs.
            os.sched_setscheduler(child, os.SCHED_IDLE, os.sched_param(0))
            if not select.select([pipe], [], [], _PATIENCE_S)[0]:
                os.kill(child, signal.SIGPROF)
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0 and answer:
        return answer
    too_much = "more than a second" if os.waitstatus_to_exitcode(status) == -signal.SIGPROF else "too much memory"
    message = f"{given.kind} takes {too_much} to compile; send a simpler one"
    return msgspec.msgpack.encode(Checked(None, message, given.kind))


def _limit() -> None:
    """Ends this process after CPU_S of work, or with too much memory."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of a process that is about to end
    os.dup2(sys.stderr.fileno(), 2)  # where Rust says why it aborts
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    with open("/proc/self/statm", encoding="ascii") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    limit = held + _MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(source: BinaryIO) -> bytes:
    """Returns the next message; nothing where there is none any more."""
    head = source.read(FRAME.size)
    return source.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else b""


def _write(sink: BinaryIO, data: bytes) -> None:
    sink.write(FRAME.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main()
