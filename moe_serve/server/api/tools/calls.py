"""What parsers of tool calls share. Torch-free.

A call is given as soon as the name of one of the client's functions is read, and its arguments as they come. What is
malformed before is content, with its markers; what is malformed later is content from there on. Of a call that the end
of the text cuts off, unfinished markers are dropped.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from moe_serve.server.api.tools.json_text import JsonReader, Malformed, Truncated
from moe_serve.server.api.tools.parts import CallArguments, CallStart, Content
from moe_serve.server.api.tools.stream import Steps, StreamParser

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
