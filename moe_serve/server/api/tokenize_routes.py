"""`/tokenize` and `/detokenize`, with vLLM's fields and answers. Torch-free."""

import asyncio
from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.body_parser import DETOKENIZE_BODY, TOKENIZE_BODY
from moe_serve.server.api.doors import Doors
from moe_serve.server.api.prompting import check_model, most_chars
from moe_serve.server.api.tokenize_request import TokenizeRequest
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.requests.prompts import NO_TOKENIZER
from moe_serve.server.workers.chat_template import ChatTemplates

_SHORT = 4096  # characters, or tokens; more are worked on in a thread, so that other clients are served meanwhile


def add_tokenize(app: FastAPI, doors: Doors, templates: ChatTemplates, name: str) -> None:
    """Adds the routes. name: of the model that is served"""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a chat as its template makes one text of it."""
        client = str(request.state.client)
        async with doors.bodies.read(request) as body:
            given = await doors.parser.parse(body, doors.bridge.capacity, TOKENIZE_BODY, client)
        check_model(given.model, name)
        tokenizer = _need(doors.tokenizer)
        text = await _text_of(given, doors, templates, client)
        max_model_len = doors.bridge.limits.max_model_len

        def work() -> bytes:
            ids = tokenizer.encode(text, given.add_special_tokens)
            strings = [tokenizer.token_of(token_id) for token_id in ids] if given.return_token_strs else None
            answer = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
            return json_bytes(answer)

        return _json(await beside_the_loop(client, len(text), work))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids, with its special tokens."""
        client = str(request.state.client)
        async with doors.bodies.read(request) as body:
            given = await doors.parser.parse(body, doors.bridge.capacity, DETOKENIZE_BODY, client)
        check_model(given.model, name)
        tokenizer, size = _need(doors.tokenizer), doors.bridge.limits.vocab_size
        ids = given.token_ids

        def work() -> bytes:
            wrong = next((token_id for token_id in ids if not 0 <= token_id < size), None)
            if wrong is not None:
                raise RequestError(f"tokens holds {wrong}, outside the vocabulary; expected 0 to {size - 1}", "tokens")
            return json_bytes({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})

        return _json(await beside_the_loop(client, len(ids), work))

    async def beside_the_loop(client: str, size: int, work: Callable[[], bytes]) -> bytes:
        """Returns what the work gives; long work is done in a thread, clients in turns."""
        if size <= _SHORT:
            return work()
        async with doors.long_texts.turn(client):
            return await asyncio.to_thread(work)


async def _text_of(given: TokenizeRequest, doors: Doors, templates: ChatTemplates, client: str) -> str:
    most = most_chars(doors.bridge, doors.tokenizer)
    if given.chat is not None:
        return await templates.render(given.chat, most, client)
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


def _json(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
