"""What routes check before a prompt is made: the model's name, and how long a text may be. Torch-free."""

from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.edge.errors import UnknownModelError
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.prompts import NO_TOKENIZER


def check_model(asked: str | None, name: str) -> None:
    """Raises UnknownModelError for a model that is not served. name: of the one that is"""
    if asked not in (None, name):
        raise UnknownModelError(
            f"model is {asked[:100]!r}, but this server serves {name!r}; send this name, or none", field="model"
        )


def most_chars(bridge: Bridge, tokenizer: Tokenizer | None) -> int:
    """Returns the characters of the longest text that can be a prompt. Raises RequestError without a tokenizer."""
    if tokenizer is None:
        raise RequestError(
            f"messages need a tokenizer, but {NO_TOKENIZER}; send token ids to /v1/completions", field="messages"
        )
    return bridge.limits.max_prompt_len * tokenizer.longest_token
