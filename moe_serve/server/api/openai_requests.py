"""The bodies of OpenAI's completions and chats, and of vLLM's /tokenize and /detokenize.

An unknown field is refused, as at OpenAI: a typo that is ignored costs an afternoon. A known field whose feature is not
supported is accepted with null, or with a value that asks for nothing.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from msgspec import UNSET, Meta, UnsetType

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.messages import ChatPrompt, Documents, Kwargs, Messages, Template, Tools, chat_prompt
from moe_serve.server.api.native import Priority, Timeout, first, prompts_of, salt_of
from moe_serve.server.api.params import (
    OPENAI_NAMES,
    Choices,
    JsonSchema,
    ResponseFormat,
    Samples,
    SamplingFields,
    Seed,
    StructuredOutputs,
    TakenParams,
    Text,
    openai_constraint,
    sampling_params,
)
from moe_serve.server.api.tool_fields import EXAMPLE_CHOICE, ReasoningUse, ToolUse, allowed, as_functions, tool_use
from moe_serve.server.edge.body import (
    Body,
    Count,
    FromPrefillServer,
    Name,
    Only,
    OnlyEmpty,
    OnlyFalse,
    OnlyOne,
    TokenId,
    read_body,
)
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

REST_OF_CONTEXT = 2**31  # max_new_tokens of a request that names no length: reduced to what the model takes
_DEFAULT_TOKENS = 16  # of completions: OpenAI's, and so vLLM's and SGLang's; null asks for the rest of the context

Model = Annotated[str, Meta(extra={"expected": "the name of a model"})]
Noted = Annotated[Any, Meta(description="changes no answer")]  # it tells OpenAI something about the caller
_Length = Annotated[Count, Meta(description="without it: 16, or in a chat all that fits")]


class OnlyText(Only):
    values = (["text"],)


class OnlyNoCall(Only):
    values = ("none", "auto")


class OpenAiStreamOptions(Body):
    """include_usage: a stream ends with token counts;  continuous_usage_stats: every event has them"""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class OpenAiCall(SamplingFields):
    """The fields of all of OpenAI's routes, with those that vLLM and SGLang add."""

    other_words: ClassVar[Mapping[str, str]] = {  # names of the same fields in other APIs
        "text": "prompt",
        "input_ids": "prompt",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "stop_ids": "stop_token_ids",
        "timeout_s": "timeout",
    }

    model: Model | None = None
    min_tokens: Count | None = None
    seed: Seed | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: OpenAiStreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    rid: Name | None = None
    request_id: Name | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    routed_dp_rank: Count | None = None
    data_parallel_rank: Count | None = None
    user: Noted = None
    metadata: Noted = None
    safety_identifier: Noted = None
    prompt_cache_key: Noted = None
    prompt_cache_retention: Noted = None
    service_tier: Noted = None
    verbosity: Noted = None
    prediction: Noted = None
    client_metadata: Noted = None
    store: Annotated[Any, Meta(description="changes no answer: nothing is stored")] = None
    guided_decoding_backend: Noted = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Annotated[str, Meta(min_length=1)] | None = None
    # Known in OpenAI's API, and not supported.
    modalities: OnlyText | None = None
    audio: None = None
    web_search_options: None = None
    # In vLLM's.
    use_beam_search: OnlyFalse | None = None
    length_penalty: OnlyOne | None = None
    early_stopping: OnlyFalse | None = None
    truncate_prompt_tokens: None = None
    logits_processors: None = None
    mm_processor_kwargs: None = None
    media_io_kwargs: None = None
    thinking_token_budget: None = None
    repetition_detection: None = None
    kv_transfer_params: FromPrefillServer = None
    vllm_xargs: OnlyEmpty | None = None
    # In SGLang's.
    lora_path: None = None
    session_params: None = None
    return_hidden_states: OnlyFalse | None = None
    custom_logit_processor: None = None
    bootstrap_host: FromPrefillServer = None
    bootstrap_port: FromPrefillServer = None
    bootstrap_room: FromPrefillServer = None
    routing_key: None = None


class CompletionBody(OpenAiCall, kw_only=True):
    """A call of /v1/completions: text or token ids, one prompt or several."""

    example: ClassVar[Mapping[str, Any]] = {"model": "demo", "prompt": "def ", "max_tokens": 16, "temperature": 0}

    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(
            extra={
                "expected": "a string, a list of strings, token ids, or a list of lists of them",
                "missing": "send a text, a list of texts, or token ids",
            }
        ),
    ]
    n: Samples | None = None
    max_tokens: _Length | UnsetType | None = UNSET
    max_completion_tokens: _Length | UnsetType | None = UNSET
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    suffix: OnlyEmpty | None = None
    prompt_embeds: None = None


