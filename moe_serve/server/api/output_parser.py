"""What becomes of the text that a model writes in a chat: the fields of OpenAI's messages. Torch-free.

The same parser reads an answer that is streamed and one that is not, which it gets in one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Delta = dict[str, Any]  # what is new of a message, as in OpenAI's chunks: {"content": "more text"}


@dataclass(frozen=True)
class NewOutput:
    """What a model has written since the last one.

    text:      released by the StopMatcher; token_ids: the tokens that came with it, some of whose text may come later
    finish:    why the output ends with it: "stop", "length" or "abort"; None: more comes
    """

    text: str
    token_ids: Sequence[int]
    finish: str | None


class OutputParser(Protocol):
    """Reads the output of one choice."""

    def push(self, new: NewOutput) -> list[Delta]:
        """Returns what is new of the message; all that was held back, where the output ends."""

    def finish_reason(self, reason: str) -> str:
        """Returns why the message ended in OpenAI's words, such as "tool_calls" for a "stop"."""

    def reasoning_tokens(self) -> int | None:
        """Returns how many tokens of the output were reasoning; None where that is not known."""


class PlainText:
    """All that the model writes is the message's content."""

    def push(self, new: NewOutput) -> list[Delta]:
        return [{"content": new.text}] if new.text else []

    def finish_reason(self, reason: str) -> str:
        return reason

    def reasoning_tokens(self) -> int | None:
        return None


def merged(deltas: list[Delta]) -> Delta:
    """Returns the fields of several deltas as those of one: their texts joined, calls by their index."""
    texts: dict[str, list[str]] = {}
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        for key, value in delta.items():
            if key != "tool_calls":
                texts.setdefault(key, []).append(value)
                continue
            for call in value:
                calls.setdefault(call["index"], call)
                arguments.setdefault(call["index"], []).append(call["function"]["arguments"])
    message: Delta = {key: "".join(parts) for key, parts in texts.items()}
    if calls:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": "".join(arguments[index])}}
            for index, call in calls.items()
        ]
    return message


def whole_message(deltas: list[Delta]) -> Delta:
    """Returns the message of all deltas of an output, whose calls are numbered by their order alone."""
    message: Delta = {"role": "assistant", "content": None, **merged(deltas)}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in message["tool_calls"]
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message
