"""Calls written in tags.

Qwen3-Coder:  <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>, with line breaks
GLM-4.5:      <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>, with line breaks
MiniMax-M2:   <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>…

The text of a parameter becomes JSON by the type that its schema gives: a string where that is "string" or not said,
else the JSON that it is, or a string where it is none.
"""

import json
from collections.abc import Mapping
from typing import Any

from moe_serve.server.api.tools.parser import LONGEST_NAME, CallParser, Malformed, Steps, Truncated, as_json
from moe_serve.structured.json_schema import at

_WAYS = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})  # in which a schema says a type
_MAX_PARTS = 256  # of a schema that are looked at for the types of one parameter
_KINDS: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip


class XmlCallParser(CallParser):
    """_parameter reads one; _begin_call and _end_call come before the first and after the last."""

    _schema: Mapping[str, Any]
    _num_parameters: int

    def _begin_call(self, name: str) -> None:
        self._start(name)
        self._schema = self._tools[name]
        self._num_parameters = 0

    def _end_call(self) -> None:
        self._arguments("}" if self._num_parameters else "{}")

    def _tag(self, literal: str) -> Steps[bool]:
        """Reads a tag if it comes next; returns whether it did. Raises Truncated where the text ends inside it."""
        if (yield from self._accept(literal)):
            return True
        if self._has_ended and literal.startswith(self._text):
            raise Truncated
        return False

    def _parameter(self, name: str, end: str) -> Steps[None]:
        """Reads the text of a parameter up to its end tag. Newlines at the tags are not part of it."""
        key = f"{', ' if self._num_parameters else '{'}{as_json(name)}: "
        self._num_parameters += 1
        yield from self._accept("\n")
        if self._kinds(name) == {"string"}:
            self._arguments(key + '"')
            found = yield from self._until((f"\n{end}", end), self._say_text, drop_space=False)
            if found:
                self._arguments('"')
            return
        pieces: list[str] = []
        found = yield from self._until((f"\n{end}", end), pieces.append, drop_space=False)
        text = "".join(pieces)
        self._arguments(key + (_value(text, self._kinds(name)) if found else text))

    def _say_text(self, text: str) -> None:
        self._arguments(as_json(text)[1:-1])

    def _kinds(self, name: str) -> frozenset[str]:
        """Returns the types that a parameter may have; none where its schema does not say."""
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        if not isinstance(schema, Mapping):
            return frozenset({"string"})
        says = schema.keys() & _WAYS
        return _kinds_of(schema, self._schema) if says else frozenset({"string"})


def _kinds_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types that a value may have; none where its schema does not say. root: what references count from"""
    kinds: set[str] = set()
    waiting: list[Any] = [schema]
    seen: set[str] = set()
    for _ in range(_MAX_PARTS):
        if not waiting:
            return frozenset(kinds)
        part = waiting.pop()
        match part:
            case {"type": str(kind)}:
                kinds.add(kind)
            case {"type": [*several]}:
                kinds |= {str(kind) for kind in several}
            case {"enum": [*values]}:
                kinds |= {_KINDS[type(value)] for value in values[:_MAX_PARTS]}
            case {"const": value}:
                kinds.add(_KINDS[type(value)])
            case {"anyOf": [*ways]} | {"oneOf": [*ways]} | {"allOf": [*ways]} if len(ways) <= _MAX_PARTS:
                waiting += ways
            case {"$ref": str(reference)}:
                if reference not in seen:
                    seen.add(reference)
                    waiting.append(at(root, reference[1:]) if reference.startswith("#") else None)
            case _:
                break
    return frozenset()


def _value(text: str, kinds: frozenset[str]) -> str:
    """Returns a text as JSON: as what it is where its types allow it, or as a string."""
    if "string" in kinds and (text.strip() != "null" or "null" not in kinds):
        return as_json(text)
    try:
        return as_json(json.loads(text))
    except (ValueError, RecursionError):
        word = text.strip().lower()  # Python's words, which models write
        return {"true": "true", "false": "false", "none": "null"}.get(word) or as_json(text)


class Qwen3CoderParser(XmlCallParser):
    markers = ("<tool_call>", "<function=")

    def _calls(self, marker: str) -> Steps[None]:
        if marker == "<tool_call>":
            yield from self._skip_space()
            yield from self._expect("<function=")
        while True:
            self._begin_call((yield from self._word_until(">", LONGEST_NAME)).strip())
            yield from self._skip_space()
            while (yield from self._tag("<parameter=")):
                name = yield from self._word_until(">", LONGEST_NAME)
                yield from self._parameter(name.strip(), "</parameter>")
                yield from self._skip_space()
            self._end_call()
            yield from self._expect("</function>")
            yield from self._skip_space()
            yield from self._accept("</tool_call>")
            yield from self._skip_space()
            if not (yield from self._accept("<function=")):
                return


class Glm45Parser(XmlCallParser):
    markers = ("<tool_call>",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        # A name ends at a line's end, or at the first tag.
        name = ""
        while (char := (yield from self._next())) not in ("\n", "<", ""):
            if len(name) > LONGEST_NAME:
                raise Malformed
            name += self._take(1)
        if not char:
            raise Truncated
        self._begin_call(name.strip())
        yield from self._skip_space()
        while (yield from self._tag("<arg_key>")):
            key = yield from self._word_until("</arg_key>", LONGEST_NAME)
            yield from self._skip_space()
            yield from self._expect("<arg_value>")
            yield from self._parameter(key.strip(), "</arg_value>")
            yield from self._skip_space()
        self._end_call()
        yield from self._expect("</tool_call>")
        yield from self._skip_space()


class MiniMaxM2Parser(XmlCallParser):
    markers = ("<minimax:tool_call>",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if not (yield from self._accept("<invoke name=")):
            raise Malformed
        while True:
            self._begin_call(_unquoted((yield from self._word_until(">", LONGEST_NAME))))
            yield from self._skip_space()
            while (yield from self._tag("<parameter name=")):
                name = yield from self._word_until(">", LONGEST_NAME)
                yield from self._parameter(_unquoted(name), "</parameter>")
                yield from self._skip_space()
            self._end_call()
            yield from self._expect("</invoke>")
            yield from self._skip_space()
            if not (yield from self._accept("<invoke name=")):
                break
        yield from self._accept("</minimax:tool_call>")
        yield from self._skip_space()


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")
