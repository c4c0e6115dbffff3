"""Submits the requests of a call, whatever its API, and sends their results as one JSON answer or a stream.

When the client disconnects, its requests are aborted and free what they hold.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.edge.body import Bodies
from moe_serve.server.edge.client_limits import Client, Permit
from moe_serve.server.edge.connection import CONNECTION, Connection
from moe_serve.server.edge.errors import error_response
from moe_serve.server.edge.gate import Terms
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.admission import Degradation
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec
from moe_serve.server.requests.prompts import (
    GenerateRequest,
    Prompt,
    best_of_each,
    check_call,
    check_embeddings,
    check_num_expressions,
    draw_seed,
    encode_prompt,
    fit_to_model,
    link_samples,
    num_logprobs,
    samples_of,
    with_bad_words,
)
from moe_serve.server.workers.fair_queue import FairQueue

_SMALL_BODY = 1 << 14  # bytes, parsed within a few ms, whatever is in them; a larger body is parsed in a thread
_MANY_LOGPROBS = 4096  # numbers in an answer
_LARGE_EMBEDDINGS = 16_384  # bytes in an answer, as float32
_LONG_ANSWER = 16_384  # characters of its texts, which parsers of calls read at up to 15 us each
_SHORT_CALL = 4096  # characters of all prompts; a longer call is tokenized in a thread
_LONG_CALL = 1 << 16  # such a call takes 0.15 s of a core, and longer ones wait for their turn
DONE = b"data: [DONE]\n\n"
NOT_HELD_HEADER = b"x-moe-serve-schema-not-held"
_MOST_NOT_HELD = 500  # characters of that header
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True)
class Call:
    """The open requests of one HTTP call, in the order of its answer, and the id that the client knows each by.

    groups:   for each prompt: how many outputs are generated, how many of them the answer has
    left_out: requests whose outputs the answer leaves out, since others are better
    """

    requests: Sequence[OpenRequest]
    client_ids: Sequence[str]
    changes: Changes
    permit: Permit | None = None
    groups: Sequence[tuple[int, int]] = ()
    left_out: Sequence[OpenRequest] = ()

    def with_best(self) -> "Call":
        """Returns the call reduced to the best outputs of each prompt, once all requests have ended."""
        chosen = best_of_each(self.requests, self.groups)
        left_out = set(range(len(self.requests))) - set(chosen)
        return replace(
            self,
            requests=[self.requests[i] for i in chosen],
            client_ids=[self.client_ids[i] for i in chosen],
            left_out=[self.requests[i] for i in sorted(left_out)],
        )

    def failure_of(self, request: OpenRequest) -> MoeServeError | None:
        """Returns the failure of a request that ends the answer to the whole call.

        A request that was cut short before its first token gets an empty output if others still have output to give.
        """
        if request.was_cut_short and request.failure is not None:
            others = (each for each in self.requests if each is not request and each.failure is None)
            if any(each.num_output or not each.is_done for each in others):
                request.end_empty()
        return request.failure

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer: what of the schemas its outputs need not hold."""
        forms = [request.spec.params.constraint for request in self.requests]
        words = "; ".join(dict.fromkeys(form.not_held for form in forms if form is not None and form.not_held))
        return [(NOT_HELD_HEADER, _visible(words))] if words else []

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and outputs, without requests that failed before their first one."""
        started = [request for request in self.requests if request.num_output or request.failure is None]
        return sum(len(request.spec.prompt_ids) + request.num_output for request in started)


def _visible(words: str) -> bytes:
    """Returns a text as the value of a header."""
    text = words.encode("ascii", "backslashreplace").decode()
    return "".join(each if each.isprintable() else " " for each in text)[:_MOST_NOT_HELD].strip().encode()


async def start_call(
    given: GenerateRequest,
    bridge: Bridge,
    tokenizer: Tokenizer | None,
    long_texts: FairQueue,
    permit: Permit | None = None,
    client: str = "",
) -> Call:
    """Submits all requests of a call, or none. Requests of one prompt are neighbours.

    Raises RequestError, QueueFullError or UnavailableError.

    long_texts: the fair queue for tokenizing long texts;  permit: of a client with limits;  client: its name
    """
    limits = bridge.limits
    specs: list[RequestSpec] = []
    client_ids: list[str] = []
    groups: list[tuple[int, int]] = []
    check_num_expressions(given.prompts)
    for prompt, prompt_ids in await _tokenize(given.prompts, tokenizer, limits, long_texts, client):
        params = fit_to_model(prompt, prompt_ids, limits)
        if params.constraint is not None:
            params = await bridge.grammars.checked(params, limits, client)
        seed = draw_seed() if params.seed is None else params.seed
        rid = prompt.rid or uuid.uuid4().hex
        groups.append((params.num_samples, params.n))
        for sample, (own, own_seed) in enumerate(samples_of(params, seed)):
            client_ids.append(rid if params.num_samples == 1 else f"{rid}-{sample}")
            specs.append(
                RequestSpec(
                    prompt_ids=prompt_ids,
                    params=own,
                    seed=own_seed,
                    salt=given.salt,
                    session_id=prompt.session_id,
                    rank=given.rank,
                    priority=given.priority,
                    rid=client_ids[-1],
                    timeout_s=given.timeout_s,
                    group=rid if params.num_samples > 1 else None,
                    shows_logprobs=params.logprobs is not None,
                )
            )
    check_call(specs, given.stream, bool(given.incremental))
    check_embeddings(specs, limits)
    if given.stream and any(prompt.params.chooses for prompt in given.prompts):
        raise RequestError(
            "best_of is larger than n, so the outputs of the answer are known at the end only; send stream: false",
            field="best_of",
        )
    if permit is not None:
        permit.take(len(specs), sum(spec.num_tokens for spec in specs), time.monotonic())
    changes = Changes(ends_only=not given.stream)
    requests = bridge.submit(specs, changes)
    link_samples(requests, groups)
    return Call(requests, client_ids, changes, permit, groups)


async def _tokenize(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, limits: ModelLimits, long_texts: FairQueue, client: str
) -> Sequence[tuple[Prompt, list[int]]]:
    """Returns each prompt with its token ids; bad words become ids as well.

    All but short texts are encoded in a thread, so that other clients are served meanwhile. Long ones pass a fair
    queue, so that they do not take all threads and cores from the others.
    """

    def work() -> list[tuple[Prompt, list[int]]]:
        return [(each, encode_prompt(each, tokenizer, limits)) for each in with_bad_words(prompts, tokenizer)]

    num_chars = sum(len(prompt.text or "") + 2 * sum(map(len, prompt.params.bad_words)) for prompt in prompts)
    if num_chars <= _SHORT_CALL:
        return work()
    if num_chars <= _LONG_CALL:
        return await asyncio.to_thread(work)
    async with long_texts.turn(client):
        return await asyncio.to_thread(work)


TextOf = Callable[[int], str]


def texts_of(tokenizer: Tokenizer | None) -> TextOf:
    """Returns the function from a token id to its text, decoded by itself; without a tokenizer vLLM's "token_id:5"."""
    if tokenizer is None:
        return lambda token_id: f"token_id:{token_id}"
    known: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        if token_id not in known:
            known[token_id] = tokenizer.decode([token_id], skip_special_tokens=False)
        return known[token_id]

    return text_of


