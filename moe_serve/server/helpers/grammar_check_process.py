"""The process that tries constraints: `python -m …_process PARENT_PID`. Torch-free.

It reads the vocabulary once, then constraints from stdin, and writes answers to stdout. Constraints are compiled in a
fork (grammar_trial.py).
"""

import os
import random
import signal
import sys
from functools import partial
from typing import BinaryIO

import msgspec
import numpy as np

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.child_process import die_with_parent
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.helpers.grammar_check import FRAME, Checked, Model
from moe_serve.server.helpers.grammar_trial import Busy, TooMuchMemory, TooMuchTime, Trials
from moe_serve.structured.grammar import Matcher, to_grammar
from moe_serve.structured.vocabulary import Vocabulary

_TRIED_TOKENS = 48


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
    trials = Trials(partial(_check_encoded, vocabulary))
    while data := _read(source):
        _write(sink, answer(trials, data))


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


def answer(trials: Trials, data: bytes) -> bytes:
    """Returns the encoded answer for one encoded constraint."""
    try:
        return trials.answer(data)
    except TooMuchTime:
        reason, busy = "takes more than a second to compile; send a simpler one", False
    except TooMuchMemory:
        reason, busy = "takes too much memory to compile; send a simpler one", False
    except Busy:
        reason, busy = "cannot be compiled now, since the machine is too busy; try again later", True
    kind = msgspec.msgpack.decode(data, type=Constraint).kind
    return msgspec.msgpack.encode(Checked(None, f"{kind} {reason}", kind, busy))


def _check_encoded(vocabulary: Vocabulary | MoeServeError, data: bytes) -> bytes:
    return msgspec.msgpack.encode(check(msgspec.msgpack.decode(data, type=Constraint), vocabulary))


def _read(source: BinaryIO) -> bytes:
    """Returns the next message; nothing where there is none any more."""
    head = source.read(FRAME.size)
    return source.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else b""


def _write(sink: BinaryIO, data: bytes) -> None:
    sink.write(FRAME.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main()
