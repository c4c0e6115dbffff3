"""What each endpoint wants and answers: bodies of requests, and events of its stream. Pure functions, no network."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_serve.bench.prompts import Ask

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}


@dataclass(frozen=True)
class Options:
    """Of every request. extra: fields of the body that win over ours"""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Event:
    """What one event says. Counts are totals so far; None = not said.

    has_output: it brings output;  is_end: the output is complete
    """

    has_output: bool = False
    is_end: bool = False
    error: str | None = None
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None


def body_of(endpoint: str, ask: Ask, options: Options) -> bytes:
    """Returns the body of a request for a stream."""
    if endpoint == "generate":
        params = {"max_new_tokens": ask.max_tokens, "temperature": options.temperature}
        if options.ignore_eos:
            params["ignore_eos"] = True
        body: dict[str, Any] = {"text": ask.prompt, "stream": True, "sampling_params": params}
    else:
        body = {
            "model": options.model,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if endpoint == "chat":
            body |= {"messages": [{"role": "user", "content": ask.prompt}], "max_completion_tokens": ask.max_tokens}
        else:
            body |= {"prompt": ask.prompt, "max_tokens": ask.max_tokens}
        if options.ignore_eos:
            body["ignore_eos"] = True
    return json.dumps(body | dict(options.extra)).encode()


def reader_of(endpoint: str) -> Callable[[bytes], Event]:
    """Returns what reads the data of an event. It raises ValueError for what is not JSON of the expected form."""
    return _read_native if endpoint == "generate" else _read_openai


def error_text(body: bytes) -> str:
    """Returns the message in an error's body, whatever its form, as one short line."""
    try:
        value = json.loads(body)
        error = value.get("error", value) if isinstance(value, dict) else value
        message = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        message = body.decode("utf-8", "replace")
    return " ".join(str(message).split())[:200]


def _read_native(data: bytes) -> Event:
    value = _object(data)
    if "error" in value:
        return Event(error=error_text(data))
    info = value.get("meta_info") or {}
    num_output = info.get("completion_tokens")
    return Event(
        has_output=bool(num_output),
        is_end=info.get("finish_reason") is not None,
        num_prompt=info.get("prompt_tokens"),
        num_output=num_output,
        num_cached=info.get("cached_tokens"),
    )


def _read_openai(data: bytes) -> Event:
    value = _object(data)
    if "error" in value:
        return Event(error=error_text(data))
    choice: dict[str, Any] = next(iter(value.get("choices") or ()), {})
    delta = choice.get("delta")
    is_end = choice.get("finish_reason") is not None
    if delta is None:
        has_output = bool(choice)
    else:  # the first event of a chat may hold the role alone
        has_output = any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    usage = value.get("usage") or {}
    return Event(
        has_output=has_output,
        is_end=is_end,
        num_prompt=usage.get("prompt_tokens"),
        num_output=usage.get("completion_tokens"),
        num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("an event is not an object")
    return value
