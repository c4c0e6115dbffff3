"""Calls written as JSON objects.

Hermes:        <tool_call>{"name": "f", "arguments": {…}}</tool_call>
Mistral:       older [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
               newer [TOOL_CALLS]NAME[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}, with [CALL_ID]… before [ARGS], or without both
forced calls:  a named function: the output is its arguments; required: a list of {"name": …, "parameters": {…}};
               a custom tool with a grammar: the output is its input
"""

import json

from moe_serve.server.api.tools.parser import LONGEST_NAME, CallParser, Malformed, Steps, as_json


class HermesParser(CallParser):
    markers = ("<tool_call>",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._named_call()
        yield from self._skip_space()
        yield from self._accept("</tool_call>")
        yield from self._skip_space()

    def _listed_calls(self) -> Steps[None]:
        """Reads what follows the bracket of a list of such objects."""
        while True:
            yield from self._skip_space()
            yield from self._named_call()
            yield from self._skip_space()
            if (yield from self._accept("]")):
                return
            yield from self._expect(",")

    def _named_call(self) -> Steps[None]:
        """Reads an object with a name and arguments, in either order."""
        yield from self._expect("{")
        has_begun = has_arguments = False
        early: str | None = None  # arguments that came before the name
        name = ""
        yield from self._skip_space()
        while True:
            key = yield from self._json_string()
            yield from self._skip_space()
            yield from self._expect(":")
            yield from self._skip_space()
            if key == "name" and not has_begun:
                name = yield from self._json_string()
                has_begun = name in self._tools
                if early is not None:
                    self._start(name)
                    self._arguments(early)
            elif key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                if has_begun:
                    self._start(name)
                    yield from self._object_or_text()
                else:
                    early = yield from self._json()
                    if not early.startswith("{"):
                        raise Malformed
            else:
                yield from self._any_value()
            yield from self._skip_space()
            if (yield from self._accept("}")):
                break
            yield from self._expect(",")
            yield from self._skip_space()
        if not has_begun:
            raise Malformed
        if not has_arguments:
            self._start(name)
            self._arguments("{}")

    def _object_or_text(self) -> Steps[None]:
        """Reads arguments, which some models write as JSON in a string, or as null."""
        following = yield from self._next()
        if following == "{":
            yield from self._json_arguments()
        elif following == '"':
            text = yield from self._json_string()
            try:
                value = json.loads(text)
                arguments = as_json(value)
            except (ValueError, RecursionError):
                raise Malformed from None
            if not isinstance(value, dict):
                raise Malformed
            self._arguments(arguments)
        else:
            yield from self._expect("null")
            self._arguments("{}")

    def _any_value(self) -> Steps[None]:
        """Reads a value that means nothing to us, such as an id."""
        following = yield from self._next()
        if following == '"':
            yield from self._json_string()
        elif following in "{[" and following:
            yield from self._json()
        else:
            while (yield from self._next()) not in (",", "}", ""):
                self._take(1)


class MistralParser(HermesParser):
    markers = ("[TOOL_CALLS]",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if not (yield from self._accept("[")):
            yield from self._new_call()
            yield from self._skip_space()
            return
        yield from self._listed_calls()
        yield from self._skip_space()

    def _new_call(self) -> Steps[None]:
        header = yield from self._word_until("{", LONGEST_NAME)
        self._text = "{" + self._text  # it belongs to the arguments
        self._unsaid[-1] = self._unsaid[-1][:-1]
        name, _, _ = header.partition("[CALL_ID]")
        self._start(name.replace("[ARGS]", "").strip())
        yield from self._json_arguments()


class NamedCallParser(CallParser):
    """The whole output is the arguments of the one function."""

    def _parse(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._next()):
            yield from self._only_call()

    def _only_call(self) -> Steps[None]:
        (name,) = self._tools
        self._start(name)
        while True:
            if self._text:
                self._arguments(self._take(len(self._text)))
            if self._has_ended:
                return
            yield


class InputParser(NamedCallParser):
    """The whole output is the input of the one custom tool, in which blanks count and which may be empty."""

    def _parse(self) -> Steps[None]:
        yield from self._next()
        yield from self._only_call()


class RequiredCallsParser(HermesParser):
    """The whole output is a list of calls."""

    markers = ("[",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._listed_calls()


def input_of(arguments: str) -> str | None:
    """Returns the input in the arguments by which a model calls a custom tool, {"input": "…"}.

    Arguments without a text of this name are the input themselves. None: they are no JSON, or cut off.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    found = value.get("input") if isinstance(value, dict) else None
    text = found if isinstance(found, str) else arguments
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of pairs cannot be sent
