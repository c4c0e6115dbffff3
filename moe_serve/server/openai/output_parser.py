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


class PlainText:
    """All that the model writes is the message's content."""

    def push(self, new: NewOutput) -> list[Delta]:
        return [{"content": new.text}] if new.text else []

    def finish_reason(self, reason: str) -> str:
        return reason


def merged(deltas: list[Delta]) -> Delta:
    """Returns the fields of a whole message from its deltas: their texts joined."""
    message: Delta = {}
    for delta in deltas:
        for key, value in delta.items():
            message[key] = message[key] + value if key in message else value
    return message
