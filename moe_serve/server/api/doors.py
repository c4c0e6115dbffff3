"""What all routes that generate have in common, whatever their API: from a request to its open call. Torch-free."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from fastapi import Request

from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.body_parser import BodyKind, BodyParser
from moe_serve.server.api.generate import Call, start_call
from moe_serve.server.edge.admission_gate import Terms
from moe_serve.server.edge.body import Bodies
from moe_serve.server.edge.client_limits import Client
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.degrade import Degradation
from moe_serve.server.requests.prompts import GenerateRequest
from moe_serve.server.workers.turns import Turns

T = TypeVar("T")


@dataclass(frozen=True)
class Doors:
    """What they need. long_texts: the turns in which long texts of all routes are tokenized"""

    bodies: Bodies
    parser: BodyParser
    bridge: Bridge
    tokenizer: Tokenizer | None
    degradation: Degradation
    long_texts: Turns

    async def open(
        self,
        request: Request,
        kind: BodyKind[T],
        call_of: Callable[[T], Awaitable[GenerateRequest]],
        in_words: Callable[[RequestError], RequestError] = lambda error: error,
    ) -> tuple[T, Call]:
        """Returns the checked body of a request, and its call, which is submitted.

        call_of:  makes the call of the body, such as by a chat template
        in_words: puts an error about SGLang's fields in the words of another API

        Raises RequestError, QueueFullError or UnavailableError.
        """
        terms: Terms = request.state.terms
        caller: Client = request.state.client
        client = str(caller)
        async with self.bodies.read(request) as body:
            given = await self.parser.parse(body, self.bridge.capacity, kind, client)
            asked = self.degradation.apply(await call_of(given), self.bridge.queue, terms.degraded)
            asked = replace(asked, salt=caller.cache_salt(asked.salt))
            try:
                return given, await start_call(
                    asked, self.bridge, self.tokenizer, self.long_texts, terms.permit, client
                )
            except RequestError as error:
                raise in_words(error) from None
