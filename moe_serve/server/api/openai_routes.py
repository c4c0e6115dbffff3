"""OpenAI's routes, Anthropic's, and those of the tokenizer: from a request to its answer.

They differ from `/generate` only in the form of bodies and answers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.anthropic import MessagesAnswers, parse_count, parse_messages
from moe_serve.server.api.embeddings import (
    EmbeddingAnswers,
    EmbeddingRequest,
    PairsAnswers,
    PairsRequest,
    RerankAnswers,
    RerankRequest,
    names_pairs,
    parse_embeddings,
    parse_pairs,
    parse_rerank,
)
from moe_serve.server.api.generate import Call, CallResponse, RequestPipeline, texts_of
from moe_serve.server.api.openai_answers import ChatAnswers, CompletionAnswers
from moe_serve.server.api.openai_requests import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from moe_serve.server.api.params import OPENAI_NAMES, ParamNames, TakenParams
from moe_serve.server.api.parsed_output import OutputParser, OutputParsers
from moe_serve.server.api.responses import ResponseAnswers, ResponseRequest, parse_response
from moe_serve.server.api.score import ScoreAnswers, ScoreRequest, parse_score
from moe_serve.server.edge.errors import UnknownModelError, json_bytes, json_response
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.prompts import NO_TOKENIZER, GenerateRequest
from moe_serve.server.workers.chat_template import ChatTemplates


def check_model(asked: str | None, names: Sequence[str]) -> None:
    """Raises UnknownModelError unless a call names no model, or the one that is served. names: of the served model"""
    if asked is not None and asked not in names:
        served = " or ".join(map(repr, names))
        raise UnknownModelError(
            f"model is {asked[:100]!r}, but this server serves {served}; send this name, or none", field="model"
        )


def most_chars(bridge: Bridge, tokenizer: Tokenizer | None) -> int:
    """Returns the characters of the longest text that can be a prompt. Raises RequestError without a tokenizer."""
    if tokenizer is None:
        raise RequestError(
            f"messages need a tokenizer, but {NO_TOKENIZER}; send token ids to /v1/completions", field="messages"
        )
    return bridge.limits.max_prompt_len * tokenizer.longest_token


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
RESPONSE_NAMES = ParamNames({**OPENAI_NAMES.other, "max_new_tokens": ("max_output_tokens",)})
MESSAGE_NAMES = ParamNames({**OPENAI_NAMES.other, "stop": ("stop_sequences",)})
CHAT_NAMES = ParamNames({**OPENAI_NAMES.other, "logprobs": ("top_logprobs",)})
SCORE_NAMES = ParamNames({"logprob_token_ids": ("label_token_ids",), "return_embedding": ("text_2",)})
EMBEDDING_NAMES = ParamNames({"return_embedding": ("input",)})
RERANK_NAMES = ParamNames({"return_embedding": ("documents",)})


def add_openai(
    app: FastAPI,
    pipeline: RequestPipeline,
    templates: ChatTemplates,
    parsers: OutputParsers,
    names: Sequence[str],
    defaults: Mapping[str, Any],
) -> None:
    """Adds the routes.

    names:    of the served model; answers have the first
    defaults: of SamplingParams, for fields that a call leaves out
    """
    bridge, name = pipeline.bridge, names[0]

    async def call_of_chat(request: Request, given: ChatRequest) -> GenerateRequest:
        check_model(given.options.model, names)
        client = str(request.state.client)
        text = await templates.render(given.prompt, most_chars(bridge, pipeline.tokenizer), client)
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
            check_model(given.options.model, names)
            return _with_defaults(given.call, given.options.taken, defaults)

        parse = partial(parse_completion, max_prompts=bridge.book.capacity)
        given, call = await pipeline.open(request, parse, call_of, partial(_in_openai_words, prompt="prompt"))
        return CallResponse(
            call, bridge, CompletionAnswers(given, call, name, pipeline.tokenizer), given.options.stream
        )

    @app.post(CHAT)
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions: the model's chat template makes one text of the messages; JSON or a stream."""

        words = partial(_in_openai_words, prompt="messages", names=CHAT_NAMES)
        given, call = await pipeline.open(request, parse_chat, partial(call_of_chat, request), words)
        text_of = texts_of(None if given.options.tokens_as_ids else pipeline.tokenizer)
        answers = ChatAnswers(given, call, name, text_of, parser_of(given, call))
        return CallResponse(call, bridge, answers, given.options.stream)

    @app.post(RESPONSES)
    async def responses(request: Request) -> Response:
        """OpenAI's responses: as a chat, with items in and out, JSON or a stream. Nothing is stored."""

        async def call_of(given: ResponseRequest) -> GenerateRequest:
            return await call_of_chat(request, given.chat)

        words = partial(_in_openai_words, prompt="input", names=RESPONSE_NAMES)
        given, call = await pipeline.open(request, parse_response, call_of, words)
        answers = ResponseAnswers(given, name, parser_of(given.chat, call)())
        return CallResponse(call, bridge, answers, given.chat.options.stream)

    @app.post(MESSAGES)
    async def messages(request: Request) -> Response:
        """Anthropic's messages: as a chat, with blocks in and out, JSON or a stream."""
        words = partial(_in_openai_words, prompt="messages", names=MESSAGE_NAMES)
        given, call = await pipeline.open(request, parse_messages, partial(call_of_chat, request), words)
        return CallResponse(call, bridge, MessagesAnswers(given, name, parser_of(given, call)()), given.options.stream)

    async def call_of_model(given: EmbeddingRequest | RerankRequest | PairsRequest | ScoreRequest) -> GenerateRequest:
        check_model(given.model, names)
        return given.call

    @app.post(EMBEDDINGS)
    async def embeddings(request: Request) -> Response:
        """OpenAI's embeddings: of each text the last hidden row, of length 1."""
        parse = partial(parse_embeddings, max_prompts=bridge.book.capacity)
        words = partial(_in_openai_words, prompt="input", names=EMBEDDING_NAMES)
        given, call = await pipeline.open(request, parse, call_of_model, words)
        return CallResponse(call, bridge, EmbeddingAnswers(given, name), stream=False)

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(request: Request) -> Response:
        """Documents by the likeness of their embeddings to that of a query, as Jina, Cohere and vLLM answer."""
        parse = partial(parse_rerank, max_prompts=bridge.book.capacity)
        words = partial(_in_openai_words, prompt="documents", names=RERANK_NAMES)
        given, call = await pipeline.open(request, parse, call_of_model, words)
        return CallResponse(call, bridge, RerankAnswers(given, name), stream=False)

    @app.post("/score")
    async def pairs(request: Request) -> Response:
        """vLLM's scores: how alike the texts of each pair are by their embeddings."""
        parse = partial(parse_pairs, max_prompts=bridge.book.capacity)
        given, call = await pipeline.open(request, parse, call_of_model, _in_words_of_scores)
        return CallResponse(call, bridge, PairsAnswers(given, name), stream=False)

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        """SGLang's scores: the probabilities of some tokens behind a query and each item; and what /score has."""

        def parse(body: bytes) -> ScoreRequest | PairsRequest:
            if names_pairs(body):
                return parse_pairs(body, bridge.book.capacity)
            return parse_score(body, bridge.book.capacity, bridge.limits, pipeline.tokenizer)

        given, call = await pipeline.open(request, parse, call_of_model, _in_words_of_scores)
        answers = PairsAnswers(given, name) if isinstance(given, PairsRequest) else ScoreAnswers(given, name)
        return CallResponse(call, bridge, answers, stream=False)

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """The number of tokens in the prompt that /v1/messages would make of the same body."""
        client = str(request.state.client)
        async with pipeline.read(request, parse_count) as given:
            check_model(given.options.model, names)
        text = await templates.render(given.prompt, most_chars(bridge, pipeline.tokenizer), client)
        tokenizer = need_tokenizer(pipeline.tokenizer)
        ids = await pipeline.beside_the_loop(
            client, len(text), lambda: tokenizer.encode(text, given.prompt.add_special_tokens)
        )
        return json_response({"input_tokens": len(ids)})


