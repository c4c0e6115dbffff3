"""What parsers give: the parts of a message, in order. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a function begins. id: that the model gave it, None = none"""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of a call: together they are one JSON object, where the model has finished it."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Reads one output."""

    def push(self, text: str) -> list[Part]:
        """Returns the parts that are certain with more text."""

    def finish(self) -> list[Part]:
        """Returns what was held back. Nothing comes after it."""


def joined(parts: Iterable[Part]) -> list[Part]:
    """Returns parts with neighbours of the same kind as one; an empty text is none."""
    whole: list[Part] = []
    texts: list[str] = []  # of the last part, which copying for each of them would make slow
    for part in parts:
        if isinstance(part, CallStart):
            _finish(whole, texts)
            whole.append(part)
        elif part.text:
            last = whole[-1] if whole else None
            if last is None or isinstance(last, CallStart) or replace(last, text=part.text) != part:
                _finish(whole, texts)
                whole.append(part)
            texts.append(part.text)
    _finish(whole, texts)
    return whole


def _finish(whole: list[Part], texts: list[str]) -> None:
    """Gives the last part its text, of which it has the first piece."""
    if len(texts) > 1:
        last = whole[-1]
        assert not isinstance(last, CallStart)
        whole[-1] = replace(last, text="".join(texts))
    texts.clear()
