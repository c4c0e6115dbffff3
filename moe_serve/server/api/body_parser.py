"""Parses the bodies of calls: small ones here, large ones in processes of their own.

Python parses 16 MiB of JSON in up to three seconds, in which no other thread runs. A process can also be bounded: it
gets one body at a time, so much memory, and so many seconds.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from moe_serve.errors import RequestError
from moe_serve.server.api.openai_requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from moe_serve.server.api.response_request import ResponseRequest, parse_response
from moe_serve.server.api.schemas import parse_generate
from moe_serve.server.api.tokenize_request import DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize
from moe_serve.server.requests.prompts import GenerateRequest
from moe_serve.server.workers.helper_process import HelperEnded, HelperPair, TooLongError

SMALL_BYTES = 1 << 14  # parsed within some 2 ms, whatever is in them
HEAD = struct.Struct("<BI")  # in front of a body for the process: its kind's place in KINDS, max_prompts
_DEADLINE_S = 15.0  # for one body
_SHORT_S = 0.03  # of a core: 300 KB of messages take so long
_MAX_CORE_S = 10.0  # 16 MiB take up to three seconds

T = TypeVar("T")


@dataclass(frozen=True)
class BodyKind(Generic[T]):
    """What the bodies of one route hold. parse: gets a body and max_prompts;  form: what it returns"""

    parse: Callable[[bytes, int], T]
    form: type[T]


GENERATE_BODY = BodyKind(parse_generate, GenerateRequest)
COMPLETION_BODY = BodyKind(parse_completion, CompletionRequest)
CHAT_BODY = BodyKind(parse_chat, ChatRequest)
RESPONSE_BODY = BodyKind(parse_response, ResponseRequest)
TOKENIZE_BODY = BodyKind(parse_tokenize, TokenizeRequest)
DETOKENIZE_BODY = BodyKind(parse_detokenize, DetokenizeRequest)
KINDS: tuple[BodyKind[Any], ...] = (
    GENERATE_BODY,
    COMPLETION_BODY,
    CHAT_BODY,
    RESPONSE_BODY,
    TOKENIZE_BODY,
    DETOKENIZE_BODY,
)


class Parsed(msgspec.Struct, Generic[T]):
    """What the process answers: the request, or what is wrong with it."""

    request: T | None
    message: str = ""
    field: str | None = None


class BodyParser:
    """The parser, and its processes, which `start` or the first large bodies start."""

    def __init__(self) -> None:
        self._processes = HelperPair("moe_serve.server.api.body_parser_process", _DEADLINE_S, _SHORT_S, _MAX_CORE_S)

    async def parse(self, body: bytes, max_prompts: int, kind: BodyKind[T], client: str = "") -> T:
        """Returns the checked request in a body, as kind.parse does. Raises RequestError or QueueFullError."""
        if len(body) <= SMALL_BYTES:
            return kind.parse(body, max_prompts)
        try:
            reply = await self._processes.ask(client, HEAD.pack(KINDS.index(kind), max_prompts), body)
        except (TimeoutError, TooLongError):
            raise RequestError(f"the body takes longer than {_DEADLINE_S:g} s to parse; send a simpler one") from None
        except HelperEnded:
            raise RequestError("the body takes too much memory to parse; send a simpler one") from None
        form: Any = Parsed[kind.form]  # type: ignore[name-defined]
        parsed: Parsed[T] = msgspec.msgpack.decode(reply, type=form)
        if parsed.request is None:
            raise RequestError(parsed.message, parsed.field)
        return parsed.request

    async def start(self) -> None:
        """Starts the processes, so that the first large body need not wait for them."""
        await self._processes.start(HEAD.pack(KINDS.index(GENERATE_BODY), 1) + b"{}")

    async def close(self) -> None:
        """Ends the processes."""
        await self._processes.close()
