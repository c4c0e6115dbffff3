"""`/generate`: its body, in SGLang's names and with its defaults, and its answers with their log probabilities.

The parser refuses invalid values before a rank sees them, with one RequestError that names the field. In an answer the
first prompt token has null instead of a log probability, and null instead of a list.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta

from moe_serve.attention_dp.sampling_params import MAX_LOGPROB_IDS, MAX_SEED, SamplingParams
from moe_serve.engine.output.logprobs import Logprob, TokenLogprobs
from moe_serve.errors import RequestError
from moe_serve.server.api.generate import DONE, Call, CallResponse, Cursor, RequestPipeline, texts_of
from moe_serve.server.api.params import (
    OTHER_SGLANG_WORDS,
    SGLANG_DEFAULTS,
    SGLANG_NAMES,
    ParamNames,
    SglangParams,
    TakenParams,
    sampling_params,
    sglang_constraint,
)
from moe_serve.server.edge.body import Body, Count, FromPrefillServer, Name, OnlyFalse, TokenId, read_body, show
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.admission import MAX_PRIORITY
from moe_serve.server.requests.open_request import OpenRequest
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

SALT_SEPARATOR = "\0"  # a request may have cache_salt, extra_key or both; prefixes are shared where all are the same

Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, extra_json_schema={"default": 0})]
Timeout = Annotated[float, Meta(gt=0, extra={"expected": "seconds above 0"})]
_Start = Annotated[
    int,
    Meta(
        ge=-1,
        le=MAX_SEED,
        extra={"expected": "-1 (the output alone) or at least 0"},
        extra_json_schema={"default": -1},
    ),
]
_LogprobId = Annotated[TokenId, Meta(ge=0)]
_False = Annotated[bool, Meta(extra_json_schema={"default": False})]
T = TypeVar("T")


def add_generate(app: FastAPI, pipeline: RequestPipeline) -> None:
    """Adds /generate."""

    async def as_set(given: GenerateRequest) -> GenerateRequest:
        default = pipeline.bridge.config.server.incremental_stream_output
        return replace(given, incremental=default) if given.incremental is None else given

    @app.post("/generate")
    @app.put("/generate")
    async def generate(request: Request) -> Response:
        """SGLang's native generation: text or input_ids, single or batch, JSON or a stream."""
        parse = partial(parse_generate, max_prompts=pipeline.bridge.book.capacity)
        given, call = await pipeline.open(request, parse, as_set, LOGPROB_NAMES.translated)
        incremental = bool((await as_set(given)).incremental)
        text_of = texts_of(pipeline.tokenizer) if given.logprob_texts and pipeline.tokenizer is not None else _no_text
        answers = NativeAnswers(call, given.is_batch, incremental, text_of)
        return CallResponse(call, pipeline.bridge, answers, given.stream)


class StreamOptions(Body):
    """incremental: each event of a stream holds only what is new"""

    incremental: bool | None = None
    include_usage: bool | None = None


class GenerateBody(Body):
    """A call of /generate. A field of a prompt takes one value for all prompts, or a list with one for each."""

    other_words: ClassVar[Mapping[str, str]] = OTHER_SGLANG_WORDS
    example: ClassVar[Mapping[str, Any]] = {"text": "def ", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}

    text: str | list[str] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(extra={"expected": "a list of token ids"})] | None = None
    sampling_params: SglangParams | list[SglangParams | None] | None = None
    stream: _False | None = None
    stream_options: StreamOptions | None = None
    return_logprob: _False | list[bool | None] | None = None
    logprob_start_len: _Start | list[_Start | None] | None = None
    top_logprobs_num: Count | list[Count | None] | None = None
    token_ids_logprob: (
        Annotated[
            list[_LogprobId | Annotated[list[_LogprobId], Meta(max_length=MAX_LOGPROB_IDS)] | None],
            Meta(extra={"expected": "a list of token ids"}),
        ]
        | None
    ) = None
    return_text_in_logprobs: _False | None = None
    return_routed_experts: _False | list[bool | None] | None = None
    rid: Name | list[Name | None] | None = None
    session_id: Name | list[Name | None] | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    routed_dp_rank: Count | None = None
    data_parallel_rank: Count | None = None
    # Known in SGLang, and not supported.
    input_embeds: Annotated[None, Meta(extra={"instead": "send text or input_ids"})] = None
    image_data: None = None
    video_data: None = None
    audio_data: None = None
    modalities: None = None
    return_hidden_states: OnlyFalse | None = None
    log_metrics: bool | None = None
    lora_path: None = None
    custom_logit_processor: None = None
    routing_key: None = None
    bootstrap_host: FromPrefillServer = None
    bootstrap_port: FromPrefillServer = None
    bootstrap_room: FromPrefillServer = None


