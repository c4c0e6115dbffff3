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


def add_part(parts: list[Part], part: Part) -> None:
    """Appends a part, to the last one where both are text of the same kind; an empty text is none."""
    last = parts[-1] if parts else None
    if isinstance(part, CallStart):
        parts.append(part)
    elif part.text:
        if last is None or isinstance(last, CallStart) or replace(last, text=part.text) != part:
            parts.append(part)
        else:
            parts[-1] = replace(last, text=last.text + part.text)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Returns parts with neighbours of the same kind as one."""
    whole: list[Part] = []
    for part in parts:
        add_part(whole, part)
    return whole
