"""The body of `/generate`, in SGLang's names and with its defaults, made a `GenerateRequest`.

Invalid values are refused here, before a rank sees them, with one RequestError that names the field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta

from moe_serve.attention_dp.sampling_params import MAX_LOGPROB_IDS, MAX_SEED, SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.constraint_fields import sglang_constraint
from moe_serve.server.api.sampling_fields import (
    OTHER_SGLANG_WORDS,
    SGLANG_DEFAULTS,
    SGLANG_NAMES,
    ParamNames,
    SglangParams,
    TakenParams,
    sampling_params,
)
from moe_serve.server.edge.json_body import Body, Count, Name, OnlyFalse, TokenId, read_body, show
from moe_serve.server.requests.admission import MAX_PRIORITY
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


class StreamOptions(Body):
    """How events of a stream are. incremental: each has only what is new"""

    incremental: bool | None = None
    include_usage: bool | None = None


class GenerateBody(Body):
    """A call of /generate. A field that prompts may have of their own takes one value for all, or a list of them."""

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
    return_routed_experts: OnlyFalse | None = None
    log_metrics: bool | None = None
    lora_path: None = None
    custom_logit_processor: None = None
    routing_key: None = None
    bootstrap_host: None = None
    bootstrap_port: None = None
    bootstrap_room: None = None


def parse_generate(body: bytes, max_prompts: int) -> GenerateRequest:
    """Returns the checked request in a JSON body. max_prompts: a longer batch can never be accepted.

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
    """Returns whether a value is a list of prompts, and not one prompt."""
    return isinstance(value, list) and (not value or not isinstance(value[0], int))


def prompts_of(field: str, value: Any, max_prompts: int) -> list[tuple[str | None, list[int] | None]]:
    """Returns the prompts in a field, each a text or token ids. max_prompts: a longer batch can never be accepted

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
    """Returns the salt of a call's prefixes, of all names that are given."""
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
    return sampling_params(given, SGLANG_NAMES, replace(SGLANG_DEFAULTS, constraint=constraint), f"{path}.")


# What errors about the log probabilities of SamplingParams are to name.
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

    Raises RequestError also for numbers that nobody would get, since return_logprob is not true.
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
