"""`/generate`: submits the requests of a checked body, and sends their results as one JSON answer or a stream.

When the client disconnects, its requests are aborted and free what they hold.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_serve.engine.messages import ModelLimits
from moe_serve.errors import MoeServeError, QueueFullError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.answers import Shown, error_of, result, status_of
from moe_serve.server.bridge import Bridge
from moe_serve.server.client_limits import Permit
from moe_serve.server.open_request import Changes, OpenRequest, RequestSpec
from moe_serve.server.prompts import derived_seed, draw_seed, encode_prompt, fit_to_model, with_bad_words
from moe_serve.server.schemas import GenerateRequest, Prompt

_SHORT_CALL = 4096  # characters of all prompts; a longer call is tokenized in a thread
_DONE = b"data: [DONE]\n\n"

json_bytes = msgspec.json.encode


@dataclass(frozen=True)
class Call:
    """The open requests of one HTTP call, in the order of its answer, and the id that the client knows each by."""

    requests: Sequence[OpenRequest]
    rids: Sequence[str]
    changes: Changes
    is_batch: bool
    permit: Permit | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and outputs, without requests that failed before their first one."""
        started = [request for request in self.requests if request.num_output or request.failure is None]
        return sum(len(request.spec.prompt_ids) + request.num_output for request in started)


async def start_call(
    given: GenerateRequest, bridge: Bridge, tokenizer: Tokenizer | None, permit: Permit | None = None
) -> Call:
    """Submits all requests of a call, or none. Raises RequestError, QueueFullError or UnavailableError.

    permit: of a client with limits
    """
    limits = bridge.limits
    specs: list[RequestSpec] = []
    rids: list[str] = []
    for prompt, prompt_ids in await _tokenize(given.prompts, tokenizer, limits):
        params = fit_to_model(prompt, prompt_ids, limits)
        seed = draw_seed() if params.seed is None else params.seed
        rid = prompt.rid or uuid.uuid4().hex
        for sample in range(prompt.num_samples):
            rids.append(rid if prompt.num_samples == 1 else f"{rid}-{sample}")
            specs.append(
                RequestSpec(
                    prompt_ids=prompt_ids,
                    params=params,
                    seed=derived_seed(seed, sample),
                    salt=given.salt,
                    session_id=prompt.session_id,
                    rank=given.rank,
                    priority=given.priority,
                    rid=rids[-1],
                    timeout_s=given.timeout_s,
                )
            )
    if permit is not None:
        permit.take(len(specs), sum(spec.num_tokens for spec in specs), time.monotonic())
    changes = Changes(ends_only=not given.stream)
    return Call(bridge.submit(specs, changes), rids, changes, given.is_batch, permit)


async def _tokenize(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, limits: ModelLimits
) -> Sequence[tuple[Prompt, list[int]]]:
    """Returns the prompts with the ids of their bad words, and the ids of each.

    Encodes long texts in a thread, so that other clients are served meanwhile.
    """

    def work() -> list[tuple[Prompt, list[int]]]:
        return [(each, encode_prompt(each, tokenizer, limits)) for each in with_bad_words(prompts, tokenizer)]

    num_chars = sum(len(prompt.text or "") + 2 * sum(map(len, prompt.params.bad_words)) for prompt in prompts)
    return work() if num_chars <= _SHORT_CALL else await asyncio.to_thread(work)


class GenerateResponse(Response):
    """The answer to one call, as JSON or server-sent events. When it ends, for any reason, it aborts what is open."""

    def __init__(self, call: Call, bridge: Bridge, stream: bool, incremental: bool = False):
        """incremental: events of the stream hold only what is new, not all text and ids again"""
        super().__init__()
        self._shown = [Shown() for _ in call.requests] if incremental else None
        self._call = call
        self._bridge = bridge
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future(self._send_stream(send) if self._stream else self._send_json(send))
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
                self._bridge.abort(request)
            if self._call.permit is not None:
                self._call.permit.use(self._call.num_tokens)

    async def _send_json(self, send: Send) -> None:
        call = self._call
        left = len(call.requests)
        while left:
            request = await call.changes.next()
            if request.failure is not None:
                break
            left -= request.is_done
        failure = next((request.failure for request in call.requests if request.failure is not None), None)
        if failure is not None:
            await error_response(failure)({"type": "http"}, _no_receive, send)
            return
        results = [result(request, rid) for request, rid in zip(call.requests, call.rids, strict=True)]
        body = json_bytes(results if call.is_batch else results[0])
        await Response(body, media_type="application/json")({"type": "http"}, _no_receive, send)

    async def _send_stream(self, send: Send) -> None:
        call = self._call
        index_of = {request.request_id: index for index, request in enumerate(call.requests)}
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        left = len(call.requests)
        has_begun = False
        while left:
            request = await call.changes.next()
            if not has_begun:  # not earlier: while a request waits, only a call without headers shows that it was left
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                has_begun = True
            index = index_of[request.request_id]
            chunk: dict[str, Any]
            if request.failure is not None:
                chunk = error_of(request.failure)
            else:
                chunk = result(request, call.rids[index])
                if self._shown is not None:
                    chunk = self._shown[index].rest(chunk)
            if call.is_batch:
                chunk["index"] = index
            left -= request.is_done
            await _send_part(send, b"data: " + json_bytes(chunk) + b"\n\n")
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


def error_response(error: MoeServeError) -> Response:
    """Returns the answer for an error."""
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = retry_after(error)
    elif status_of(error) == 503:
        headers["Retry-After"] = "1"
    return Response(json_bytes(error_of(error)), status_of(error), headers, media_type="application/json")


def retry_after(error: QueueFullError) -> str:
    """Returns the value of a header: whole seconds, at least one."""
    return str(max(1, math.ceil(error.retry_after_s)))


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _client_left(receive: Receive) -> None:
    """Returns once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _no_receive() -> Any:
    raise AssertionError("a plain response reads nothing")