def parse_generate(body: bytes, max_prompts: int) -> GenerateRequest:
    """Returns the checked request in a JSON body. max_prompts: the server can never hold a longer batch.

    Raises RequestError with the field, its value and what was expected.
    """
    given = read_body(body, GenerateBody)
    if (given.text is None) == (given.input_ids is None):
        state = "neither is given" if given.text is None else "both are given"
        raise RequestError(f"exactly one of text and input_ids is needed, but {state}", field="text")
    field, value = ("text", given.text) if given.text is not None else ("input_ids", given.input_ids)
    has_list = is_batch(value)
    batch = prompts_of(field, value, max_prompts)

    def spread(name: str, value: T | list[T | None] | None) -> list[T | None]:
        return _one_for_each(name, value, len(batch), has_list)

    params = _params_of_each(given, spread("sampling_params", given.sampling_params))
    params = _with_logprobs(given, params, spread)
    for i, asks in enumerate(spread("return_routed_experts", given.return_routed_experts)):
        if asks:
            params[i] = replace(params[i], params=replace(params[i].params, return_routed_experts=True))
    rids, sessions = spread("rid", given.rid), spread("session_id", given.session_id)
    return GenerateRequest(
        prompts=tuple(
            Prompt(
                text=text,
                token_ids=ids,
                params=params[i].params,
                explicit_length=params[i].explicit_length,
                rid=rids[i],
                session_id=sessions[i],
            )
            for i, (text, ids) in enumerate(batch)
        ),
        stream=bool(given.stream),
        is_batch=has_list or any(each.params.n > 1 for each in params),
        salt=salt_of(given.cache_salt, given.extra_key),
        priority=given.priority or 0,
        timeout_s=given.timeout,
        incremental=None if given.stream_options is None else given.stream_options.incremental,
        logprob_texts=bool(given.return_text_in_logprobs),
        rank=first(given.routed_dp_rank, given.data_parallel_rank),
    )


def is_batch(value: Any) -> bool:
    """Returns whether a value is a list of prompts rather than one prompt."""
    return isinstance(value, list) and (not value or not isinstance(value[0], int))


def prompts_of(field: str, value: Any, max_prompts: int) -> list[tuple[str | None, list[int] | None]]:
    """Returns the prompts in a field, each a text or token ids. max_prompts: the server can never hold a longer batch

    Raises RequestError for no prompt, too many, or of several kinds.
    """
    batch = value if is_batch(value) else [value]
    if len(batch) > max_prompts:
        raise RequestError(
            f"{field} has {len(batch)} prompts but at most {max_prompts} requests are held at a time "
            "(engine.max_running_requests x ranks + engine.max_queued_requests); send fewer at once",
            field=field,
        )
    if not batch:
        raise RequestError(f"{field} is an empty list, expected at least one prompt", field=field)
    items = value if isinstance(value, list) else batch
    if len(set(map(type, items))) > 1:
        kind = type(items[0])
        wrong = next(i for i, item in enumerate(items) if type(item) is not kind)
        expected = {int: "a token id", str: "a string"}.get(kind, "a list of token ids")
        name = f"{field}[{wrong}]"
        raise RequestError(f"{name} is {show(items[wrong])}, expected {expected} as before it", field=name)
    return [(each, None) if isinstance(each, str) else (None, each) for each in batch]


def salt_of(*given: str | None) -> str:
    """Returns the salt of a call's prefixes, which joins all given names."""
    return SALT_SEPARATOR.join(each for each in given if each is not None)


def first(*values: T | None) -> T | None:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def _one_for_each(name: str, value: Any, count: int, has_list: bool) -> list[Any]:
    """Returns one value for each prompt: from a list of them, or one value for all."""
    if not isinstance(value, list):
        return [value] * count
    if not has_list:
        raise RequestError(f"{name} is a list but there is one prompt; send a single value", field=name)
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts; send one for each", field=name)
    return value


def _params_of_each(given: GenerateBody, params: Sequence[SglangParams | None]) -> list[TakenParams]:
    if not isinstance(given.sampling_params, list):
        return [_params_of("sampling_params", given.sampling_params)] * len(params)
    return [_params_of(f"sampling_params[{i}]", each) for i, each in enumerate(params)]


