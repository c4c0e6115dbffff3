"""The process that tries constraints: `python -m …_process PARENT_PID`.

It reads the vocabulary once, then constraints from stdin, and writes answers to stdout. Constraints are compiled in a
fork (grammar_trial.py).
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.child_process import die_with_parent
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.workers.grammar_check import FRAME, Checked, Model
from moe_serve.server.workers.grammar_trial import Busy, TooMuchMemory, TooMuchTime, Trials
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
# Any token that may come soon begins a long text, so most are drawn from those that end a text, or lead on after it.
_ONWARD, _SEEKS = b'"{[,:(', 0.75


def main() -> None:
    """Answers until stdin ends."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.nice(10)  # ranks and the front end may need the same core
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    model = msgspec.msgpack.decode(_read(source), type=Model)
    walks: Walks | MoeServeError
    try:
        tokens = Tokenizer.from_folder(model.folder).token_bytes(model.vocab_size)
        walks = Walks(Vocabulary(tokens, model.eos_token_ids))
    except MoeServeError as error:
        walks = error
    _write(sink, b"ready")
    trials = Trials(partial(_check_encoded, walks))
    while data := _read(source):
        _write(sink, answer(trials, data))


class Walks:
    """Outputs drawn by the masks of a form, as ranks draw them, to see what its masks take."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        first = np.array([token[:1] for token in vocabulary.tokens], "S1")
        self._onward = _packed(np.isin(first, [bytes([byte]) for byte in _ONWARD]))
        ends = np.zeros(vocabulary.size, bool)
        ends[vocabulary.eos_token_ids] = True
        self._ends = _packed(ends)

    def take(self, matcher: Matcher, num: int, until_s: float, begin: str = "") -> None:
        """Draws so many outputs, fewer where they take longer than until this thread has used its CPU time.

        begin: of all outputs but the first

        Raises FormTooComplex for a mask, or where masks take too long on the average, and RequestError as masks do.
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
        """Returns one of the tokens, None where there is none. seeks: rather one that leads on"""
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
    """Compiles a constraint and draws some outputs by it. walks: or why the model has no vocabulary"""
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
    return Checked(grammar)


def _try_part(schema: Any, begin: str, given: Constraint, walks: Walks, until_s: float) -> None:
    """Raises FormTooComplex as a part of a form does. What else may be wrong with it alone need not be where it is."""
    part = replace(given, kind="json_schema", text=json.dumps(schema, ensure_ascii=False))
    try:
        walks.take(Matcher.compiled(part, walks.vocabulary, tries=True), _FEWEST_WALKS, until_s, begin)
    except FormTooComplex:
        raise
    except RequestError:
        pass


def _parts(given: Constraint) -> Iterator[tuple[Any, str]]:
    """Yields parts of a form that outputs drawn at random hardly come to, and how each may begin: what follows a tag,
    and large objects."""
    if given.kind == "structural_tag":
        for each in json.loads(given.text)["structures"]:
            schema = each.get("schema", {})
            yield schema, ""
            yield from largest_parts(schema, _LARGE_PART, _MOST_PARTS)
    elif given.kind == "json_schema":
        yield from largest_parts(json.loads(given.text), _LARGE_PART, _MOST_PARTS)


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
    name = msgspec.msgpack.decode(data, type=Constraint).name
    return msgspec.msgpack.encode(Checked(None, f"{name} {reason}", name, busy))


def _check_encoded(walks: Walks | MoeServeError, data: bytes) -> bytes:
    return msgspec.msgpack.encode(check(msgspec.msgpack.decode(data, type=Constraint), walks))


def _read(source: BinaryIO) -> bytes:
    """Returns the next message; nothing where there is none any more."""
    head = source.read(FRAME.size)
    return source.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else b""


def _write(sink: BinaryIO, data: bytes) -> None:
    sink.write(FRAME.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main()
