"""OpenAI's routes: `/v1/completions`, `/v1/chat/completions` and `/v1/responses`. Torch-free.

They are as `/generate` is in all but the form of bodies and answers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from moe_serve.errors import RequestError
from moe_serve.server.api.body_parser import CHAT_BODY, COMPLETION_BODY, RESPONSE_BODY
from moe_serve.server.api.chat_answers import ChatAnswers
from moe_serve.server.api.chat_request import ChatRequest
from moe_serve.server.api.completion_answers import CompletionAnswers
from moe_serve.server.api.completion_request import CompletionRequest
from moe_serve.server.api.doors import Doors
from moe_serve.server.api.generate import Call, CallResponse
from moe_serve.server.api.openai_logprobs import texts_of
from moe_serve.server.api.output_parser import OutputParser
from moe_serve.server.api.parsed_output import OutputParsers
from moe_serve.server.api.prompting import check_model, most_chars
from moe_serve.server.api.response_answers import ResponseAnswers
from moe_serve.server.api.response_request import ResponseRequest
from moe_serve.server.api.sampling_fields import OPENAI_NAMES, ParamNames, TakenParams
from moe_serve.server.requests.prompts import GenerateRequest
from moe_serve.server.workers.chat_template import ChatTemplates

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
RESPONSE_NAMES = ParamNames({**OPENAI_NAMES.other, "max_new_tokens": ("max_output_tokens",)})
CHAT_NAMES = ParamNames({**OPENAI_NAMES.other, "logprobs": ("top_logprobs",)})


def add_openai(
    app: FastAPI,
    doors: Doors,
    templates: ChatTemplates,
    parsers: OutputParsers,
    name: str,
    defaults: Mapping[str, Any],
) -> None:
    """Adds the routes. name: of the model that is served;  defaults: fields of SamplingParams for calls without them"""
    bridge = doors.bridge

    async def call_of_chat(request: Request, given: ChatRequest) -> GenerateRequest:
        check_model(given.options.model, name)
        client = str(request.state.client)
        text = await templates.render(given.prompt, most_chars(bridge, doors.tokenizer), client)
        options = given.options
        if parsers.needs_special_tokens(given.tools):
            options = options.with_params(skip_special_tokens=False)
        constraint = options.taken.params.constraint
        if constraint is not None:
            start = parsers.form_start(text, given.tools, given.prompt.continued)
            options = options.with_params(constraint=replace(constraint, start=start))
        call = options.call([(text, None)], given.prompt.add_special_tokens)
        return _with_defaults(call, options.taken, defaults)

    def parser_of(given: ChatRequest, call: Call) -> Callable[[], OutputParser]:
        spec, constraint = call.requests[0].spec, given.options.taken.params.constraint
        if constraint is not None and spec.params.constraint is not None:
            constraint = replace(constraint, start=spec.params.constraint.start)
        return parsers.of(given.tools, given.reasoning, spec.prompt_ids, constraint, given.prompt.continued)

    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        """OpenAI's completions: text or token ids, single or batch, JSON or a stream."""

        async def call_of(given: CompletionRequest) -> GenerateRequest:
            check_model(given.options.model, name)
            return _with_defaults(given.call, given.options.taken, defaults)

        given, call = await doors.open(request, COMPLETION_BODY, call_of, partial(_in_openai_words, prompt="prompt"))
        return CallResponse(call, bridge, CompletionAnswers(given, call, name, doors.tokenizer), given.options.stream)

    @app.post(CHAT)
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions: messages, made one text by the model's chat template, JSON or a stream."""

        words = partial(_in_openai_words, prompt="messages", names=CHAT_NAMES)
        given, call = await doors.open(request, CHAT_BODY, partial(call_of_chat, request), words)
        answers = ChatAnswers(given, call, name, texts_of(doors.tokenizer), parser_of(given, call))
        return CallResponse(call, bridge, answers, given.options.stream)

    @app.post(RESPONSES)
    async def responses(request: Request) -> Response:
        """OpenAI's responses: as a chat, with items in and out, JSON or a stream. Nothing is stored."""

        async def call_of(given: ResponseRequest) -> GenerateRequest:
            return await call_of_chat(request, given.chat)

        words = partial(_in_openai_words, prompt="input", names=RESPONSE_NAMES)
        given, call = await doors.open(request, RESPONSE_BODY, call_of, words)
        answers = ResponseAnswers(given, name, parser_of(given.chat, call)())
        return CallResponse(call, bridge, answers, given.chat.options.stream)


def _with_defaults(call: GenerateRequest, taken: TakenParams, defaults: Mapping[str, Any]) -> GenerateRequest:
    """Returns the call with the defaults of fields that the client left out."""
    left_out = {name: value for name, value in defaults.items() if name not in taken.given}
    prompts = (replace(prompt, params=replace(prompt.params, **left_out)) for prompt in call.prompts)
    return replace(call, prompts=tuple(prompts)) if left_out else call


def _in_openai_words(error: RequestError, prompt: str, names: ParamNames = OPENAI_NAMES) -> RequestError:
    """Returns an error about SGLang's fields with OpenAI's names. prompt: the field that holds it"""
    message, field = str(error), error.field
    if field is None:
        return error
    if field in ("text", "input_ids"):
        return RequestError(re.sub(rf"^{field}\b", prompt, message), prompt)
    shorter = RequestError(message.replace("sampling_params.", ""), field.removeprefix("sampling_params."))
    return names.translated(shorter)
