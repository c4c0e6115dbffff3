"""Compiles the grammars of requests beside a rank's step loop, and keeps the last ones.

The tokens that a grammar allows next are a pure function of grammar and tokens (structured/grammar.py), so a request
that starts again, here or on another rank, goes on as if nothing had been.
"""

import os
import sys
import threading
from collections import OrderedDict
from queue import Empty, SimpleQueue

from moe_serve.attention_dp.request import Request
from moe_serve.config import ServeConfig, model_dir
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.log import get_logger
from moe_serve.models.tokenizer import Tokenizer, tokenizer_file
from moe_serve.structured.grammar import Matcher
from moe_serve.structured.vocabulary import Vocabulary

log = get_logger(__name__)
_KEPT = 128  # compiled grammars
_KEPT_CHARS = 1 << 22  # of their texts together
_BESIDE = 19  # niceness of the thread: steps come first


def make_grammars(config: ServeConfig, limits: ModelLimits) -> "Grammars":
    """Returns the grammars of a rank. Reads the vocabulary: later, that would stop steps for up to a second."""
    folder = model_dir(config.model)
    try:
        if config.model.skip_tokenizer or tokenizer_file(folder) is None:
            return Grammars(None, "this server has no tokenizer")
        tokens = Tokenizer.from_folder(folder).token_bytes(limits.vocab_size)
        return Grammars(Vocabulary(tokens, limits.eos_token_ids))
    except MoeServeError as error:
        return Grammars(None, str(error))


class Grammars:
    """One thread, started with the first grammar. A request waits for its own; no other one does."""

    def __init__(self, vocabulary: Vocabulary | None, why_none: str = ""):
        """why_none: why this model has no vocabulary for grammars"""
        self._vocabulary = vocabulary
        self._why_none = why_none
        self._kept: OrderedDict[tuple[str, str], Matcher] = OrderedDict()  # by kind and text
        self._asked: SimpleQueue[Request] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Request, Matcher | RequestError]] = SimpleQueue()
        self._num_asked = 0
        self._thread: threading.Thread | None = None

    @property
    def has_work(self) -> bool:
        return self._num_asked > 0

    def prepare(self, request: Request) -> bool:
        """Gives a request its matcher if it has a constraint; returns False where that comes with `compiled`.

        Raises RequestError where this model serves no constraints.
        """
        constraint = request.params.constraint
        if constraint is None:
            return True
        if self._vocabulary is None:
            raise RequestError(f"{constraint.name} cannot be served: {self._why_none}", field=constraint.name)
        key = constraint.kind, constraint.text
        request.matcher = self._kept.get(key) if constraint.is_compiled else None
        if request.matcher is not None:
            self._kept.move_to_end(key)
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
            self._thread.start()
        self._num_asked += 1
        self._asked.put(request)
        return False

    def compiled(self) -> list[tuple[Request, RequestError | None]]:
        """Returns requests that have their matcher now, or an error instead. Does not wait."""
        ready: list[tuple[Request, RequestError | None]] = []
        while self._num_asked:
            try:
                request, answer = self._answers.get_nowait()
            except Empty:
                break
            self._num_asked -= 1
            if isinstance(answer, RequestError):
                ready.append((request, answer))
                continue
            request.matcher = answer
            constraint = request.params.constraint
            assert constraint is not None
            if constraint.is_compiled:
                self._keep(constraint.kind, constraint.text, answer)
            ready.append((request, None))
        return ready

    def _keep(self, kind: str, text: str, matcher: Matcher) -> None:
        self._kept[kind, text] = matcher
        self._kept.move_to_end((kind, text))
        while len(self._kept) > _KEPT or sum(len(kept) for _, kept in self._kept) > _KEPT_CHARS:
            self._kept.popitem(last=False)

    def _compile_all(self) -> None:
        if sys.platform == "linux":  # where that is the priority of one thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BESIDE)
        while True:
            request = self._asked.get()
            try:
                answer = self._compile(request)
            except BaseException as error:  # a panic of the library in Rust is not an Exception; its request ends
                log.exception("the grammar of request %s cannot be compiled", request.request_id)
                answer = RequestError(f"its form cannot be compiled: {type(error).__name__}", field="constraint")
            self._answers.put((request, answer))

    def _compile(self, request: Request) -> Matcher | RequestError:
        constraint, vocabulary = request.params.constraint, self._vocabulary
        assert constraint is not None
        assert vocabulary is not None
        try:
            return Matcher.compiled(constraint, vocabulary)
        except RequestError as error:
            return error