def _with_defaults(call: GenerateRequest, taken: TakenParams, defaults: Mapping[str, Any]) -> GenerateRequest:
    """Returns the call with defaults in place of the fields that the client left out."""
    left_out = {name: value for name, value in defaults.items() if name not in taken.given}
    prompts = (replace(prompt, params=replace(prompt.params, **left_out)) for prompt in call.prompts)
    return replace(call, prompts=tuple(prompts)) if left_out else call


def _in_openai_words(error: RequestError, prompt: str, names: ParamNames = OPENAI_NAMES) -> RequestError:
    """Returns an error about SGLang's fields with OpenAI's names. prompt: OpenAI's field for the prompt"""
    message, field = str(error), error.field
    if field is None:
        return error
    if field in ("text", "input_ids"):
        return RequestError(re.sub(rf"^{field}\b", prompt, message), prompt)
    shorter = RequestError(message.replace("sampling_params.", ""), field.removeprefix("sampling_params."))
    return names.translated(shorter)


def _in_words_of_scores(error: RequestError) -> RequestError:
    """Returns an error about a prompt, which is a query and an item, as one about both of them."""
    if error.field in ("text", "input_ids"):
        return RequestError(re.sub(rf"^{error.field}\b", "query with an item", str(error)), "items")
    return _in_openai_words(error, "items", SCORE_NAMES)


