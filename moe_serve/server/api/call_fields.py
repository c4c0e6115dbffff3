"""Checks of the fields that calls of every API have: prompts, priority, time, rank."""

from typing import Any, TypeGuard

from moe_serve.errors import RequestError
from moe_serve.server.edge.json_fields import real_number, show, token_ids, whole_number
from moe_serve.server.requests.admission import MAX_PRIORITY


def check_num_prompts(field: str, batch: Any, max_prompts: int) -> None:
    """Raises RequestError for a batch that can never be accepted."""
    if is_batch(batch) and len(batch) > max_prompts:
        raise RequestError(
            f"{field} has {len(batch)} prompts but at most {max_prompts} requests are held at a time "
            "(engine.max_running_requests x ranks + engine.max_queued_requests); send fewer at once",
            field=field,
        )


def is_batch(value: Any) -> TypeGuard[list[Any]]:
    """Returns whether a value is a list of prompts, and not one prompt."""
    return isinstance(value, list) and (not value or not isinstance(value[0], int))


def text_or_texts(name: str, value: Any) -> str | list[str]:
    """Checks a text, or a list of them."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        wrong = next((i for i, item in enumerate(value) if not isinstance(item, str)), None)
        if wrong is None:
            return value
        name, value = f"{name}[{wrong}]", value[wrong]
    raise RequestError(f"{name} is {show(value)}, expected a string or a list of strings", field=name)


def ids_or_batch(name: str, value: Any) -> list[int] | list[list[int]]:
    """Checks the token ids of a prompt, or of several."""
    if not isinstance(value, list):
        raise RequestError(f"{name} is {show(value)}, expected a list of token ids", field=name)
    if value and isinstance(value[0], list):
        for i, item in enumerate(value):
            token_ids(f"{name}[{i}]", item)
        return value
    if not value:
        raise RequestError(f"{name} is an empty list, expected at least one token id", field=name)
    return list(token_ids(name, value))


def timeout(name: str, value: Any) -> float:
    """Checks a time in seconds."""
    seconds = real_number(name, value)
    if seconds <= 0:
        raise RequestError(f"{name} is {show(value)}, expected seconds above 0", field=name)
    return seconds


def priority(name: str, value: Any) -> int:
    """Checks a priority."""
    number = whole_number(name, value)
    if abs(number) > MAX_PRIORITY:
        raise RequestError(f"{name} is {number}, expected {-MAX_PRIORITY} to {MAX_PRIORITY}", field=name)
    return number


def first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)