def _params_of(path: str, given: SglangParams | None) -> TakenParams:
    if given is None:
        return TakenParams(SGLANG_DEFAULTS)
    constraint = sglang_constraint(given, f"{path}.")
    defaults = SGLANG_DEFAULTS if constraint is None else replace(SGLANG_DEFAULTS, constraint=constraint)
    return sampling_params(given, SGLANG_NAMES, defaults, f"{path}.")


# The fields of /generate that stand for the log probabilities of SamplingParams, for errors.
LOGPROB_NAMES = ParamNames(
    {
        "logprobs": ("top_logprobs_num",),
        "prompt_logprobs": ("top_logprobs_num",),
        "prompt_logprobs_start": ("logprob_start_len",),
        "logprob_token_ids": ("token_ids_logprob",),
    }
)


def _with_logprobs(given: GenerateBody, params: list[TakenParams], spread: Any) -> list[TakenParams]:
    """Returns parameters with the log probabilities that each prompt asks for.

    Raises RequestError too if the body asks for numbers while return_logprob is not true.
    """
    if given.return_logprob is given.top_logprobs_num is given.logprob_start_len is given.token_ids_logprob is None:
        return params
    wanted = spread("return_logprob", given.return_logprob)
    num_top = spread("top_logprobs_num", given.top_logprobs_num)
    starts = spread("logprob_start_len", given.logprob_start_len)
    ids = _logprob_ids_of_each(given.token_ids_logprob, len(params))
    for name, values in (("top_logprobs_num", num_top), ("token_ids_logprob", ids)):
        if any(each and not asks for each, asks in zip(values, wanted, strict=True)):
            raise RequestError(
                f"{name} is given, but return_logprob is not true; set it, or leave {name} out", field=name
            )
    if not any(wanted):
        return params

    def added(params: SamplingParams, num_top: int, start: int | None, ids: tuple[int, ...]) -> SamplingParams:
        first = None if start == -1 else start
        return replace(
            params,
            logprobs=num_top,
            prompt_logprobs=None if first is None else num_top,
            prompt_logprobs_start=first or 0,
            logprob_token_ids=ids,
        )

    return [
        replace(each, params=added(each.params, num_top[i] or 0, starts[i], ids[i])) if wanted[i] else each
        for i, each in enumerate(params)
    ]


def _logprob_ids_of_each(given: list[Any] | None, num_prompts: int) -> list[tuple[int, ...]]:
    """Returns the ids of each prompt, from a list for all or a list of lists."""
    name = "token_ids_logprob"
    if given is None:
        return [()] * num_prompts
    if not any(item is None or isinstance(item, list) for item in given):
        if len(given) > MAX_LOGPROB_IDS:
            most = f"at most {MAX_LOGPROB_IDS} are taken"
            raise RequestError(f"{name} has {len(given)} entries, {most}; send fewer", field=name)
        return [tuple(given)] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"{name} has {len(given)} lists for {num_prompts} prompts; send one for each", field=name)
    wrong = next((i for i, each in enumerate(given) if isinstance(each, int)), None)
    if wrong is not None:
        raise RequestError(f"{name}[{wrong}] is {given[wrong]}, expected a list of token ids", f"{name}[{wrong}]")
    return [tuple(each or ()) for each in given]


_AT_ONCE = 4096  # tokens that are encoded in one go, so that other threads run during a long answer

TextOf = Callable[[int], str | None]


def _no_text(token_id: int) -> None:
    """Returns None for every token, for clients that do not ask for texts."""


def of_prompt(request: OpenRequest, text_of: TextOf) -> dict[str, msgspec.Raw]:
    """Returns the fields of `meta_info` about the prompt computed so far; empty lists if they were not asked for."""
    entries, spec = request.prompt_logprobs, request.spec
    if entries is None:
        none = TokenLogprobs(spec.params.logprobs or 0, spec.params.logprob_token_ids)
        return _fields("input", none, [], text_of, 0)
    start = spec.params.prompt_logprobs_start
    return _fields("input", entries, spec.prompt_ids[start : start + 1 + len(entries)], text_of, 0, has_first=True)


def of_output(request: OpenRequest, text_of: TextOf, begin: int = 0) -> dict[str, msgspec.Raw]:
    """Returns the fields of `meta_info` about the output from token `begin` on."""
    entries = request.output_logprobs
    assert entries is not None, "it asks for none"
    return _fields("output", entries, request.matcher.output_ids, text_of, begin)


