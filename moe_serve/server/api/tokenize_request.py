"""Parses the bodies of `/tokenize` and `/detokenize`, which have vLLM's fields."""

from dataclasses import dataclass
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.server.api.messages import MAX_DEPTH, ChatPrompt, take_chat_prompt
from moe_serve.server.api.openai_requests import model_name
from moe_serve.server.edge.json_fields import Fields, boolean, parse_nested_object, show, token_ids


@dataclass(frozen=True)
class TokenizeRequest:
    """One call of `/tokenize`: text, or a chat; the other is None. return_token_strs: the tokens' own spellings, too"""

    model: str | None
    text: str | None
    chat: ChatPrompt | None
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True)
class DetokenizeRequest:
    """One call of `/detokenize`."""

    model: str | None
    token_ids: tuple[int, ...]


def parse_tokenize(body: bytes, max_prompts: int) -> TokenizeRequest:
    """Returns the checked request in a JSON body. max_prompts: of a batch, which this never is

    Raises RequestError with the field, its value and what was expected.
    """
    content = parse_nested_object(body, MAX_DEPTH)
    values = Fields(content, "", {"mm_processor_kwargs": (), "media_io_kwargs": ()}, {"text": "prompt"})
    model = values.take("model", model_name)
    strings = bool(values.take("return_token_strs", boolean))
    text = values.take("prompt", _text)
    if text is not None:
        if content.get("messages") is not None:
            raise RequestError("prompt and messages are both given; send one of them", field="messages")
        special = values.take("add_special_tokens", boolean) is not False
        values.take("messages", lambda name, value: None)
        values.refuse_the_rest()
        return TokenizeRequest(model, text, None, special, strings)
    if content.get("messages") is None:
        raise RequestError("prompt is missing; send a text, or messages of a chat", field="prompt")
    chat = take_chat_prompt(values)
    values.refuse_the_rest()
    return TokenizeRequest(model, None, chat, chat.add_special_tokens, strings)


def parse_detokenize(body: bytes, max_prompts: int) -> DetokenizeRequest:
    """Returns the checked request in a JSON body. max_prompts: of a batch, which this never is

    Raises RequestError with the field, its value and what was expected.
    """
    values = Fields(parse_nested_object(body, MAX_DEPTH), "", {}, {"input_ids": "tokens", "prompt": "tokens"})
    model = values.take("model", model_name)
    ids = values.take("tokens", token_ids)
    if ids is None:
        raise RequestError("tokens is missing; send a list of token ids", field="tokens")
    values.refuse_the_rest()
    return DetokenizeRequest(model, ids)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} is {show(value)}, expected a string", field=name)
    return value