@dataclass(slots=True)
class Cursor:
    """How much of a request's output its client has: characters and tokens."""

    num_chars: int = 0
    num_tokens: int = 0

    def advance(self, request: OpenRequest) -> tuple[str, list[int]]:
        """Returns the new text and tokens of the output, which the client has from now on."""
        matcher = request.matcher
        text, token_ids = matcher.text[self.num_chars :], matcher.output_ids[self.num_tokens :]
        self.num_chars += len(text)
        self.num_tokens += len(token_ids)
        return text, token_ids


class Answers(Protocol):
    """Formats the results of a call for its client, and remembers how much of a stream the client has.

    ends_at_failure: a stream ends with the first request that fails
    """

    ends_at_failure: bool

    def whole(self, call: Call) -> bytes:
        """Returns the body of the answer, once all requests have ended."""

    def event(self, call: Call, index: int) -> bytes:
        """Returns the events for what is new of a request; empty if there is nothing to say."""

    def end(self, call: Call) -> bytes:
        """Returns the last events of a stream."""


T = TypeVar("T")


class WholeAnswers(Generic[T]):
    """Answers to calls that have no streams."""

    ends_at_failure = True

    def __init__(self, given: T, name: str):
        """given: the checked call;  name: of the served model"""
        self._given = given
        self._name = name

    def event(self, call: Call, index: int) -> bytes:
        raise AssertionError("these answers are not streamed")

    def end(self, call: Call) -> bytes:
        raise AssertionError("these answers are not streamed")