def _fields(
    name: str, entries: TokenLogprobs, ids: Sequence[int], text_of: TextOf, begin: int, has_first: bool = False
) -> dict[str, msgspec.Raw]:
    """has_first: the first of ids has no entry"""
    behind = int(has_first)

    def own(i: int) -> list[Any]:
        return [None if i < behind else entries.logprob(i - behind), ids[i], text_of(ids[i])]

    def listed(find: Callable[[int], list[Logprob]]) -> Callable[[int], list[list[Any]] | None]:
        def at(i: int) -> list[list[Any]] | None:
            if i < behind:
                return None
            return [[each.logprob, each.token_id, text_of(each.token_id)] for each in find(i - behind)]

        return at

    places = range(begin, len(ids))
    found = {f"{name}_token_logprobs": _encoded(own, places)}
    if entries.num_top:
        found[f"{name}_top_logprobs"] = _encoded(listed(entries.top), places)
    if entries.token_ids:
        found[f"{name}_token_ids_logprobs"] = _encoded(listed(entries.of_ids), places)
    return found


def _encoded(make: Callable[[int], Any], places: range) -> msgspec.Raw:
    def parts() -> Iterator[bytes]:
        for first in range(0, len(places), _AT_ONCE):
            yield msgspec.json.encode([make(i) for i in places[first : first + _AT_ONCE]])[1:-1]

    return msgspec.Raw(b"[" + b",".join(parts()) + b"]")


WEIGHT_VERSION = "default"  # weights do not change while serving


class NativeAnswers:
    """An object for each request, or a list of them; see `generate.Answers`."""

    ends_at_failure = False

    def __init__(self, call: Call, is_batch: bool, incremental: bool, text_of: TextOf):
        """is_batch: the answer is a list;  incremental: events hold only what is new, not all text and ids again

        text_of: texts of tokens beside their log probabilities
        """
        self._is_batch = is_batch
        self._cursors = [Cursor() for _ in call.requests] if incremental else None
        self._text_of = text_of

    def whole(self, call: Call) -> bytes:
        results = [self._result(request, rid) for request, rid in zip(call.requests, call.client_ids, strict=True)]
        return json_bytes(results if self._is_batch else results[0])

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        chunk: dict[str, Any]
        if request.failure is not None:
            chunk = error_of(request.failure)
        else:
            cursor = Cursor() if self._cursors is None else self._cursors[index]
            chunk = self._result(request, call.client_ids[index], cursor.num_tokens)
            chunk["text"], chunk["output_ids"] = cursor.advance(request)
        if self._is_batch:
            chunk["index"] = index
        return b"data: " + json_bytes(chunk) + b"\n\n"

    def _result(self, request: OpenRequest, rid: str, begin: int = 0) -> dict[str, Any]:
        """Returns the object of a request. begin: the first token whose log probabilities are shown"""
        found = result(request, rid)
        if request.output_logprobs is not None and request.spec.shows_logprobs:
            if not begin:  # those of the prompt are complete by now
                found["meta_info"] |= of_prompt(request, self._text_of)
            found["meta_info"] |= of_output(request, self._text_of, begin)
        return found

    def end(self, call: Call) -> bytes:
        return DONE


def result(request: OpenRequest, rid: str) -> dict[str, Any]:
    """Returns the `/generate` object of one request: everything so far, in a stream too (`text` is cumulative)."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": finish_reason(request),
        "prompt_tokens": len(request.spec.prompt_ids),
        "completion_tokens": request.num_output,
        "cached_tokens": request.num_cached,
        "weight_version": WEIGHT_VERSION,
        "dp_rank": request.rank,
    }
    if request.route is not None:
        meta["route"] = request.route
    if request.routed_experts is not None and request.is_done:
        meta["routed_experts"] = request.routed_experts.as_json(request.num_routed)
    if request.num_changed is not None:
        meta["experts_over_capacity"] = request.num_changed
    if request.finished_s is not None:
        meta["e2e_latency"] = request.finished_s - request.submitted_s
    return {"text": request.matcher.text, "output_ids": request.matcher.output_ids, "meta_info": meta}


def finish_reason(request: OpenRequest) -> dict[str, Any] | None:
    """Returns why a request ended, None while it runs."""
    if request.failure is not None:
        return {"type": "abort", "message": str(request.failure)}
    reason = request.matcher.finish_reason
    if reason is None:
        return None
    if reason.kind == "abort":
        return {"type": "abort", "message": str(reason.matched)}
    if reason.kind == "length":
        return {"type": "length", "length": request.num_output}
    return {"type": "stop", "matched": reason.matched}
