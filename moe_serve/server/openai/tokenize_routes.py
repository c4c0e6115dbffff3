"""`/tokenize` and `/detokenize`, with vLLM's fields and answers. Torch-free."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.body_parser import DETOKENIZE_BODY, TOKENIZE_BODY
from moe_serve.server.chat_template import ChatTemplates
from moe_serve.server.doors import Doors
from moe_serve.server.generate import json_bytes
from moe_serve.server.openai.prompting import check_model, most_chars
from moe_serve.server.openai.tokenize_request import TokenizeRequest
from moe_serve.server.prompts import NO_TOKENIZER

_SHORT = 4096  # characters, or tokens; more are worked on in a thread, so that other clients are served meanwhile

T = TypeVar("T")


def add_tokenize(app: FastAPI, doors: Doors, templates: ChatTemplates, name: str) -> None:
    """Adds the routes. name: of the model that is served"""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a chat as its template makes one text of it."""
        async with doors.bodies.read(request) as body:
            given = await doors.parser.parse(body, doors.bridge.capacity, TOKENIZE_BODY)
        check_model(given.model, name)
        tokenizer = _need(doors.tokenizer)
        text = await _text_of(given, doors, templates)
        ids = await _off_the_loop(len(text), lambda: tokenizer.encode(text, given.add_special_tokens))
        strings = [tokenizer.token_of(token_id) for token_id in ids] if given.return_token_strs else None
        max_model_len = doors.bridge.limits.max_model_len
        return _json({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids, with its special tokens."""
        async with doors.bodies.read(request) as body:
            given = await doors.parser.parse(body, doors.bridge.capacity, DETOKENIZE_BODY)
        check_model(given.model, name)
        tokenizer, size = _need(doors.tokenizer), doors.bridge.limits.vocab_size
        ids = given.token_ids
        wrong = next((token_id for token_id in ids if not 0 <= token_id < size), None)
        if wrong is not None:
            raise RequestError(f"tokens holds {wrong}, outside the vocabulary; expected 0 to {size - 1}", "tokens")
        text = await _off_the_loop(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return _json({"prompt": text})


async def _text_of(given: TokenizeRequest, doors: Doors, templates: ChatTemplates) -> str:
    most = most_chars(doors.bridge, doors.tokenizer)
    if given.chat is not None:
        return await templates.render(given.chat, most)
    text = given.text or ""
    if len(text) > most:
        raise RequestError(
            f"prompt has {len(text)} characters, more than any prompt that is served ({most}); shorten it", "prompt"
        )
    return text


def _need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError(f"this needs a tokenizer, but {NO_TOKENIZER}")
    return tokenizer


async def _off_the_loop(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _SHORT else await asyncio.to_thread(work)


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")