class ChatFields(OpenAiCall):
    """The fields of chats that /v1/responses has by the same names."""

    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    documents: Documents | None = None
    chat_template: Template | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Kwargs | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    stream_reasoning: bool | None = None


class ChatBody(ChatFields, kw_only=True):
    """A call of /v1/chat/completions."""

    example: ClassVar[Mapping[str, Any]] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "def "}],
        "max_tokens": 16,
    }

    messages: Messages
    n: Samples | None = None
    max_tokens: _Length | UnsetType | None = UNSET
    max_completion_tokens: _Length | UnsetType | None = UNSET
    response_format: ResponseFormat | None = None
    reasoning_effort: Name | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tool_choice: (
        Annotated[
            str | dict[str, Any],
            Meta(
                description="none, auto, required, or a tool",
                extra={"expected": f"none, auto, required, or an object such as {EXAMPLE_CHOICE}"},
            ),
        ]
        | None
    ) = None
    prompt_logprobs: None = None
    echo: OnlyFalse | None = None
    functions: OnlyEmpty | None = None
    function_call: OnlyNoCall | None = None


@dataclass(frozen=True)
class CallOptions:
    """What a call asks for apart from its prompts.

    model:         the client's name for it; None = whichever is served
    include_usage: a stream ends with token counts;  continuous_usage: every event has them
    tokens_as_ids: log probabilities name each token by its id, as "token_id:5"
    rid:           id of the request, chosen by the client or here
    """

    taken: TakenParams
    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
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


def call_options(given: CompletionBody | ChatBody, default_tokens: int, prefix: str) -> CallOptions:
    """Returns what a body asks for apart from its prompts.

    default_tokens: max_new_tokens of a body without a length;  prefix: of ids that the server draws

    Raises RequestError with the field, its value and what was expected.
    """
    defaults = SamplingParams(
        max_new_tokens=default_tokens,
        constraint=openai_constraint(given),
        return_routed_experts=bool(given.return_routed_experts),
    )
    stream = given.stream_options or OpenAiStreamOptions()
    return CallOptions(
        taken=sampling_params(given, OPENAI_NAMES, defaults),
        model=given.model,
        stream=bool(given.stream),
        include_usage=bool(stream.include_usage),
        continuous_usage=bool(stream.include_usage and stream.continuous_usage_stats),
        return_token_ids=bool(given.return_token_ids),
        tokens_as_ids=bool(given.return_tokens_as_token_ids),
        rid=given.rid or given.request_id or f"{prefix}{uuid.uuid4().hex}",
        salt=salt_of(given.cache_salt, given.extra_key),
        priority=given.priority or 0,
        timeout_s=given.timeout,
        rank=first(given.routed_dp_rank, given.data_parallel_rank),
    )


