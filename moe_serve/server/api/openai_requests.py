"""The bodies of OpenAI's completions and chat: JSON bytes in, checked values out.

A field that is not known is refused, as OpenAI does: a mistyped one that is ignored costs an afternoon. A known one
that is not supported is accepted with null or a value that asks for nothing.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from moe_serve.attention_dp.sampling_params import SamplingParams
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
from moe_serve.server.api.constraint_fields import take_openai_constraint
from moe_serve.server.api.messages import MAX_DEPTH, ChatPrompt, take_chat_prompt
from moe_serve.server.api.sampling_fields import NEUTRAL_PARAMS, OPENAI_NAMES, TakenParams, take_sampling_params
from moe_serve.server.api.schemas import SALT_SEPARATOR
from moe_serve.server.api.tool_fields import ReasoningUse, ToolUse, take_reasoning_use, take_tool_use
from moe_serve.server.edge.json_fields import Fields, boolean, natural_number, parse_nested_object, short_name, show
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

REST_OF_CONTEXT = 2**31  # max_new_tokens of a request that names no length: reduced to what the model takes

# Known fields whose features are not supported: null, or one of these values, means "not asked for".
OPENAI_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
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
    return Fields(content, "", {**OPENAI_NEUTRAL_FIELDS, **more_neutral}, OTHER_WORDS)


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


CHAT_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


@dataclass(frozen=True)
class ChatRequest:
    """One call of `/v1/chat/completions`."""

    prompt: ChatPrompt
    options: CallOptions
    tools: ToolUse
    reasoning: ReasoningUse
    logprobs: bool = False  # choices have log probabilities


def parse_chat(body: bytes, max_prompts: int) -> ChatRequest:
    """Returns the checked request in a JSON body. max_prompts: of a batch, which a chat never is

    Raises RequestError with the field, its value and what was expected.
    """
    return check_chat(parse_nested_object(body, MAX_DEPTH), "chatcmpl-")


def check_chat(content: dict[str, Any], id_prefix: str) -> ChatRequest:
    """Returns the checked request of a JSON object. id_prefix: of the id that the server gives it"""
    values = fields_of(content, CHAT_NEUTRAL_FIELDS)
    prompt = take_chat_prompt(values)
    options = take_options(values, REST_OF_CONTEXT, id_prefix)
    if not prompt.messages:
        raise RequestError("messages is an empty list, expected at least one message", field="messages")
    logprobs = bool(values.take("logprobs", boolean))
    num_top = values.take("top_logprobs", natural_number) or 0
    tools = take_tool_use(values, prompt.tools)
    reasoning = take_reasoning_use(values)
    values.refuse_the_rest()
    if num_top and not logprobs:
        raise RequestError("top_logprobs is given, but logprobs is not true; set it", field="top_logprobs")
    if logprobs:
        options = options.with_params(logprobs=num_top)
    if (constraint := tools.constraint()) is not None:
        options = options.with_params(constraint=constraint)
        options.taken.params.validate()
    if tools.choice == "none":
        prompt = replace(prompt, tools=None)  # a model that reads of tools would call them
    return ChatRequest(prompt, options, tools, reasoning, logprobs)


_DEFAULT_TOKENS = 16  # OpenAI's, and so vLLM's and SGLang's; null asks for the rest of the context
COMPLETION_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
}


@dataclass(frozen=True)
class CompletionRequest:
    """One call of `/v1/completions`.

    echo:            texts begin with their prompts
    logprobs:        choices have log probabilities;  prompt_logprobs: and those of the prompt in vLLM's form
    """

    call: GenerateRequest
    options: CallOptions
    echo: bool
    logprobs: bool
    prompt_logprobs: bool


def parse_completion(body: bytes, max_prompts: int) -> CompletionRequest:
    """Returns the checked request in a JSON body. max_prompts: a longer batch can never be accepted.

    Raises RequestError with the field, its value and what was expected.
    """
    content = parse_nested_object(body, MAX_DEPTH)
    check_num_prompts("prompt", content.get("prompt"), max_prompts)
    values = fields_of(content, COMPLETION_NEUTRAL_FIELDS)
    prompts = values.take("prompt", _prompts)
    if prompts is None:
        raise RequestError("prompt is missing; send a text, a list of texts, or token ids", field="prompt")
    names_length = any(name in content for name in ("max_tokens", "max_completion_tokens"))
    options = take_options(values, REST_OF_CONTEXT if names_length else _DEFAULT_TOKENS, "cmpl-")
    add_special_tokens = values.take("add_special_tokens", boolean)
    echo = bool(values.take("echo", boolean))
    of_output = values.take("logprobs", natural_number)
    of_prompt = values.take("prompt_logprobs", natural_number)
    values.refuse_the_rest()
    counts = [count for count in (of_output if echo else None, of_prompt) if count is not None]
    options = options.with_params(logprobs=of_output, prompt_logprobs=max(counts, default=None))
    call = options.call(prompts, add_special_tokens is not False)
    return CompletionRequest(call, options, echo, of_output is not None, of_prompt is not None)


def _prompts(name: str, value: Any) -> list[tuple[str | None, list[int] | None]]:
    """Checks one prompt or several, each a text or a list of token ids."""
    several = value if is_batch(value) else [value]
    if not several:
        raise RequestError(f"{name} is an empty list, expected at least one prompt", field=name)
    if isinstance(several[0], str):
        text_or_texts(name, value)
        return [(text, None) for text in several]
    if isinstance(several[0], list):
        ids_or_batch(name, value)
        return [(None, ids) for ids in several]
    raise RequestError(
        f"{name} is {show(value)}, expected a string, a list of strings, token ids, or a list of lists of them",
        field=name,
    )
