"""Parses the body of `/generate`: JSON bytes in, checked values out. SGLang's names and defaults.

Invalid values are refused here, before a rank sees them, with one RequestError that names the field. A known field
whose feature is not supported is accepted only with null or its neutral value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.server.api.call_fields import (
    check_num_prompts,
    first,
    ids_or_batch,
    is_batch,
    priority,
    text_or_texts,
    timeout,
)
from moe_serve.server.api.constraint_fields import take_sglang_constraint
from moe_serve.server.api.logprob_fields import take_logprob_fields
from moe_serve.server.api.sampling_fields import (
    NEUTRAL_PARAMS,
    SGLANG_DEFAULTS,
    SGLANG_NAMES,
    TakenParams,
    take_sampling_params,
)
from moe_serve.server.edge.json_fields import Fields, boolean, natural_number, parse_object, short_name, show
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

SALT_SEPARATOR = "\0"  # a request may have cache_salt, extra_key or both; prefixes are shared where all are the same

# Fields of SGLang whose features are not supported: null, or one of these values, means "not asked for".
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "modalities": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "log_metrics": (False, True),
    "lora_path": (),
    "custom_logit_processor": (),
    "routing_key": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}
OTHER_WORDS: Mapping[str, str] = {  # names of the same fields in other APIs
    "prompt": "text",
    "prompt_ids": "input_ids",
    "token_ids": "input_ids",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
    "stop_ids": "stop_token_ids",
}


def parse_generate(body: bytes, max_prompts: int) -> GenerateRequest:
    """Returns the checked request in a JSON body. max_prompts: a longer batch can never be accepted.

    Raises RequestError with the field, its value and what was expected.
    """
    content = parse_object(body)
    # First, since a small body can hold millions of prompts, and checking each would stall all other clients.
    for field in ("text", "input_ids"):
        check_num_prompts(field, content.get(field), max_prompts)
    values = Fields(content, "", NEUTRAL_FIELDS, OTHER_WORDS)
    texts = values.take("text", text_or_texts)
    ids = values.take("input_ids", ids_or_batch)
    if (texts is None) == (ids is None):
        if texts is None and content.get("input_embeds") is not None:
            raise RequestError("input_embeds is not supported; send text or input_ids", field="input_embeds")
        given = "both are given" if texts is not None else "neither is given"
        raise RequestError(f"exactly one of text and input_ids is needed, but {given}", field="text")
    given_batch, field = (texts, "text") if texts is not None else (ids, "input_ids")
    batch: Sequence[Any] = given_batch if is_batch(given_batch) else [given_batch]
    if not batch:
        raise RequestError(f"{field} is an empty list, expected at least one prompt", field=field)
    has_list = is_batch(given_batch)

    def spread(name: str, check: Callable[[str, Any], Any]) -> list[Any]:
        return _one_for_each(name, values.take(name, lambda name, value: value), len(batch), has_list, check)

    params = [_parse_params(name, value) for name, value in spread("sampling_params", lambda n, v: (n, v))]
    rids, sessions = spread("rid", short_name), spread("session_id", short_name)
    salts = values.take("cache_salt", short_name), values.take("extra_key", short_name)
    logprobs = take_logprob_fields(values, spread, len(batch))
    request = GenerateRequest(
        prompts=tuple(
            Prompt(
                text=item if field == "text" else None,
                token_ids=list(item) if field == "input_ids" else None,
                params=logprobs[i].added_to(params[i].params),
                explicit_length=params[i].explicit_length,
                rid=rids[i],
                session_id=sessions[i],
            )
            for i, item in enumerate(batch)
        ),
        stream=bool(values.take("stream", boolean)),
        is_batch=has_list or any(item.params.n > 1 for item in params),
        salt=SALT_SEPARATOR.join(salt for salt in salts if salt is not None),
        priority=values.take("priority", priority) or 0,
        timeout_s=values.take("timeout", timeout),
        incremental=values.take("stream_options", _stream_options),
        logprob_texts=bool(values.take("return_text_in_logprobs", boolean)),
        rank=first(values.take("routed_dp_rank", natural_number), values.take("data_parallel_rank", natural_number)),
    )
    values.refuse_the_rest()
    return request


def _parse_params(name: str, given: Any) -> TakenParams:
    if given is None:
        return TakenParams(SGLANG_DEFAULTS)
    if not isinstance(given, dict):
        raise RequestError(f"{name} is {show(given)}, expected an object", field=name)
    values = Fields(given, f"{name}.", NEUTRAL_PARAMS, OTHER_WORDS)
    defaults = replace(SGLANG_DEFAULTS, constraint=take_sglang_constraint(values))
    taken = take_sampling_params(values, SGLANG_NAMES, defaults)
    values.refuse_the_rest()
    return taken


def _one_for_each(name: str, value: Any, count: int, is_batch: bool, check: Callable[[str, Any], Any]) -> list[Any]:
    """Returns one checked value for each prompt: from a list of them, or one value for all."""
    if not isinstance(value, list):
        return [check(name, value) if value is not None or name == "sampling_params" else None] * count
    if not is_batch:
        raise RequestError(f"{name} is a list but there is one prompt; send a single value", field=name)
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts; send one for each", field=name)
    wants_none = name == "sampling_params"
    return [None if item is None and not wants_none else check(f"{name}[{i}]", item) for i, item in enumerate(value)]


def _stream_options(name: str, value: Any) -> bool | None:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object", field=name)
    options = Fields(value, f"{name}.", {"include_usage": (False, True)}, {})
    incremental = options.take("incremental", boolean)
    options.refuse_the_rest()
    return None if incremental is None else bool(incremental)