@dataclass(frozen=True)
class CompletionRequest:
    """One call of `/v1/completions`.

    echo:            texts begin with their prompts
    logprobs:        choices have log probabilities;  prompt_logprobs: and those of their prompts, in vLLM's form
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
    given = read_body(body, CompletionBody)
    prompts = prompts_of("prompt", given.prompt, max_prompts)
    names_length = not (given.max_tokens is given.max_completion_tokens is UNSET)
    options = call_options(given, REST_OF_CONTEXT if names_length else _DEFAULT_TOKENS, "cmpl-")
    counts = [count for count in (given.logprobs if given.echo else None, given.prompt_logprobs) if count is not None]
    options = options.with_params(logprobs=given.logprobs, prompt_logprobs=max(counts, default=None))
    call = options.call(prompts, given.add_special_tokens is not False)
    return CompletionRequest(
        call, options, bool(given.echo), given.logprobs is not None, given.prompt_logprobs is not None
    )


@dataclass(frozen=True)
class ChatRequest:
    """One call of `/v1/chat/completions`."""

    prompt: ChatPrompt
    options: CallOptions
    tools: ToolUse
    reasoning: ReasoningUse
    logprobs: bool = False  # choices have log probabilities


def parse_chat(body: bytes) -> ChatRequest:
    """Returns the checked request in a JSON body.

    Raises RequestError with the field, its value and what was expected.
    """
    return check_chat(read_body(body, ChatBody), "chatcmpl-")


def check_chat(given: ChatBody, id_prefix: str) -> ChatRequest:
    """Returns the checked request of a body. id_prefix: of ids that the server draws"""
    prompt = chat_prompt(given)
    options = call_options(given, REST_OF_CONTEXT, id_prefix)
    usable, choice = allowed(given.tools, given.tool_choice)
    prompt = replace(prompt, tools=as_functions(usable))
    tools = tool_use(usable, choice, given.parallel_tool_calls)
    reasoning = ReasoningUse(
        separate=given.separate_reasoning is not False,
        included=given.include_reasoning is not False,
        streamed=given.stream_reasoning is not False,
    )
    if given.top_logprobs and not given.logprobs:
        raise RequestError("top_logprobs is given, but logprobs is not true; set it", field="top_logprobs")
    if given.logprobs:
        options = options.with_params(logprobs=given.top_logprobs or 0)
    if (constraint := tools.constraint()) is not None:
        options = options.with_params(constraint=constraint)
        options.taken.params.validate()
    if tools.choice == "none":
        prompt = replace(prompt, tools=None)  # a model that sees tools would call them
    return ChatRequest(prompt, options, tools, reasoning, bool(given.logprobs))


Words = tuple[tuple[str, str], ...]  # what errors call the fields of a chat, and another API; longer ones first


def check_chat_of(given: ChatBody, id_prefix: str, words: Words) -> ChatRequest:
    """Returns what `check_chat` does; errors, now and about its constraint, are in the words of another API."""
    try:
        checked = check_chat(given, id_prefix)
    except RequestError as error:
        raise RequestError(in_words(str(error), words), error.field and in_words(error.field, words)) from None
    constraint = checked.options.taken.params.constraint
    if constraint is None:
        return checked
    own = replace(constraint, path=in_words(constraint.path, words))
    return replace(checked, options=checked.options.with_params(constraint=own))


def in_words(text: str, words: Words) -> str:
    """Returns a text about fields of a chat with the names that they have in another API."""
    for theirs, ours in words:
        text = text.replace(theirs, ours)
    return text


def response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the form of an output as chats have it. given: as other APIs do, with a schema beside its type"""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


class TokenizeBody(Body):
    """A text, or a chat as for /v1/chat/completions."""

    other_words: ClassVar[Mapping[str, str]] = {"text": "prompt"}
    example: ClassVar[Mapping[str, Any]] = {"prompt": "def "}

    model: Model | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    documents: Documents | None = None
    chat_template: Template | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Kwargs | None = None
    reasoning_effort: Name | None = None
    return_token_strs: bool | None = None
    mm_processor_kwargs: None = None
    media_io_kwargs: None = None


class DetokenizeBody(Body, kw_only=True):
    """Token ids, whose text is the answer."""

    other_words: ClassVar[Mapping[str, str]] = {"input_ids": "tokens", "prompt": "tokens"}
    example: ClassVar[Mapping[str, Any]] = {"tokens": [5, 6]}

    model: Model | None = None
    tokens: Annotated[list[TokenId], Meta(extra={"missing": "send a list of token ids"})]


@dataclass(frozen=True)
class TokenizeRequest:
    """One call of `/tokenize`: a text or a chat; the other is None. return_token_strs: the tokens' spellings, too"""

    model: str | None
    text: str | None
    chat: ChatPrompt | None
    add_special_tokens: bool
    return_token_strs: bool


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Returns the checked request in a JSON body.

    Raises RequestError with the field, its value and what was expected.
    """
    given = read_body(body, TokenizeBody)
    strings = bool(given.return_token_strs)
    if given.prompt is None and given.messages is None:
        raise RequestError("prompt is missing; send a text, or messages of a chat", field="prompt")
    if given.prompt is None:
        chat = chat_prompt(given)
        return TokenizeRequest(given.model, None, chat, chat.add_special_tokens, strings)
    if given.messages is not None:
        raise RequestError("prompt and messages are both given; send one of them", field="messages")
    of_chats = [name for name in _CHAT_ONLY if getattr(given, name) is not None]
    if of_chats:
        raise RequestError(f"{of_chats[0]} belongs to messages, but prompt is given; leave it out", field=of_chats[0])
    return TokenizeRequest(given.model, given.prompt, None, given.add_special_tokens is not False, strings)


_CHAT_ONLY = (
    "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "reasoning_effort",
)  # fmt: skip


def parse_detokenize(body: bytes) -> DetokenizeBody:
    """Returns the request in a JSON body. Raises RequestError with the field, its value and what was expected."""
    return read_body(body, DetokenizeBody)
