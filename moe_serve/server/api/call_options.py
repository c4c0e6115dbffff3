"""The fields that `/v1/completions` and `/v1/chat/completions` share: OpenAI's, vLLM's and SGLang's. Torch-free.

A field that is not known is refused, as OpenAI does: a mistyped one that is ignored costs an afternoon. A known one
that is not supported is accepted with null or a value that asks for nothing.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.call_fields import first, priority, timeout
from moe_serve.server.api.constraint_fields import take_openai_constraint
from moe_serve.server.api.sampling_fields import NEUTRAL_PARAMS, OPENAI_NAMES, TakenParams, take_sampling_params
from moe_serve.server.api.schemas import SALT_SEPARATOR
from moe_serve.server.edge.json_fields import Fields, boolean, natural_number, short_name, show
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

REST_OF_CONTEXT = 2**31  # max_new_tokens of a request that names no length: reduced to what the model takes

# Known fields whose features are not supported: null, or one of these values, means "not asked for".
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_PARAMS,
    # OpenAI's
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    # vLLM's
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "logits_processors": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "guided_decoding_backend": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    # SGLang's
    "lora_path": (),
    "session_params": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "custom_logit_processor": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routing_key": (),
}
# They tell OpenAI something about the caller, and change no answer: any value is accepted.
NOTED_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
OTHER_WORDS: Mapping[str, str] = {  # names of the same fields in other APIs
    "text": "prompt",
    "input_ids": "prompt",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "stop_ids": "stop_token_ids",
    "timeout_s": "timeout",
}


@dataclass(frozen=True)
class CallOptions:
    """What a call asks for beside its prompts.

    model:            the client's name of it; None = whichever is served
    include_usage:    a stream ends with the numbers of tokens;  continuous_usage: each of its events has them
    rid:              how the client knows its request, chosen by the client or here
    """

    taken: TakenParams
    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    rid: str
    salt: str
    priority: int
    timeout_s: float | None
    rank: int | None

    def with_params(self, **params: Any) -> Self:
        """Returns the options with other sampling parameters."""
        return replace(self, taken=replace(self.taken, params=replace(self.taken.params, **params)))

    def call(self, prompts: list[tuple[str | None, list[int] | None]], add_special_tokens: bool) -> GenerateRequest:
        """Returns the call for prompts, each a text or token ids."""
        several = len(prompts) > 1
        return GenerateRequest(
            prompts=tuple(
                Prompt(
                    text=text,
                    token_ids=ids,
                    params=self.taken.params,
                    explicit_length=self.taken.explicit_length,
                    rid=f"{self.rid}-{i}" if several else self.rid,
                    session_id=None,
                    add_special_tokens=add_special_tokens,
                )
                for i, (text, ids) in enumerate(prompts)
            ),
            stream=self.stream,
            is_batch=True,
            salt=self.salt,
            rank=self.rank,
            priority=self.priority,
            timeout_s=self.timeout_s,
            incremental=True,
        )


def fields_of(content: dict[str, Any], more_neutral: Mapping[str, tuple[Any, ...]]) -> Fields:
    """Returns the fields of a body. more_neutral: of this route"""
    return Fields(content, "", {**NEUTRAL_FIELDS, **more_neutral}, OTHER_WORDS)


def take_options(values: Fields, default_tokens: int, prefix: str) -> CallOptions:
    """Takes the fields that both routes have.

    default_tokens: max_new_tokens of a body without a length;  prefix: of an id that the server chooses

    Raises RequestError with the field, its value and what was expected.
    """
    constraint = take_openai_constraint(values)
    taken = take_sampling_params(
        values, OPENAI_NAMES, SamplingParams(max_new_tokens=default_tokens, constraint=constraint)
    )
    stream = bool(values.take("stream", boolean))
    include_usage, continuous_usage = values.take("stream_options", _stream_options) or (False, False)
    salts = values.take("cache_salt", short_name), values.take("extra_key", short_name)
    for name in NOTED_FIELDS:
        values.take(name, lambda name, value: None)
    return CallOptions(
        taken=taken,
        model=values.take("model", model_name),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=bool(values.take("return_token_ids", boolean)),
        rid=first(values.take("rid", short_name), values.take("request_id", short_name), f"{prefix}{uuid.uuid4().hex}"),
        salt=SALT_SEPARATOR.join(salt for salt in salts if salt is not None),
        priority=values.take("priority", priority) or 0,
        timeout_s=values.take("timeout", timeout),
        rank=first(values.take("routed_dp_rank", natural_number), values.take("data_parallel_rank", natural_number)),
    )


def _stream_options(name: str, value: Any) -> tuple[bool, bool]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object", field=name)
    options = Fields(value, f"{name}.", {"include_obfuscation": (False,)}, {})
    include_usage = bool(options.take("include_usage", boolean))
    continuous_usage = bool(options.take("continuous_usage_stats", boolean))
    options.refuse_the_rest()
    return include_usage, include_usage and continuous_usage


def model_name(name: str, value: Any) -> str:
    """Checks the name of a model; which ones there are is known later."""
    if not isinstance(value, str):
        raise RequestError(f"{name} is {show(value)}, expected the name of a model", field=name)
    return value