class CallResponse(Response):
    """The answer to one call, as JSON or server-sent events. When it ends, for any reason, it aborts what is open."""

    def __init__(self, call: Call, bridge: Bridge, answers: Answers, stream: bool):
        super().__init__()
        self._call = call
        self._bridge = bridge
        self._answers = answers
        self._stream = stream
        self._is_sending = False  # events through ASGI, which chunks must not overtake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future(self._send_stream(scope, send) if self._stream else self._send_json(send))
        gone = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        except OSError:
            pass  # the client disconnected while we were sending
        finally:
            for task in (answer, gone):
                task.cancel()
            for request in self._call.requests:
                self._bridge.book.abort(request)
            if self._call.permit is not None:
                self._call.permit.use(self._call.num_tokens)

    async def _send_json(self, send: Send) -> None:
        call = self._call
        left = len(call.requests)
        while left:
            request = await call.changes.next()
            if (failure := call.failure_of(request)) is not None:
                await error_response(failure)({"type": "http"}, _no_receive, send)
                return
            left -= request.is_done
        best = call.with_best()
        # Much to write takes a thread, so that other clients are served meanwhile.
        num_chars = sum(len(request.matcher.text) for request in best.requests)
        is_long = num_chars > _LONG_ANSWER or sum(map(num_logprobs, best.requests)) > _MANY_LOGPROBS
        is_long |= sum(len(request.embedding or b"") for request in best.requests) > _LARGE_EMBEDDINGS
        body = await asyncio.to_thread(self._answers.whole, best) if is_long else self._answers.whole(best)
        headers = {name.decode(): value.decode() for name, value in call.headers}
        await Response(body, headers=headers, media_type="application/json")({"type": "http"}, _no_receive, send)

    async def _send_stream(self, scope: Scope, send: Send) -> None:
        call, answers = self._call, self._answers
        index_of = {request.request_id: index for index, request in enumerate(call.requests)}
        left = len(call.requests)
        has_begun = False
        while left:
            request = await call.changes.next()
            failure = call.failure_of(request) if answers.ends_at_failure else None
            if not has_begun:  # not earlier: while a request waits, only a call without headers shows that it was left
                if failure is not None:
                    await error_response(failure)({"type": "http"}, _no_receive, send)
                    return
                await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *call.headers]})
                has_begun = True
                connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
                if connection is not None:  # from here on, most events do not come this way
                    call.changes.notify_by(self._bridge.notifier, partial(self._write, connection, index_of))
            left -= request.is_done  # not later: it may end while what came before is sent, and is told again then
            if events := answers.event(call, index_of[request.request_id]):
                self._is_sending = True
                await send({"type": "http.response.body", "body": events, "more_body": True})
                self._is_sending = False
            if failure is not None:
                break
        await send({"type": "http.response.body", "body": answers.end(call), "more_body": False})

    def _write(self, connection: Connection, index_of: dict[str, int], request: OpenRequest) -> bool:
        """Sends what is new of a request; returns False if `_send_stream` must do it.

        ASGI's `send` wakes a task and passes all layers of the application. With it alone a token costs the front end
        1.4 to 2.1 times the CPU (256 streams, 6,000 tokens per second, five rounds).
        """
        if request.is_done or self._is_sending or not connection.takes_chunks:
            return False
        if events := self._answers.event(self._call, index_of[request.request_id]):
            connection.write_chunk(events)
        return True


async def _client_left(receive: Receive) -> None:
    """Returns once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _no_receive() -> Any:
    raise AssertionError("a plain response reads nothing")


@dataclass(frozen=True)
class RequestPipeline:
    """The steps of every call that generates: body, checks, degradation, submission.

    large_bodies, long_texts: the fair queues of all routes for parsing and for tokenizing
    """

    bodies: Bodies
    bridge: Bridge
    tokenizer: Tokenizer | None
    degradation: Degradation
    large_bodies: FairQueue
    long_texts: FairQueue

    @asynccontextmanager
    async def read(self, request: Request, parse: Callable[[bytes], T]) -> AsyncIterator[T]:
        """Yields the parsed body of a request. Its bytes count as held until the block ends.

        Raises RequestError or QueueFullError.
        """
        async with self.bodies.read(request) as body:
            if len(body) <= _SMALL_BODY:
                yield parse(body)
                return
            async with self.large_bodies.turn(str(request.state.client)):
                parsed = await asyncio.to_thread(parse, body)
            yield parsed

    async def beside_the_loop(self, client: str, size: int, work: Callable[[], T]) -> T:
        """Returns the result of the work; long work runs in a thread, and clients take turns.

        size: in characters or tokens
        """
        if size <= _SHORT_CALL:
            return work()
        async with self.long_texts.turn(client):
            return await asyncio.to_thread(work)

    async def open(
        self,
        request: Request,
        parse: Callable[[bytes], T],
        call_of: Callable[[T], Awaitable[GenerateRequest]],
        in_words: Callable[[RequestError], RequestError] = lambda error: error,
    ) -> tuple[T, Call]:
        """Submits the call that a request asks for; returns its checked body and the call.

        call_of:  makes the call from the body, for instance by a chat template
        in_words: translates an error about SGLang's fields into the names of another API

        Raises RequestError, QueueFullError or UnavailableError.
        """
        terms: Terms = request.state.terms
        caller: Client = request.state.client
        client = str(caller)
        async with self.read(request, parse) as given:
            asked = self.degradation.apply(await call_of(given), self.bridge.book.queue, terms.degraded)
            asked = replace(asked, salt=caller.cache_salt(asked.salt))
            try:
                return given, await start_call(
                    asked, self.bridge, self.tokenizer, self.long_texts, terms.permit, client
                )
            except RequestError as error:
                raise in_words(error) from None
