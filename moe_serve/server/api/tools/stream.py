"""Text that comes in pieces, read as if it were whole: parsers are generators that yield where they need more.

A step decides only by the text, never by where a piece ended, so the parts do not depend on the pieces.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from moe_serve.server.api.tools.json_text import Malformed, Truncated
from moe_serve.server.api.tools.parts import Content, Part, joined

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text

_MAX_SPACE = 16  # whitespace before a marker that is dropped with it; more of it is text
_SPACE = " \t\r\n"
_PIECE = 512  # characters


class StreamParser:
    """A parser whose `_parse` reads its text by the methods below, and adds parts by `_add`."""

    def __init__(self) -> None:
        self._text = ""  # that is not read
        self._has_ended = False
        self._unsaid: list[str] = []  # text that was read since the last part of a call, for `_give_back`
        self._parts: list[Part] = []
        self._steps = self._parse()

    def push(self, text: str) -> list[Part]:
        """Returns the parts that are certain with more text."""
        for start in range(0, len(text), _PIECE):  # reading a marker copies the rest
            self._text += text[start : start + _PIECE]
            next(self._steps, None)
        return self._result()

    def finish(self) -> list[Part]:
        """Returns what was held back."""
        self._has_ended = True
        next(self._steps, None)
        return self._result()

    def _parse(self) -> Steps[None]:
        raise NotImplementedError

    def _result(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)

    def _add(self, part: Part) -> None:
        self._parts.append(part)

    def _say(self, part: Part) -> None:
        """Adds a part that stands for all that was read."""
        self._unsaid.clear()
        self._add(part)

    def _give_back(self) -> None:
        """Makes content of what was read and stands in no part."""
        text = "".join(self._unsaid)
        self._say(Content(text))

    def _take(self, count: int) -> str:
        """Reads so many characters, which are there."""
        taken, self._text = self._text[:count], self._text[count:]
        self._unsaid.append(taken)
        return taken

    def _need(self, count: int) -> Steps[bool]:
        """Returns whether so many characters are there, once it is known."""
        while len(self._text) < count and not self._has_ended:
            yield
        return len(self._text) >= count

    def _next(self) -> Steps[str]:
        """Returns the next character without reading it; "" at the end."""
        yield from self._need(1)
        return self._text[:1]

    def _skip_space(self) -> Steps[None]:
        while True:
            left = self._text.lstrip(_SPACE)
            if len(left) < len(self._text):
                self._take(len(self._text) - len(left))
            if left or self._has_ended:
                return
            yield

    def _accept(self, literal: str) -> Steps[bool]:
        """Reads a literal if it comes next; returns whether it did."""
        while len(self._text) < len(literal) and literal.startswith(self._text) and not self._has_ended:
            yield
        found = self._text.startswith(literal)
        if found:
            self._take(len(literal))
        return found

    def _expect(self, literal: str) -> Steps[None]:
        if not (yield from self._accept(literal)):
            raise Truncated if literal.startswith(self._text) else Malformed

    def _until(
        self, markers: Sequence[str], emit: Callable[[str], None], drop_space: bool = True, consume: bool = True
    ) -> Steps[str]:
        """Hands the text before the first of some markers to `emit` as it comes; returns the marker, "" at the end.

        drop_space: whitespace directly before the marker is not handed out;  consume: the marker is read, too
        No marker may begin with another.
        """
        longest = max(len(marker) for marker in markers)
        while True:
            found = min(((at, m) for m in markers if (at := self._text.find(m)) >= 0), default=None)
            if found is not None:
                at, marker = found
                cut = at - (_spaces_at_end(self._text[max(0, at - _MAX_SPACE) : at]) if drop_space else 0)
                self._hand_out(cut, emit)
                self._take(at - cut + (len(marker) if consume else 0))
                return marker
            if self._has_ended:
                self._hand_out(len(self._text), emit)
                return ""
            keep = _possible_beginning(self._text[-longest + 1 :] if longest > 1 else "", markers)
            if drop_space:
                end = len(self._text) - keep
                keep += _spaces_at_end(self._text[max(0, end - _MAX_SPACE) : end])
            self._hand_out(len(self._text) - keep, emit)
            yield

    def _hand_out(self, count: int, emit: Callable[[str], None]) -> None:
        if count:
            taken, self._text = self._text[:count], self._text[count:]
            emit(taken)

    def _word_until(self, marker: str, longest: int) -> Steps[str]:
        """Returns the text before a marker, which is read, too. Raises Malformed where it is longer, or at the end."""
        while True:
            at = self._text.find(marker, 0, longest + len(marker))
            if at >= 0:
                return self._take(at + len(marker))[:at]
            if len(self._text) >= longest + len(marker):
                raise Malformed
            if self._has_ended:
                raise Truncated
            yield


def _spaces_at_end(text: str) -> int:
    return len(text) - len(text.rstrip(_SPACE))


def _possible_beginning(tail: str, markers: Sequence[str]) -> int:
    """Returns the length of the longest end of a text that begins a marker."""
    for length in range(len(tail), 0, -1):
        if any(marker.startswith(tail[-length:]) for marker in markers):
            return length
    return 0
