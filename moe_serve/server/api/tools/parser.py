"""What all parsers of reasoning and tool calls share. Pure functions of the text, which comes in pieces.

A parser is a generator that yields where it needs more text. Each step decides only by the text, never by where a piece
ended, so the parts do not depend on the pieces.

A call is given as soon as the name of one of the client's functions is read, and its arguments as they come. What is
malformed before is content, with its markers; what is malformed later is content from there on. Of a call that the end
of the text cuts off, unfinished markers are dropped. Control characters in strings, which models write although JSON
forbids them, are handed on escaped.
"""

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

_JSON_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string
_IN_WORD = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LONGEST_WORD = 400  # characters of a number
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):
    """The text is not what its format says."""


class Truncated(Malformed):
    """The text ends before its format does."""


class JsonReader:
    """Follows one JSON object or list. is_done: its last character was read;  has_failed: it is no JSON"""

    def __init__(self) -> None:
        self.is_done = False
        self.has_failed = False
        self._open: list[str] = []  # brackets
        self._wants = "value"  # or "key", "key or end", "value or end", "colon", "comma"
        self._string: str | None = None  # None, or what is special: "", "\\", "u", "uX", ...
        self._word = ""  # of a number or true, false, null that may go on

    @property
    def unsaid(self) -> str:
        """What was read and not handed on."""
        return self._word

    def read(self, text: str) -> tuple[str, int]:
        """Returns the JSON that is certain with more text, and how many characters of it were read.

        It stops behind the value, and before the first character that makes it no JSON: then it `has_failed`.
        """
        said: list[str] = []
        at = 0
        while at < len(text) and not self.is_done:
            if self._string == "" and (run := _PLAIN.match(text, at)):
                said.append(run[0])
                at = run.end()
                continue
            try:
                said.append(self._read_one(text[at]))
            except Malformed:
                self.has_failed = True
                break
            at += 1
        return "".join(said), at

    def _read_one(self, char: str) -> str:
        if self._string is not None:
            return self._in_string(char)
        if char in _IN_WORD:
            if self._wants not in ("value", "value or end") or len(self._word) >= _LONGEST_WORD:
                raise Malformed
            self._word += char
            return ""
        word = self._word
        if word:
            # Only objects and lists say where they end.
            if not self._open or (word not in ("true", "false", "null") and not _NUMBER.match(word)):
                raise Malformed
            self._wants = "comma"
        if char not in _JSON_SPACE:
            self._structure(char)
        self._word = ""  # not before: of what is no JSON, it is unsaid
        return word + char

    def _structure(self, char: str) -> None:
        wants = self._wants
        if char in "{[" and wants in ("value", "value or end"):
            self._open.append(char)
            self._wants = "key or end" if char == "{" else "value or end"
        elif char == '"' and wants in ("key", "key or end", "value", "value or end") and self._open:
            self._string = ""
            self._wants = "colon" if wants.startswith("key") else "comma"
        elif char == ":" and wants == "colon":
            self._wants = "value"
        elif char == "," and wants == "comma":
            self._wants = "key" if self._open[-1] == "{" else "value"
        elif char in "}]" and self._open and wants != "colon" and (wants == "comma" or wants.endswith(" or end")):
            if (char == "}") != (self._open.pop() == "{"):
                raise Malformed
            self._wants = "comma"
            self.is_done = not self._open
        else:
            raise Malformed

    def _in_string(self, char: str) -> str:
        special, self._string = self._string, ""
        if special == "\\":
            if char not in _ESCAPES:
                raise Malformed
            self._string = "u" if char == "u" else ""
        elif special:
            if char not in _HEX:
                raise Malformed
            self._string = special + "x" if len(special) < 4 else ""
        elif char == "\\":
            self._string = "\\"
        elif char == '"':
            self._string = None
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char


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


LONGEST_NAME = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters of each function, by its name


class CallParser(StreamParser):
    """A parser of content with calls that begin with one of `markers`."""

    markers: tuple[str, ...] = ()

    def __init__(self, tools: Tools):
        self._tools = tools
        self._num_calls = 0
        self._has_call = False  # a call began behind the last marker
        super().__init__()

    def _parse(self) -> Steps[None]:
        while True:
            marker = yield from self._until(self.markers, lambda text: self._add(Content(text)))
            if not marker:
                return
            self._has_call = False
            try:
                yield from self._calls(marker)
                self._unsaid.clear()
            except Truncated:
                if self._has_call:
                    return
                self._give_back()
            except Malformed:
                self._give_back()

    def _calls(self, marker: str) -> Steps[None]:
        """Reads what follows a marker, up to the end of the last call of its section."""
        raise NotImplementedError

    def _start(self, name: str, call_id: str | None = None) -> None:
        """Says that a call begins. Raises Malformed for a function that the client has not."""
        if name not in self._tools:
            raise Malformed
        self._say(CallStart(self._num_calls, name, call_id))
        self._num_calls += 1
        self._has_call = True

    def _arguments(self, text: str) -> None:
        """Says more of the arguments of the call that began last."""
        self._say(CallArguments(self._num_calls - 1, text))

    def _json_arguments(self) -> Steps[None]:
        """Reads the arguments of a call: a JSON object as it comes."""
        if (yield from self._next()) != "{":
            raise Malformed
        yield from self._json(say=True)

    def _json(self, say: bool = False) -> Steps[str]:
        """Returns a JSON object or list. say: as arguments, while it comes. Raises Malformed."""
        reader, parts = JsonReader(), []
        while True:
            said, count = reader.read(self._text)
            self._take(count)
            if say and said:
                self._arguments(said)
                self._unsaid.append(reader.unsaid)
            parts.append(said)
            if reader.is_done:
                return "".join(parts)
            if reader.has_failed:
                raise Malformed
            if self._has_ended:
                if say:
                    self._arguments(reader.unsaid)
                raise Truncated
            yield

    def _json_string(self) -> Steps[str]:
        """Returns the text of a JSON string. Raises Malformed where there is none."""
        yield from self._expect('"')
        raw: list[str] = []  # ends at quotes
        while True:
            raw.append((yield from self._word_until('"', longest=1 << 16)))
            num_backslashes = len(raw[-1]) - len(raw[-1].rstrip("\\"))
            if num_backslashes % 2 == 0:
                break
        quoted = '"'.join(raw)
        try:
            text = json.loads(f'"{quoted}"', strict=False)
        except ValueError:
            raise Malformed from None
        assert isinstance(text, str)
        return text


def as_json(value: object) -> str:
    """Returns a value as JSON that can be sent: halves of surrogate pairs stay escaped, as the model wrote them.

    Raises ValueError for numbers that JSON has not, which Python reads from 1e999 and NaN.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