def add_tokenize(app: FastAPI, pipeline: RequestPipeline, templates: ChatTemplates, names: Sequence[str]) -> None:
    """Adds the routes. names: of the model that is served"""

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """vLLM's facts about the tokenizer: its special tokens, and the chat template."""
        need_tokenizer(pipeline.tokenizer)
        return json_response(templates.tokenizer_info())

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a chat as its template makes one text of it."""
        client = str(request.state.client)
        async with pipeline.read(request, parse_tokenize) as given:
            check_model(given.model, names)
        tokenizer = need_tokenizer(pipeline.tokenizer)
        text = await _text_of(given, pipeline, templates, client)
        max_model_len = pipeline.bridge.limits.max_model_len

        def work() -> bytes:
            ids = tokenizer.encode(text, given.add_special_tokens)
            strings = [tokenizer.token_of(token_id) for token_id in ids] if given.return_token_strs else None
            answer = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
            return json_bytes(answer)

        return _json(await pipeline.beside_the_loop(client, len(text), work))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids, with its special tokens."""
        client = str(request.state.client)
        async with pipeline.read(request, parse_detokenize) as given:
            check_model(given.model, names)
        tokenizer, size = need_tokenizer(pipeline.tokenizer), pipeline.bridge.limits.vocab_size
        ids = given.tokens

        def work() -> bytes:
            wrong = next((token_id for token_id in ids if not 0 <= token_id < size), None)
            if wrong is not None:
                raise RequestError(f"tokens holds {wrong}, outside the vocabulary; expected 0 to {size - 1}", "tokens")
            return json_bytes({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})

        return _json(await pipeline.beside_the_loop(client, len(ids), work))


async def _text_of(given: TokenizeRequest, pipeline: RequestPipeline, templates: ChatTemplates, client: str) -> str:
    most = most_chars(pipeline.bridge, pipeline.tokenizer)
    if given.chat is not None:
        return await templates.render(given.chat, most, client)
    text = given.text or ""
    if len(text) > most:
        raise RequestError(
            f"prompt has {len(text)} characters, more than any prompt that is served ({most}); shorten it", "prompt"
        )
    return text


def need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError(f"this needs a tokenizer, but {NO_TOKENIZER}")
    return tokenizer


def _json(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
